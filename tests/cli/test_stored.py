"""`safetune list`, `show` and `clear`."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.outcome import Outcome, Verdict, duration
from safetune.store.local.store import Store
from safetune.store.records import Failure, RecordedCall
from safetune.store.schema import seconds

if TYPE_CHECKING:
    from tests.conftest import FreshProcess


def block_of(words: list[str], lines: list[str]) -> int:
    """The BLOCK of a row, or of all rows of the table of `add_one`."""
    shared = re.search(r"^all choices: BLOCK=(\d+) ", "\n".join(lines), re.MULTILINE)
    return int(shared[1] if shared else words[1])


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


class TestEmpty:
    """Where there is no database these commands say so, and make none."""

    @pytest.mark.parametrize(
        ("words", "stdout"),
        [
            (("list",), "No choice is stored yet: launch a kernel, or run `safetune tune`.\n"),
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


class TestList:
    def test_json(self, safetune: Any, tuned: dict[str, Any]) -> None:
        listed = safetune.json("list")

        assert [entry["kernel"] for entry in listed] == ["add_one", "add_one", "kernel"]
        assert [entry["call"]["values"] for entry in listed] == [
            {"N": 100},
            {"N": 300},
            {"N": 100},
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

    def test_table(
        self,
        safetune: Any,
        tuned: dict[str, Any],
        targets: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """One table for a kernel, told by its file and line; in a pipe no row is broken."""
        monkeypatch.chdir(targets)
        listed = safetune.json("list")

        lines = [line.strip() for line in safetune("list").stdout.splitlines() if line.strip()]

        places = list(dict.fromkeys((e["kernel"], e["line"]) for e in listed))
        titles = [line for line in lines if "add.py:" in line]
        assert titles == [f"{name}  add.py:{line}" for name, line in places]
        first = lines[lines.index(titles[0]) + 2 :]
        assert first[0] == "all: dtype=float32"
        assert first[1].endswith("num_warps=4 num_stages=3")
        today = time.strftime("%Y-%m-%d", time.localtime(seconds(listed[0]["created"])))
        rows = [line.split() for line in lines if line.split()[0] in ("100", "300")]
        for words, entry in zip(rows[:2], listed[:2], strict=True):
            assert words[0] == str(entry["call"]["values"]["N"])
            assert block_of(words, lines) == entry["config"]["BLOCK"]
            assert words[-4:] == [*duration(entry["median_ms"]).split(), today, "here"]

    def test_filters_and_order(
        self, safetune: Any, tuned: dict[str, Any], targets: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "other.py").write_text((targets / "add.py").read_text())
        safetune.json("tune", f"{tmp_path / 'other.py'}:add_one", "--shape", "large")

        def listed(*options: str) -> list[tuple[str, int]]:
            found = safetune.json("list", *options)
            return [(entry["kernel"], entry["call"]["values"]["N"]) for entry in found]

        everything = [("add_one", 100), ("add_one", 300), ("kernel", 100)]
        assert listed() == everything, "kernels of one source are one kernel, in any file"
        assert listed("--kernel", "kernel") == everything[2:]
        assert listed("--file", "no_such.py") == []
        assert listed("--device", "no such device") == []
        assert listed("--device", safetune.json("list")[0]["device"]["name"].upper()) == everything
        assert listed("--since", "2099-01-01") == []
        assert listed("--disputed") == []
        assert safetune("list", "--disputed").stdout == "No choice matches.\n"
        times = [entry["median_ms"] for entry in safetune.json("list", "--sort", "time")]
        assert times == sorted(times)
        dates = [entry["created"] for entry in safetune.json("list", "--sort", "date")]
        assert dates == sorted(dates, reverse=True)

    def test_choices_in_packs_are_listed_where_the_store_has_none(
        self,
        safetune: Any,
        tuned: dict[str, Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        safetune("export", tmp_path / "packs")
        safetune("clear", "add_one", "--yes")
        assert {entry["origin"] for entry in safetune.json("list")} == {"here"}
        monkeypatch.setenv("SAFETUNE_PACKS", str(tmp_path / "packs"))

        origins = [(entry["kernel"], entry["origin"]) for entry in safetune.json("list")]

        pack = f"pack {tmp_path / 'packs'}"
        assert origins == [("add_one", pack), ("add_one", pack), ("kernel", "here")]
        assert f"in the {pack}" in safetune("show", "add_one", "--key", "N=100").stdout

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
        assert [trial["call"]["values"] for trial in shown] == [{"N": 100}] * 2 + [{"N": 300}] * 2

    def test_failed_configs_too(self, safetune: Any, targets: Path) -> None:
        assert safetune("tune", f"{targets / 'faulty.py'}:hopeless").exit_code == 1
        assert safetune.json("list") == [], "there is no choice"

        shown = safetune.json("show", "add_one")
        lines = safetune("show", "add_one").stdout.splitlines()  # all configs of the one key

        assert [(trial["config"]["BLOCK"], trial["label"]) for trial in shown] == [
            (48, shown[0]["verdict"]),
            (64, "died(SIGSEGV)"),
        ]
        assert not any(trial["chosen"] for trial in shown)
        assert any(line.split()[0] == "64" and "died(SIGSEGV)" in line for line in lines if line)
        assert "choice   no config works" in lines
        assert any("BLOCK=48" in line and "power of 2" in line for line in lines)

    def test_failures_with_other_calls(
        self, safetune: Any, tuned: dict[str, Any], cache_dir: Path
    ) -> None:
        """Regression: a config that works for one call of a key hid that it fails for another."""
        store = Store.open(cache_dir)
        ((_, (trial, *_)),) = store.trials_of("kernel")
        failed = Outcome(Verdict.OUT_OF_RESOURCES, message="needs 300 KB of shared memory")
        store.put_trial(replace(trial, elsewhere=(Failure(failed, time.time()),)))
        store.close()

        lines = [line.strip() for line in safetune("show", "kernel").stdout.splitlines()]
        (shown, _) = safetune.json("show", "kernel")

        told = "out_of_resources with another call: needs 300 KB of shared memory"
        assert [line for line in lines if told in line] == [f"BLOCK=64: {told}"]
        assert [other["label"] for other in shown["with_other_calls"]] == ["out_of_resources"]
        assert shown["verdict"] == "ok"

    def test_a_summary_of_several_keys(self, safetune: Any, tuned: dict[str, Any]) -> None:
        """A row for each: the choice, its time, and the gain over the first config."""
        trials = [trial for trial in tuned["trials"] if trial["kernel"] == "add_one"]

        lines = safetune("show", "add_one").stdout.splitlines()

        rows = [line.split() for line in lines if line.split()[:1] in (["100"], ["300"])]
        assert len(rows) == 2
        for words, (first, second) in zip(rows, (trials[:2], trials[2:]), strict=True):
            chosen = first if first["chosen"] else second
            best = chosen["timing"]["median_ms"]
            assert f"BLOCK={block_of(words, lines)} " in chosen["config"]
            assert " ".join(words[-4:-2]) == duration(best)
            assert words[-2] == f"{first['timing']['median_ms'] / best:.2f}x", "over the first"
        assert not any("*" in line for line in lines)

    def test_everything_about_one_key(self, safetune: Any, tuned: dict[str, Any]) -> None:
        (one,) = [t for t in safetune.json("list") if t["call"]["values"] == {"N": 300}]
        trials = [t for t in tuned["trials"] if (t["kernel"], t["shape"]) == ("add_one", "large")]

        lines = safetune("show", "add_one", "--key", "N=300").stdout.splitlines()

        facts = dict(line.split(maxsplit=1) for line in lines if len(line.split()) > 1)
        assert facts["key"] == "values N=300; dtypes x: float32"
        assert facts["choice"] == (
            f"BLOCK={one['config']['BLOCK']} num_warps=4 num_stages=3, {duration(one['median_ms'])}"
        )
        assert "measured here, generation 1" in facts["made"]
        assert "times as fast as the first declared config" in facts["gain"]
        (other,) = [trial for trial in trials if not trial["chosen"]]
        assert facts["next"].startswith(f"{other['config']}, ")
        assert facts["configs"] == "2: 2 timed"
        heading = next(line for line in lines if "verdict" in line)
        rows = list(filter(None, lines[lines.index(heading) + 2 :]))
        assert [row.startswith("*") for row in rows] == [True, False], "the fastest first"
        assert rows[0].split()[5:7] == ["1.00", "█" * 10]

    def test_the_classes_of_the_key_names_as_the_source_has_them_now(
        self, safetune: Any, targets: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "phantom.py"
        text = (targets / "add.py").read_text()
        for old, new in (
            ("def add_one(x, N,", "def add_one(x, N, M,"),
            ('key=["N"], pre_hook', 'key=["N", "M"], pre_hook'),
            ("dtype=dtype), count)", "dtype=dtype), count, 7)"),
        ):
            assert old in text
            text = text.replace(old, new)
        file.write_text(text)
        result = safetune("tune", f"{file}:add_one", "--shape", "small")
        assert result.exit_code == 0, result.output

        (names,) = [
            line.split(maxsplit=1)[1]
            for line in safetune("show", "add_one").stdout.splitlines()
            if line.startswith("names ")
        ]
        file.unlink()
        sys.modules["safetune.cli.show"]._classes_in.cache_clear()
        without = safetune("show", "add_one").stdout

        assert names.startswith("N: read by the body (phantom.py:")
        assert names.endswith("; M: nothing reads it; dropped")
        assert "\nnames " not in without

    def test_python(self, safetune: Any, tuned: dict[str, Any]) -> None:
        import triton

        listed = [entry for entry in safetune.json("list") if entry["kernel"] == "add_one"]

        source = safetune("show", "add_one", "--python").stdout

        given: dict[str, Any] = {}

        def decorator(**arguments: Any) -> Any:
            given.update(arguments)
            return lambda function: function

        exec(f"{source}def kernel(): pass", {"triton": triton, "safetune": decorator})
        blocks = [config.kwargs["BLOCK"] for config in given["configs"]]
        assert blocks == list(dict.fromkeys(entry["config"]["BLOCK"] for entry in listed))
        assert {(config.num_warps, config.num_stages) for config in given["configs"]} == {(4, 3)}
        assert given["key"] == ["N"]
        first, *_, last = source.splitlines()
        assert first.startswith("# add_one on ")
        assert first.endswith(": chosen for 2 keys")
        assert last == ")"
        assert f"# N=300 float32 {duration(listed[1]['median_ms'])}\n" in source

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
        shown = safetune("show", "add_one", "--key", "N=100").stdout

        block = f"BLOCK={listed[0]['config']['BLOCK']}"
        source = "imported" if way == "imported" else f"from {url}"
        time = duration(listed[0]["median_ms"])
        (row,) = [r for r in told.splitlines() if r.split()[:1] == ["small"]]
        assert row.split()[2] == block.removeprefix("BLOCK=")
        assert time in row
        assert source in row
        assert "1 tuning, 0 configs measured" in told
        assert f"{block} num_warps=4 num_stages=3, {time}" in shown
        assert source in shown
        (data, *_) = safetune.json("show", "add_one")
        assert (data["chosen"], data["config"]) == (True, listed[0]["config"])
        assert data["origin"] == ("import" if way == "imported" else url)

    def test_options_that_match_nothing(self, safetune: Any, tuned: dict[str, Any]) -> None:
        assert "'77' is not NAME=VALUE" in safetune("show", "add_one", "--key", "77").stderr
        assert safetune.error("show", "add_one", "--key", "M=77") == (
            "Error: M is not in the key of add_one, which has N, dtype"
        )
        assert "'tomorrow' is not a day" in safetune("list", "--since", "tomorrow").stderr

    def test_an_unknown_kernel(self, safetune: Any, tuned: dict[str, Any]) -> None:
        assert safetune.error("show", "add_two") == (
            "Error: no kernel named 'add_two' is stored; stored kernels: add_one, kernel"
        )


class TestClear:
    def test_one_kernel_is_forgotten_and_measured_again(
        self, safetune: Any, tuned: dict[str, Any], targets: Path
    ) -> None:
        result = safetune("clear", "add_one", "--yes")

        assert (result.exit_code, result.stdout) == (0, "cleared 2 keys of add_one\n")
        assert [entry["kernel"] for entry in safetune.json("list")] == ["kernel"]
        again = safetune.json("tune", targets / "add.py")
        assert [tuning["measured"] for tuning in again["tunings"]] == [0, 2, 2]

    def test_without_a_terminal_nothing_is_deleted_unless_yes_is_given(
        self, safetune: Any, tuned: dict[str, Any]
    ) -> None:
        assert safetune.error("clear", "add_one") == (
            "Error: give --yes to delete 2 keys of add_one"
        )
        assert len(safetune.json("list")) == 3

    @pytest.mark.parametrize(("answer", "left"), [(b"n\n", 3), (b"y\n", 1)])
    def test_a_terminal_is_asked(
        self,
        safetune: Any,
        tuned: dict[str, Any],
        targets: Path,
        start: Any,
        terminal: Any,
        answer: bytes,
        left: int,
    ) -> None:
        process = start("clear", "add_one", env={}, terminal=terminal.theirs)

        terminal.wait_for("Delete them? [y/N]:")
        (line,) = [line for line in terminal.lines if "add.py" in line]
        terminal.type(answer)

        assert process.wait(90) == (0 if left == 1 else 1)
        assert line.strip().startswith(f"add_one, {targets / 'add.py'}: 2 keys on ")
        assert len(safetune.json("list")) == left

    def test_kernels_of_one_name_in_several_files(
        self, safetune: Any, tuned: dict[str, Any], targets: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other.py"
        other.write_text((targets / "add.py").read_text().replace("+ 1", "+ 2"))
        safetune.json("tune", f"{other}:add_one", "--shape", "small")

        message = safetune.error("clear", "add_one")
        one = safetune("clear", "add_one", "--file", "other.py", "--yes")

        assert message.startswith("Error: 2 files have a kernel named add_one: ")
        assert f"{other}: 1 key on " in message
        assert message.endswith("Choose one with --file, or give --yes to delete all of them")
        assert one.stdout == "cleared 1 key of add_one\n"
        assert {entry["file"] for entry in safetune.json("list")} == {str(targets / "add.py")}

    def test_narrowed_by_device_and_age(self, safetune: Any, tuned: dict[str, Any]) -> None:
        nothing = "Error: no key of add_one matches these options; see `safetune show add_one`"

        assert safetune.error("clear", "add_one", "--unused-for", "1d", "--yes") == nothing
        assert safetune.error("clear", "add_one", "--device", "H100", "--yes") == nothing
        assert safetune.json("clear", "add_one", "--unused-for", "0h", "--yes") == {
            "kernel": "add_one",
            "cleared": 2,
            "left_shared": 0,
        }

    def test_what_was_not_used_for_long_of_all_kernels(
        self, safetune: Any, tuned: dict[str, Any], cache_dir: Path
    ) -> None:
        """A key is as old as its newest trial, choice or recorded call."""
        store = Store.open(cache_dir)
        _, again, recorded = store.keys()
        with store.connection.transaction() as connection:
            for table in ("trial", "choice"):  # the columns count, whatever the checksums say
                connection.execute(f"UPDATE {table} SET created = 1.0")
            connection.execute(
                "UPDATE trial SET created = ? WHERE key = ?", (time.time(), again.digest)
            )
        store.put_call(RecordedCall(recorded.digest, "kernel", "add:kernel", {}, time.time()))
        store.close()

        assert safetune.error("clear", "--unused-for", "90d") == (
            "Error: give --yes to delete 1 key of 1 kernel"
        )
        result = safetune("clear", "--unused-for", "90d", "--yes")

        assert result.stdout == "cleared 1 key of 1 kernel\n"
        store = Store.open(cache_dir)
        assert [key.digest for key, _ in store.trials_of()] == [again.digest, recorded.digest]
        with store.tables() as database:
            chosen = {row["key"] for row in database["choice"].rows}
        assert chosen == {again.digest, recorded.digest}
        store.close()
        nothing = safetune("clear")
        assert nothing.exit_code == 2
        assert "Give a KERNEL, or --unused-for TIME" in nothing.stderr
