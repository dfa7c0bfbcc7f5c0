"""Opening: new, old, newer, foreign and broken databases; permissions; what is imported."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from safetune.errors import StoreError, StoreWarning
from safetune.settings import Settings
from safetune.store import lookup
from safetune.store.local import db_files, opening
from safetune.store.local.store import Store


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read(tmp_path, records, umask):
    previous = os.umask(umask)
    try:
        store = Store.open(tmp_path / "cache")
        store.put_choice(records.choice())
        names = {path.name: mode(path) for path in store.path.parent.iterdir()}
    finally:
        os.umask(previous)
    assert mode(tmp_path / "cache") == 0o700
    files = ("safetune.db", "safetune.db-wal", "safetune.db-shm", "safetune.db.lock")
    assert names == dict.fromkeys(files, 0o600)
    store.close()


def test_a_directory_that_exists_keeps_its_permissions(tmp_path):
    tmp_path.chmod(0o755)
    Store.open(tmp_path).close()
    assert mode(tmp_path) == 0o755


def test_a_new_database_is_marked_and_in_wal_mode(store):
    connection = sqlite3.connect(store.path)
    pragmas = [
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("user_version", "application_id", "journal_mode")
    ]
    assert pragmas == [opening.VERSION, 0x53465455, "wal"]
    connection.close()


@pytest.mark.parametrize("frozen", [False, True], ids=["written to", "frozen"])
def test_damage_that_sqlite_quotes_and_python_cannot_read_does_not_reach_the_caller(
    store, records, frozen, monkeypatch
):
    """The text of the schema is not UTF-8 any more, and is a part of SQLite's message."""
    store.put_choice(records.choice())
    store.close()
    content = store.path.read_bytes()
    assert b"CREATE TABLE" in content
    store.path.write_bytes(content.replace(b"CREATE TABLE", b"\xc2REATE TABLE", 1))
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(store.path.parent))
    monkeypatch.setenv("SAFETUNE_MODE", "frozen" if frozen else "tune")
    with pytest.warns(StoreWarning, match="malformed database schema"):
        opened = lookup.open_lookup(Settings.current())
    assert opened.store.choice("key") is None
    assert db_files.aside(store.path).exists() is not frozen


def test_a_damaged_database_is_not_moved_while_another_opens_it(tmp_path):
    """Regression: a process with the old file open took the new one's logs for its own."""
    path = tmp_path / "safetune.db"
    path.write_bytes(b"{}" * 4096)
    refused = []

    def prepare_slowly(connection):
        if not refused:
            with pytest.raises(StoreError, match="other processes have been opening it") as caught:
                opening.connect(path, opening.prepare, wait_s=0.0)
            refused.append(caught.value)
            assert not db_files.aside(path).exists()
        opening.prepare(connection)

    with pytest.warns(UserWarning, match="cannot use the store"):
        connection, found = opening.connect(path, prepare_slowly, wait_s=0.0)
    connection.close()
    assert len(refused) == 1
    assert db_files.aside(path).exists()
    assert found == db_files.identity(path)


def test_a_database_is_opened_where_no_lock_is_to_be_had(tmp_path, records):
    (tmp_path / "safetune.db.lock").mkdir()
    store = Store.open(tmp_path)
    store.put_choice(records.choice())
    assert store.choice("key") == records.choice()
    store.close()


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE theirs (x)", "PRAGMA user_version=1", "PRAGMA application_id=7"]
)
def test_a_database_of_another_program_is_refused_and_unchanged(tmp_path, statement):
    path = tmp_path / "safetune.db"
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()
    content = path.read_bytes()
    with pytest.raises(StoreError, match="not a safetune database"):
        Store.open(tmp_path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("frozen", [False, True], ids=["written to", "frozen"])
def test_a_database_of_an_earlier_format_is_set_aside_with_one_line(
    store, records, frozen, monkeypatch
):
    store.put_choice(records.choice())
    store.close()
    connection = sqlite3.connect(store.path)
    version = opening.VERSION - 1
    connection.execute(f"PRAGMA user_version={version}")
    connection.close()
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(store.path.parent))
    monkeypatch.setenv("SAFETUNE_MODE", "frozen" if frozen else "tune")
    with pytest.warns(StoreWarning, match=f"earlier safetune wrote it: format {version}") as caught:
        opened = lookup.open_lookup(Settings.current()).store
    assert len(caught) == 1
    assert opened.choice("key") is None
    assert db_files.aside(store.path).exists() is not frozen
    assert opened.put_choice(records.choice("c2")) == records.choice("c2") == opened.choice("key")


def test_tables_made_between_two_reads_are_not_taken_for_another_programs_database(tmp_path):
    """Regression: version 0, read before, and tables, read after, looked like another program's."""
    path = tmp_path / "safetune.db"
    path.touch()
    other = threading.Thread(target=lambda: Store.open(tmp_path).close())

    class Interrupted(sqlite3.Connection):
        def execute(self, statement: str, *parameters: object) -> sqlite3.Cursor:
            if "sqlite_master" in statement and other.ident is None:
                other.start()
                other.join(0.5)  # it has to wait for this connection; if not, it is done by then
            return super().execute(statement, *parameters)

    connection = sqlite3.connect(path, isolation_level=None, factory=Interrupted)
    opening.prepare(connection)
    connection.close()
    other.join()
    Store.open(tmp_path).close()


LOADED = (
    "heavy = ('torch', 'triton', 'numpy', 'sqlite_utils')\n"
    "print([name for name in heavy if name in sys.modules])"
)


def test_a_process_whose_choices_are_stored_imports_no_heavy_module(store, records, children):
    store.put_key(records.key())
    store.put_choice(records.choice())
    script = f"""
store = Store.open(directory)
assert store.choice("key").config_digest == "c1"
assert store.generation("key") == 1 and store.trials("key") == []
Store.open(directory / "new").close()
{LOADED}
"""
    assert children.run(script, store.path.parent) == "[]\n"


def test_the_last_database_that_was_set_aside_is_kept_and_of_no_other_a_log(tmp_path):
    for content in (b"first" * 1000, b"second" * 1000):
        Store.open(tmp_path).close()
        for log in ("-wal", "")[content.startswith(b"second") :]:
            (tmp_path / f"safetune.db{log}").write_bytes(content)
        with pytest.warns(UserWarning, match=r"renamed it to .*safetune\.db\.aside and"):
            Store.open(tmp_path).close()
    kept = {each.name: each.read_bytes() for each in tmp_path.glob("*.aside*")}
    assert kept == {"safetune.db.aside": b"second" * 1000}


def test_reading_alone_writes_nothing_beside_what_a_killed_writer_left(tmp_path, children):
    directory = tmp_path / "cache"
    children.run(
        "store = Store.open(directory)\nstore.put_choice(choice('c1'))\nos._exit(0)", directory
    )

    def files():
        return {
            path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()
        }

    before = files()
    opened = Store.open_read_only(directory / "safetune.db")
    found = opened.choice("key")
    opened.close()
    assert found is not None
    assert files() == before


def test_a_copy_without_the_log_of_a_database_in_use_says_so(tmp_path, store, records):
    """Regression: it said that an older safetune wrote it, and so did an empty file."""
    store.put_choice(records.choice())
    copy = tmp_path / "copy.db"
    copy.write_bytes(store.path.read_bytes())
    with pytest.raises(StoreError, match=r"it is empty\. .* use `safetune export` instead"):
        Store.open_read_only(copy)
