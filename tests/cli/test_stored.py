"""`safetune list`, `show`, `path` and `clear`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.outcome import duration

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

DATABASE = "safetune.db"


@pytest.fixture
def tuned(safetune: Any, targets: Path) -> dict[str, Any]:
    """What `tune` said of `add_one` at two shapes and of another kernel."""
    return safetune.json("tune", targets / "add.py")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


class TestEmpty:
    """Where there is no database these commands say so, and make none."""

    @pytest.mark.parametrize(
        ("words", "stdout"),
        [
            (("list",), "No choice is stored yet; run `safetune tune` first.\n"),
            (("list", "--json"), "[]\n"),
        ],
        ids=["text", "json"],
    )
    def test_list(
        self, safetune: Any, cache_dir: Path, words: tuple[str, ...], stdout: str
    ) -> None:
        result = safetune(*words)

        assert (result.exit_code, result.stdout, result.stderr) == (0, stdout, "")
        assert not cache_dir.exists()

    @pytest.mark.parametrize("command", ["show", "clear"])
    @pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
    def test_show_and_clear(
        self, safetune: Any, cache_dir: Path, command: str, options: tuple[str, ...]
    ) -> None:
        result = safetune(command, "add_one", *options)

        message = "no kernel named 'add_one' is stored; the store is empty"
        error = {"error": {"type": "TargetError", "message": message}}
        assert (result.exit_code, result.stderr) == (2, f"Error: {message}\n")
        assert result.stdout == (f"{json.dumps(error, indent=2)}\n" if options else "")
        assert not cache_dir.exists()

    def test_path(self, safetune: Any, cache_dir: Path) -> None:
        assert safetune("path").stdout == f"{cache_dir / DATABASE}\n"
        here = {"path": str(cache_dir / DATABASE), "network": "", "shared": ""}
        assert safetune.json("path") == {**here, "exists": False}
        assert not cache_dir.exists()


class TestList:
    def test_json(self, safetune: Any, tuned: dict[str, Any]) -> None:
        listed = safetune.json("list")

        assert [entry["kernel"] for entry in listed] == ["add_one", "add_one", "kernel"]
        assert [entry["call"]["values"] for entry in listed] == [
            [["N", 100]],
            [["N", 300]],
            [["N", 100]],
        ]
        chosen = {
            (trial["kernel"], trial["shape"]): trial["timing"]["median_ms"]
            for trial in tuned["trials"]
            if trial["chosen"]
        }
        assert [entry["median_ms"] for entry in listed] == [
            chosen["add_one", "small"],
            chosen["add_one", "large"],
            chosen["kernel", "small"],
        ]
        for entry in listed:
            assert entry["generation"] == 1
            assert entry["config"]["BLOCK"] in (64, 128)
            assert entry["device"]["name"]
            assert entry["toolchain"]["triton"]

    def test_table(self, safetune: Any, tuned: dict[str, Any]) -> None:
        """One table for a kernel and device; in a pipe no row is broken."""
        listed = safetune.json("list")

        lines = [line.strip() for line in safetune("list").stdout.splitlines() if line.strip()]

        device = listed[0]["device"]["name"]
        assert [line for line in lines if " on " in line] == [
            f"add_one  on {device}",
            f"kernel  on {device}",
        ]
        rows = [line.split() for line in lines if line.startswith("N=")]
        assert [(row[0], row[2]) for row in rows] == [
            (f"N={entry['call']['values'][0][1]}", f"BLOCK={entry['config']['BLOCK']}")
            for entry in listed
        ]
        assert [row[1] for row in rows] == [t["dtype"] for t in tuned["tunings"][1:]] + ["float16"]

    def test_imports_neither_torch_nor_triton(
        self, tuned: dict[str, Any], fresh_process: FreshProcess
    ) -> None:
        """Either takes seconds."""
        code = (
            "import sys\nfrom safetune.cli import main\n"
            "main(['list', '--json'], standalone_mode=False)\n"
            "print({'torch', 'triton'} & set(sys.modules), file=sys.stderr)\n"
        )

        result = fresh_process(code)

        assert len(json.loads(result.stdout)) == 3
        assert result.stderr == "set()\n"


class TestShow:
    def test_json(self, safetune: Any, tuned: dict[str, Any]) -> None:
        shown = safetune.json("show", "add_one")

        expected = [trial for trial in tuned["trials"] if trial["kernel"] == "add_one"]
        assert len(shown) == len(expected) == 4
        for trial, was in zip(shown, expected, strict=True):
            assert f"BLOCK={trial['config']['BLOCK']}" == was["config"].split()[0]
            for name in ("verdict", "label", "detail", "message", "timing", "chosen"):
                assert trial[name] == was[name], name
            assert trial["generation"] == 1
        assert [trial["call"]["values"] for trial in shown] == [[["N", 100]]] * 2 + [
            [["N", 300]]
        ] * 2

    def test_failed_configs_too(self, safetune: Any, targets: Path) -> None:
        assert safetune("tune", f"{targets / 'faulty.py'}:hopeless").exit_code == 1
        assert safetune.json("list") == [], "there is no choice"

        shown = safetune.json("show", "add_one")
        lines = safetune("show", "add_one").stdout.splitlines()

        assert [(trial["config"]["BLOCK"], trial["label"]) for trial in shown] == [
            (48, shown[0]["verdict"]),
            (64, "died(SIGSEGV)"),
        ]
        assert not any(trial["chosen"] for trial in shown)
        assert any("BLOCK=64" in line and "died(SIGSEGV)" in line for line in lines)
        assert any("BLOCK=48" in line and "power of 2" in line for line in lines)

    def test_table(self, safetune: Any, tuned: dict[str, Any]) -> None:
        device = safetune.json("list")[0]["device"]["name"]
        dtype = tuned["tunings"][1]["dtype"]

        lines = [line.rstrip() for line in safetune("show", "add_one").stdout.splitlines()]

        titles = [line for line in lines if line.startswith("add_one")]
        assert titles == [f"add_one  N={count} {dtype}  on {device}" for count in (100, 300)]
        starred = [line.split()[1] for line in lines if line.strip().startswith("* ")]
        assert starred == [
            trial["config"].split()[0]
            for trial in tuned["trials"]
            if trial["chosen"] and trial["kernel"] == "add_one"
        ]

    @pytest.mark.parametrize("way", ["imported", "shared"])
    def test_a_choice_that_was_made_elsewhere_has_its_time_and_where_it_is_from(
        self,
        safetune: Any,
        tuned: dict[str, Any],
        targets: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        way: str,
    ) -> None:
        """Regression: its table was empty."""
        target = f"{targets / 'add.py'}:add_one"
        url, shared = f"file://{tmp_path}/shared", ("tune", target, "--shape", "small")
        if way == "imported":
            safetune("export", tmp_path / "packs")
        else:
            (tmp_path / "shared").mkdir()
            monkeypatch.setenv("SAFETUNE_SHARED", url)
            safetune("tune", "--force", *shared[1:])
        listed = safetune.json("list")
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "elsewhere"))
        if way == "imported":
            safetune("import", tmp_path / "packs")

        told = safetune(*shared).stdout
        shown = safetune("show", "add_one").stdout

        block = f"BLOCK={listed[0]['config']['BLOCK']}"
        source = "imported" if way == "imported" else f"from {url}"
        for text in (told, shown):
            (row,) = [r for r in text.splitlines() if r.strip().startswith("* ")][:1]
            assert block in row
            assert source in row
            assert row.rstrip().endswith(duration(listed[0]["median_ms"]))
        assert "1 tuning, 0 configs measured" in told
        (data, *_) = safetune.json("show", "add_one")
        assert (data["chosen"], data["config"]) == (True, listed[0]["config"])
        assert data["origin"] == ("import" if way == "imported" else url)

    def test_an_unknown_kernel(self, safetune: Any, tuned: dict[str, Any]) -> None:
        assert safetune.error("show", "add_two") == (
            "Error: no kernel named 'add_two' is stored; stored kernels: add_one, kernel"
        )


class TestPath:
    def test_it_is_where_the_database_is(
        self, safetune: Any, tuned: dict[str, Any], cache_dir: Path
    ) -> None:
        assert (cache_dir / DATABASE).is_file()
        assert safetune("path").stdout == f"{cache_dir / DATABASE}\n"
        here = {"path": str(cache_dir / DATABASE), "network": "", "shared": ""}
        assert safetune.json("path") == {**here, "exists": True}


class TestClear:
    def test_one_kernel_is_forgotten_and_measured_again(
        self, safetune: Any, tuned: dict[str, Any], targets: Path
    ) -> None:
        result = safetune("clear", "add_one")

        assert (result.exit_code, result.stdout) == (0, "cleared 2 keys of add_one\n")
        assert [entry["kernel"] for entry in safetune.json("list")] == ["kernel"]
        again = safetune.json("tune", targets / "add.py")
        assert [tuning["measured"] for tuning in again["tunings"]] == [0, 2, 2]

    def test_json(self, safetune: Any, tuned: dict[str, Any]) -> None:
        assert safetune.json("clear", "kernel") == {"kernel": "kernel", "cleared": 1}
        assert safetune("clear", "add_one").stdout == "cleared 2 keys of add_one\n"

    def test_an_unknown_kernel(self, safetune: Any, tuned: dict[str, Any]) -> None:
        assert safetune.error("clear", "add_two") == (
            "Error: no kernel named 'add_two' is stored; stored kernels: add_one, kernel"
        )
        assert len(safetune.json("list")) == 3
