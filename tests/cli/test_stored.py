"""`safetune list`, `show` and `clear`, also with a shared store."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import triton

from safetune.outcome import Outcome, Verdict, duration
from safetune.store.local.store import Store
from safetune.store.records import Failure, RecordedCall
from tests.cli import rows

if TYPE_CHECKING:
    from tests.conftest import FreshProcess


@pytest.mark.parametrize(
    ("words", "stdout"),
    [
        (("list",), "No choice is stored yet: launch a kernel, or run `safetune tune`.\n"),
        (("list", "--json"), "[]\n"),
    ],
    ids=["text", "json"],
)
def test_where_there_is_no_database_none_is_made(
    safetune: Any, cache_dir: Path, words: tuple[str, ...], stdout: str
) -> None:
    result = safetune(*words)

    assert (result.exit_code, result.stdout, result.stderr) == (0, stdout, "")
    assert not cache_dir.exists()


class TestList:
    def test_json(self, safetune: Any, tuned: Any) -> None:
        listed = safetune.json("list")

        chosen = {
            (trial["kernel"], 300 if trial["shape"] == "large" else 100): trial
            for trial in tuned["trials"]
            if trial["chosen"]
        }
        assert [(entry["kernel"], entry["call"]) for entry in listed] == [
            (name, {"values": {"N": n}, "dtypes": {"x": dtype}, "options": {}})
            for name, n, dtype in (
                ("add_one", 100, "float32"),
                ("add_one", 300, "float32"),
                ("kernel", 100, "float16"),
            )
        ]
        for entry in listed:
            trial = chosen[entry["kernel"], entry["call"]["values"]["N"]]
            assert entry["median_ms"] == trial["timing"]["median_ms"]
            assert f"BLOCK={entry['config']['BLOCK']} " in trial["config"]
            assert (entry["generation"], entry["origin"]) == (1, "here")
            assert entry["created"].endswith("Z")

    def test_filters(self, safetune: Any, tuned: Any, targets: Path, tmp_path: Path) -> None:
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
        assert safetune("list", "--device", "no such device").stdout == "No choice matches.\n"

    def test_choices_in_packs_are_listed_where_the_store_has_none(
        self, safetune: Any, tuned: Any, tmp_path: Path
    ) -> None:
        safetune("export", tmp_path / "packs")
        safetune("clear", "add_one", "--yes")
        assert {entry["origin"] for entry in safetune.json("list")} == {"here"}
        safetune.set(SAFETUNE_PACKS=tmp_path / "packs")

        origins = [(entry["kernel"], entry["origin"]) for entry in safetune.json("list")]

        pack = f"pack {tmp_path / 'packs'}"
        assert origins == [("add_one", pack), ("add_one", pack), ("kernel", "here")]
        assert f"in the {pack}" in safetune("show", "add_one", "--key", "N=100").stdout

    def test_imports_neither_torch_nor_triton(
        self, tuned: Any, fresh_process: FreshProcess
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
    def test_json(self, safetune: Any, tuned: Any) -> None:
        shown = safetune.json("show", "add_one")

        expected = [trial for trial in tuned["trials"] if trial["kernel"] == "add_one"]
        assert len(shown) == len(expected) == 4
        for trial, was in zip(shown, expected, strict=True):
            assert f"BLOCK={trial['config']['BLOCK']}" == was["config"].split()[0]
            for name in ("verdict", "label", "detail", "message", "timing", "chosen"):
                assert trial[name] == was[name], name
        assert [trial["call"]["values"] for trial in shown] == [{"N": 100}] * 2 + [{"N": 300}] * 2

    def test_failed_configs_too(self, safetune: Any, targets: Path) -> None:
        safetune.json("tune", f"{targets / 'faulty.py'}:hopeless", code=1)
        assert safetune.json("list") == [], "there is no choice"

        shown = safetune.json("show", "add_one")
        lines = safetune("show", "add_one").stdout.splitlines()  # all configs of the one key

        assert [trial["chosen"] for trial in shown] == [False, False]
        assert shown[1]["label"] == "died(SIGSEGV)"
        assert "choice   no config works" in lines
        assert any("BLOCK=48" in line and "power of 2" in line for line in lines)

    def test_failures_with_other_calls(self, safetune: Any, tuned: Any, cache_dir: Path) -> None:
        """Regression: a config that works for one call of a key hid that it fails for another."""
        store = Store.open(cache_dir)
        ((_, (trial, *_)),) = store.trials_of("kernel")
        failed = Outcome(Verdict.OUT_OF_RESOURCES, message="needs 300 KB of shared memory")
        store.put_trial(replace(trial, elsewhere=(Failure(failed, time.time()),)))
        store.close()

        lines = [line.strip() for line in safetune("show", "kernel").stdout.splitlines()]
        (*_, shown) = safetune.json("show", "kernel")  # a row that is replaced is the last

        told = "out_of_resources with another call: needs 300 KB of shared memory"
        assert [line for line in lines if told in line] == [f"BLOCK=64: {told}"]
        assert [other["label"] for other in shown["with_other_calls"]] == ["out_of_resources"]
        assert shown["verdict"] == "ok"

    def test_a_config_that_was_measured_again_is_shown_with_its_latest_outcome(
        self, safetune: Any, cache_dir: Path
    ) -> None:
        """Whatever the rows' order: `--force` writes the next generation beside the one before."""
        key = rows.key_record(SimpleNamespace(name="again", digest="0" * 32), "card", N=1)
        works = rows.trial(key, triton.Config({"BLOCK": 64}), 1.0)
        died = Outcome(Verdict.DIED, detail="SIGSEGV")
        store = Store.open(cache_dir)
        store.put_key(key)
        store.put_trial(works)
        store.put_trial(replace(works, generation=2, outcome=died, created=2.0))
        store.close()

        (shown,) = safetune.json("show", "again")

        assert shown["label"] == "died(SIGSEGV)"

    @pytest.mark.parametrize("way", ["imported", "shared"])
    def test_a_choice_that_was_made_elsewhere_has_its_time_and_where_it_is_from(
        self, safetune: Any, tuned: Any, targets: Path, tmp_path: Path, way: str
    ) -> None:
        """Regression: its table was empty."""
        command = ("tune", f"{targets / 'add.py'}:add_one", "--shape", "small")
        origin = "import" if way == "imported" else safetune.share()
        if way == "shared":
            safetune(*command, "--force")
        safetune("export", tmp_path / "packs")
        (made, *_) = safetune.json("list")
        safetune.use_store("elsewhere")
        if way == "imported":
            safetune("import", tmp_path / "packs")

        told = safetune(*command).stdout
        shown = safetune("show", "add_one", "--key", "N=100").stdout

        (listed, *_) = safetune.json("list")
        assert listed["config"] == made["config"]
        assert listed["median_ms"] == pytest.approx(made["median_ms"], rel=1e-4)
        block, time = listed["config"]["BLOCK"], duration(listed["median_ms"])
        source = "imported" if way == "imported" else f"from {origin}"
        (row,) = [r for r in told.splitlines() if r.split()[:1] == ["small"]]
        assert row.split()[2] == str(block)
        assert time in row
        assert source in row
        assert "1 tuning, 0 configs measured" in told
        assert f"BLOCK={block} num_warps=4 num_stages=3, {time}" in shown
        assert source in shown
        (data, *_) = safetune.json("show", "add_one")
        assert (data["chosen"], data["config"]) == (True, listed["config"])
        assert data["origin"] == origin

    def test_what_is_not_stored_is_told_with_what_is(self, safetune: Any, tuned: Any) -> None:
        assert safetune.error("show", "add_one", "--key", "M=77") == (
            "Error: no key of add_one matches these options; see `safetune show add_one`"
        )
        assert safetune.error("show", "add_two") == (
            "Error: no kernel named 'add_two' is stored; stored kernels: add_one, kernel"
        )


class TestClear:
    def test_one_kernel_is_forgotten_and_measured_again(
        self, safetune: Any, tuned: Any, targets: Path
    ) -> None:
        result = safetune("clear", "add_one", "--yes")

        assert (result.exit_code, result.stdout) == (0, "cleared 2 keys of add_one\n")
        assert [entry["kernel"] for entry in safetune.json("list")] == ["kernel"]
        again = safetune.json("tune", targets / "add.py")
        assert [tuning["measured"] for tuning in again["tunings"]] == [0, 2, 2]

    def test_without_a_terminal_nothing_is_deleted_unless_yes_is_given(
        self, safetune: Any, tuned: Any
    ) -> None:
        assert safetune.error("clear", "add_one") == (
            "Error: give --yes to delete 2 keys of add_one"
        )
        assert len(safetune.json("list")) == 3

    @pytest.mark.parametrize(("answer", "left"), [(b"n\n", 3), (b"y\n", 1)])
    def test_a_terminal_is_asked(
        self, safetune: Any, tuned: Any, start: Any, terminal: Any, answer: bytes, left: int
    ) -> None:
        process = start("clear", "add_one", env={}, terminal=terminal.theirs)

        terminal.wait_for("Delete them? [y/N]:")
        assert re.search("add_one, .*/add.py: 2 keys on ", "\n".join(terminal.lines))
        terminal.type(answer)

        assert process.wait(90) == (0 if left == 1 else 1)
        assert len(safetune.json("list")) == left

    def test_kernels_of_one_name_in_several_files(
        self, safetune: Any, tuned: Any, targets: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other.py"
        other.write_text((targets / "add.py").read_text().replace("+ 1", "+ 2"))
        safetune.json("tune", f"{other}:add_one", "--shape", "small")

        one = safetune("clear", "add_one", "--file", "other.py", "--yes")

        assert one.stdout == "cleared 1 key of add_one\n"
        assert {entry["file"] for entry in safetune.json("list")} == {str(targets / "add.py")}

    def test_narrowed_by_device_and_age(self, safetune: Any, tuned: Any) -> None:
        nothing = "Error: no key of add_one matches these options; see `safetune show add_one`"

        assert safetune.error("clear", "add_one", "--unused-for", "1d", "--yes") == nothing
        assert safetune.error("clear", "add_one", "--device", "H100", "--yes") == nothing
        cleared = safetune.json("clear", "add_one", "--unused-for", "0h", "--yes")
        assert cleared == {"kernel": "add_one", "cleared": 2, "left_shared": 0}

    def test_what_was_not_used_for_long_of_all_kernels(
        self, safetune: Any, tuned: Any, cache_dir: Path
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


@pytest.fixture
def shared(safetune: Any, tuned: Any, targets: Path) -> str:
    """The URL of a store to which the node of the test has published its choices."""
    url: str = safetune.share()
    safetune.json("tune", targets / "add.py")
    return url


def kernels(listed: list[dict[str, Any]]) -> list[str]:
    return [entry["kernel"] for entry in listed]


def test_what_a_node_has_measured_is_from_here(shared: str, safetune: Any, targets: Path) -> None:
    """Regression: once published, it was "shared" there too."""
    target = f"{targets / 'add.py'}:add_one"
    safetune.json("tune", "--force", target, "--shape", "small")
    safetune.json("tune", target)  # which pulls once more
    assert {entry["origin"] for entry in safetune.json("list")} == {"here"}

    safetune.use_store("node")
    assert safetune.json("tune", target)["measured"] == 0
    assert {entry["origin"] for entry in safetune.json("list")} == {shared}


def test_the_shared_store_is_listed(shared: str, safetune: Any) -> None:
    safetune.use_store("node")
    assert safetune.json("list") == []
    assert kernels(safetune.json("list", "--shared")) == ["add_one", "add_one", "kernel"]
    assert kernels(safetune.json("list", "--shared", "--kernel", "kernel")) == ["kernel"]


def test_clear_says_what_stays_in_the_shared_store(shared: str, safetune: Any) -> None:
    assert safetune("clear", "add_one", "--yes").stdout == (
        "cleared 2 keys of add_one; the shared store still has 2 of them: --shared deletes them "
        "there, and `safetune tune --force` replaces them\n"
    )
    assert kernels(safetune.json("list")) == ["kernel"]
    assert len(safetune.json("list", "--shared")) == 3


def test_clear_deletes_here_when_the_shared_store_is_away(shared: str, safetune: Any) -> None:
    shutil.rmtree(shared.removeprefix("file://"))
    error = safetune.error("clear", "add_one", "--yes")
    assert error.startswith("Error: cannot use the shared store")
    assert kernels(safetune.json("list")) == ["kernel"]


def test_clear_deletes_there_what_this_node_never_had(shared: str, safetune: Any) -> None:
    safetune.use_store("node")
    done = safetune.json("clear", "add_one", "--shared", "--yes")
    assert done == {"kernel": "add_one", "cleared": 2, "left_shared": 0}
    assert kernels(safetune.json("list", "--shared")) == ["kernel"]
