"""Choices between databases and packs: nothing changes on the way, and nothing is lost."""

from __future__ import annotations

import itertools
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetune.errors import PackError, StoreError
from safetune.outcome import Mark, Outcome, Timing, Verdict
from safetune.store.local.db_files import DATABASE_NAME
from safetune.store.local.store import Store
from safetune.store.packs import exchange, packs
from safetune.store.packs.packs import name_of
from safetune.store.records import TrialRecord

WIDE = {"BLOCK": 128, "num_ctas": 1, "num_stages": 3, "num_warps": 8}


def write(entries: Any, directory: Path) -> dict[str, bytes]:
    for name, pack in exchange.packs_of(entries).items():
        exchange.write(directory / name, packs.dump(pack))
    return contents(directory)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def various(choices: Any) -> list[Any]:
    other = {**choices.h100, "name": "NVIDIA H200"}
    newer = {**choices.entry().key.toolchain, "triton": "3.9.0"}
    call = {"values": [["N", {"dtype": "float16"}]], "dtypes": [], "options": [["debug", True]]}
    return [
        choices.entry(1024, median_ms=1 / 3, created=choices.noon + 0.123456),
        choices.entry(256, config=WIDE, generation=3),
        choices.entry(256, toolchain=newer),
        choices.entry(256, device=other),
        choices.entry(call=call),
        choices.entry(5, kernel_name="layer_norm", kernel_digest="12" * 16, declared="34" * 16),
        choices.entry(5, kernel_digest="56" * 16, config={**WIDE, "pre_hook": "78" * 16}),
    ]


class TestRoundTrip:
    def test_to_an_empty_store_and_back(self, choices: Any, tmp_path: Path) -> None:
        store = choices.store(tmp_path / "a", *various(choices))
        first = write(exchange.of_store(store).entries, tmp_path / "first")
        assert len(first) == 4

        empty = Store.open(tmp_path / "b")
        done = exchange.import_into(empty, exchange.collect(tmp_path / "first").entries)

        assert done == exchange.Imported(new=7, known=0, kept=0)
        assert write(exchange.of_store(empty).entries, tmp_path / "second") == first
        digests = {each.key.digest: each.choice.config_digest for each in store.choices()}
        assert {e.key.digest: e.choice.config_digest for e in empty.choices()} == digests

    def test_a_choice_for_each_list_of_configs(self, choices: Any, tmp_path: Path) -> None:
        """As two versions of a program leave them."""
        old, new = choices.entry(1), choices.entry(1, declared="99" * 16, generation=2)
        store = choices.store(tmp_path / "a", old, new)
        first = write(exchange.of_store(store).entries, tmp_path / "first")
        assert len(store.choices()) == 1
        assert len(exchange.collect(tmp_path / "first").entries) == 2
        empty = Store.open(tmp_path / "b")
        exchange.import_into(empty, exchange.collect(tmp_path / "first").entries)
        assert write(exchange.of_store(empty).entries, tmp_path / "second") == first


def test_reading_a_database_takes_as_many_queries_for_one_kernel_as_for_many(
    choices: Any, tmp_path: Path
) -> None:
    """Regression: each kernel read all of it again."""
    counts = []
    for number in (1, 20):
        many = [choices.entry(kernel_name=f"k{n}") for n in range(number)]
        store = choices.store(tmp_path / f"{number}", *many)
        statements: list[str] = []
        with store.connection.reading() as sqlite:
            sqlite.set_trace_callback(statements.append)
        assert len(exchange.of_store(store).entries) == number
        counts.append(len(statements))
        store.close()
    assert counts[0] == counts[1] > 0


class TestImport:
    def test_an_import_that_fails_writes_nothing(self, choices: Any, tmp_path: Path) -> None:
        """The disk is full at the second kernel."""
        store = choices.store(tmp_path / "a", choices.entry(1))
        connection = sqlite3.connect(store.path)
        connection.execute(
            "CREATE TRIGGER full BEFORE INSERT ON key WHEN NEW.kernel_name = 'layer_norm' "
            "BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
        before = list(connection.iterdump())

        with pytest.raises(StoreError, match="disk is full"):
            exchange.import_into(store, various(choices))

        assert list(connection.iterdump()) == before
        connection.close()

    def test_the_file_of_a_known_key_stays(self, choices: Any, tmp_path: Path) -> None:
        store = choices.store(tmp_path / "a", choices.entry(1))
        exchange.import_into(store, [choices.entry(1, generation=2)])
        assert {each.key.kernel_file for each in store.choices()} == {"/src/add.py"}


class TestLeftOut:
    def test_a_choice_timed_while_the_program_used_the_device(
        self, choices: Any, tmp_path: Path
    ) -> None:
        beside, alone = choices.entry(1), choices.entry(2)
        store = choices.store(tmp_path / "a", beside, alone)
        for each, marks in ((beside, (Mark.CONTENDED.value,)), (alone, ())):
            outcome = Outcome(Verdict.OK, Timing(1.0, 1.0, 1.0, 9, "final"), marks=marks)
            choice = each.choice
            store.put_trial(
                TrialRecord(each.key.digest, choice.config_digest, choice.config, 1, outcome, 1.0)
            )

        found = exchange.of_store(store)

        assert [e.key.digest for e in found.entries] == [alone.key.digest]
        assert found.left_out == ["add [['N', 1]]: it was timed while the program used the device"]

    def test_a_choice_timed_on_random_inputs_keeps_its_mark(
        self, choices: Any, tmp_path: Path
    ) -> None:
        """Not shared with the cluster; a pack of it was asked for, and says so wherever it goes."""
        drawn = choices.entry(1, generation=2)
        store = choices.store(tmp_path / "a", drawn)
        marks = ("regenerated: x", "contended")
        for generation, mark in ((2, marks[0]), (3, marks[1])):
            outcome = Outcome(Verdict.OK, Timing(1.0, 1.0, 1.0, 9, "final"), marks=(mark,))
            facts = (drawn.key.digest, drawn.choice.config_digest, drawn.choice.config)
            store.put_trial(TrialRecord(*facts, generation, outcome, 1.0))
        first = write(exchange.of_store(store).entries, tmp_path / "first")
        empty = Store.open(tmp_path / "b")
        exchange.import_into(empty, exchange.collect(tmp_path / "first").entries)
        assert empty.choices()[0].choice.marks == marks[:1]
        assert write(exchange.of_store(empty).entries, tmp_path / "second") == first

    def test_a_config_with_code(self, choices: Any, tmp_path: Path) -> None:
        code = choices.entry(1, config={**WIDE, "ir_override": "/tmp/kernel.ptx"})
        found = exchange.of_store(choices.store(tmp_path / "a", code, choices.entry(2)))
        assert len(found.entries) == 1
        assert "config sets ir_override, which is code" in found.left_out[0]


class TestMerge:
    def test_the_later_generation_wins_then_the_first_made(self, choices: Any) -> None:
        first = choices.entry(generation=1, created=choices.noon)
        second = choices.entry(generation=1, created=choices.noon + 60, config=WIDE, median_ms=1e-4)
        newer = choices.entry(generation=2, created=choices.noon - 60, config=WIDE, median_ms=9.0)
        assert exchange.merged([first], [second]) == [first]
        assert exchange.merged([second], [first], [newer]) == [newer]
        others = [choices.entry(7), choices.entry(declared="99" * 16)]
        assert exchange.merged(others, [first]) == [*others, first]

    def test_what_was_made_a_moment_earlier_wins(self, choices: Any, tmp_path: Path) -> None:
        """Also through a pack, whose times people read."""
        early = choices.entry(created=choices.noon + 0.1)
        late = choices.entry(created=choices.noon + 0.9, config=WIDE)
        for name, entry in (("early", early), ("late", late)):
            write([entry], tmp_path / name)
        both = [exchange.collect(tmp_path / name).entries for name in ("late", "early")]
        assert [e.choice for e in exchange.merged(*both)] == [early.choice]

    @given(
        st.lists(
            st.tuples(
                st.integers(1, 2),
                st.integers(1, 3),
                st.integers(0, 2),
                st.sampled_from([1.0, 2.0]),
                st.sampled_from([32, 64]),
            ),
            max_size=8,
        ),
        st.integers(0, 8),
    )
    def test_the_order_does_not_matter(self, choices: Any, facts: Any, cut: int) -> None:
        entries = [
            choices.entry(
                n,
                generation=generation,
                created=choices.noon + later,
                median_ms=median,
                config={"BLOCK": block},
            )
            for n, generation, later, median, block in facts
        ]

        def by_key(*sources: Any) -> dict[str, Any]:
            return {e.key.digest: e for e in exchange.merged(*sources)}

        expected = by_key(entries)
        assert by_key(entries[cut:], entries[:cut]) == expected
        assert by_key(exchange.merged(entries[:cut]), exchange.merged(entries[cut:])) == expected
        for some in itertools.islice(itertools.permutations(entries), 20):
            assert by_key(some) == expected


class TestNewerVersion:
    """Packs with fields that this version does not know."""

    def test_they_are_passed_on_as_they_are_and_not_imported(
        self, choices: Any, tmp_path: Path
    ) -> None:
        """Of a choice, or of all of them: around them."""
        text = packs.dump([choices.entry(1), choices.entry(2, declared="99" * 16)])
        text = text.replace('  "tunings": [', '  "driver": {"a": [-0.0], "b": 1},\n  "tunings": [')
        text = text.replace(f'"digest": "{"ab" * 16}"', f'"digest": "{"ab" * 16}", "grid": [1]')
        text = text.replace('      "choices": [', '      "clocks": 1980,\n      "choices": [', 1)
        before, last = text.rsplit('Z"', 1)
        path = tmp_path / "packs" / name_of(choices.entry())
        path.parent.mkdir()
        path.write_text(f'{before}Z",\n          "clocks_mhz": [1980, -0.0]{last}')
        entries = exchange.collect(path).entries
        assert [set(entry.unknown) for entry in entries] == [
            {"driver", "grid", "clocks"},
            {"driver", "grid", "clocks_mhz"},
        ]
        assert write(exchange.merged(entries), tmp_path / "out") == contents(path.parent)
        store = Store.open(tmp_path / "store")
        assert exchange.import_into(store, [*entries, choices.entry(3)]) == exchange.Imported(
            new=1, unknown=2
        )
        store.close()

    def test_fields_that_differ_are_not_merged(self, choices: Any, tmp_path: Path) -> None:
        entries = []
        for number in (1, 2):
            text = packs.dump([choices.entry(number)])
            text = text.replace('  "tunings": [', f'  "driver": {number},\n  "tunings": [')
            entries += packs.load(text.encode())
        with pytest.raises(PackError, match="two packs of a newer safetune differ in 'driver'"):
            exchange.write(tmp_path / "both.json", packs.dump(entries))


class TestSources:
    def test_a_database_in_use(self, choices: Any, tmp_path: Path) -> None:
        """With what is only in its log; and reading it leaves every file as it was."""
        store = choices.store(tmp_path / "a", choices.entry(1))
        database = tmp_path / "a" / DATABASE_NAME
        assert database.with_name(f"{DATABASE_NAME}-wal").stat().st_size > 0
        before = contents(tmp_path / "a")

        for path in (database, tmp_path / "a"):
            assert [e.choice for e in exchange.collect(path).entries] == [choices.entry(1).choice]

        after = contents(tmp_path / "a")
        assert {n: d for n, d in after.items() if not n.endswith("-shm")} == {
            n: d for n, d in before.items() if not n.endswith("-shm")
        }
        store.close()

    def test_a_database_at_rest(self, choices: Any, tmp_path: Path) -> None:
        choices.store(tmp_path / "a", choices.entry(1)).close()
        before = contents(tmp_path / "a")
        assert list(before) == [DATABASE_NAME, f"{DATABASE_NAME}.lock"]
        assert len(exchange.collect(tmp_path / "a").entries) == 1
        assert contents(tmp_path / "a") == before

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda path: None, "No such file or directory"),
            (lambda path: path.mkdir(), r"contains no packs \(\*.json\) and no safetune.db"),
            (lambda path: path.write_text("{"), "it is not the JSON of a pack"),
            (lambda path: os.mkfifo(path), "it is not a regular file"),
            (lambda path: path.touch() or os.truncate(path, 1 << 40), "over 64 MiB"),
            (lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 99), "not a database"),
            (
                lambda path: sqlite3.connect(path).executescript("CREATE TABLE t(x)"),
                "not a safetune",
            ),
        ],
        ids=["missing", "empty", "broken", "fifo", "huge", "no database", "another database"],
    )
    def test_a_source_that_is_neither_pack_nor_database_is_named(
        self, tmp_path: Path, make: Any, reason: str
    ) -> None:
        path = tmp_path / "source.json"
        make(path)
        with pytest.raises((PackError, StoreError), match=reason) as caught:
            exchange.collect(path)
        assert str(path) in str(caught.value)


class TestWrite:
    def test_whole_or_not_at_all(self, choices: Any, tmp_path: Path) -> None:
        path = tmp_path / "packs" / "add.json"
        exchange.write(path, packs.dump([choices.entry()]))
        before = path.read_bytes()
        bad = replace(choices.entry(), choice=replace(choices.entry().choice, median_ms=-1.0))
        with pytest.raises(PackError, match="median_ms"):
            exchange.write(path, packs.dump([choices.entry(), bad]))
        assert contents(tmp_path / "packs") == {"add.json": before}
        assert path.stat().st_mode & 0o777 == 0o644

    @pytest.mark.parametrize("way", ["a file for a folder", "a folder for a file"])
    def test_a_path_that_cannot_be_written_is_named_and_left_as_it_is(
        self, choices: Any, tmp_path: Path, way: str
    ) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "folder" / "inner").mkdir(parents=True)
        path = tmp_path / ("file/add.json" if way == "a file for a folder" else "folder")
        with pytest.raises(PackError, match=f"cannot write {path}"):
            exchange.write(path, packs.dump([choices.entry()]))
        assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]
