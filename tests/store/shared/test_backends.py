"""What every kind of shared store does: the first valid record of a name is the choice."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from safetune.errors import InvalidSetting, StoreError
from safetune.keys import encoding
from safetune.settings import Settings, display_url
from safetune.store.lookup import GuardedStore
from safetune.store.shared import protocol as shared_record
from safetune.store.shared.files import file_name
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import Name, SharedStore, name_of

from .conftest import LIST, SPACE, Children, MakeLayer, choice, config, key, pulled, stored

Spoil = Callable[[Name, str], None]


@pytest.fixture(params=["directory", "memory", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if kind == "postgres":
        return str(request.getfixturevalue("database"))
    (tmp_path / "shared").mkdir()
    return f"file://{tmp_path}/shared" if kind == "directory" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def shared(url: str) -> Iterator[SharedStore]:
    opened = open_shared(url)
    yield opened
    opened.close()


@pytest.fixture
def spoil(kind: str, url: str, shared: Any) -> Spoil:
    """A function that puts something else in the place of a record."""

    def replace(name: Name, text: str) -> None:
        if kind == "postgres":
            with shared.writing() as connection:
                connection.execute(
                    "UPDATE safetune.choice SET record = %s WHERE key = %s", (text, name.key)
                )
            return
        space = f"{shared_record.FORMAT}/{SPACE}"
        path = f"{space}/{name.key[:2]}/" if kind == "directory" else f"{space}/"
        path += f"add_kernel.{name.key}.{name.declared}.{name.generation}.json"
        if kind == "directory":
            Path(url.removeprefix("file://"), path).write_text(text)
        else:
            import fsspec

            fsspec.filesystem("memory").pipe_file(f"{url}/{path}", text.encode())

    return replace


def test_an_empty_store_has_no_records(shared: SharedStore) -> None:
    assert shared.names(SPACE) == set()
    assert shared.get(SPACE, key().digest, LIST) is None
    assert pulled(shared, {name_of(stored())}) == []


def test_published_records_are_there_for_every_node(url: str, shared: SharedStore) -> None:
    records = [stored(number) for number in range(5)]
    assert shared.publish(SPACE, records) == records
    other = open_shared(url)
    names = other.names(SPACE)
    assert names == {name_of(record) for record in records}
    assert sorted(pulled(other, names), key=name_of) == sorted(records, key=name_of)
    assert pulled(other, {name_of(records[2])}) == [records[2]]
    assert other.get(SPACE, key(3).digest, LIST) == records[3]
    assert other.names("another device") == set()
    other.close()


def test_the_first_of_a_generation_wins(shared: SharedStore) -> None:
    first, second = stored(block=64), stored(block=128)
    assert shared.publish(SPACE, [first]) == [first]
    assert shared.publish(SPACE, [second]) == [first]
    assert shared.get(SPACE, key().digest, LIST) == first


def test_the_latest_generation_is_the_choice(shared: SharedStore) -> None:
    records = [stored(block=16 << i, generation=i + 1) for i in range(11)]
    shared.publish(SPACE, records)
    assert shared.get(SPACE, key().digest, LIST) == records[-1]


def test_each_config_list_has_its_own_choice(shared: SharedStore) -> None:
    first, second = stored(block=64), stored(block=128, declared=config(7))
    shared.publish(SPACE, [first, second])
    assert shared.get(SPACE, key().digest, LIST) == first
    assert shared.get(SPACE, key().digest, config(7)) == second


@pytest.mark.parametrize("what", ["nothing", "half of it", "another one", "a directory's name"])
def test_anything_but_a_record_is_a_miss_and_is_left_alone(
    shared: SharedStore, spoil: Spoil, what: str
) -> None:
    record = stored()
    text = shared_record.encode(record)
    shared.publish(SPACE, [record, stored(1)])
    spoil(
        name_of(record),
        {
            "nothing": "",
            "half of it": text[: len(text) // 2],
            "another one": shared_record.encode(stored(5)),
            "a directory's name": "/etc/passwd",
        }[what],
    )

    assert shared.get(SPACE, key().digest, LIST) is None
    assert pulled(shared, shared.names(SPACE)) == [stored(1)]
    new = stored(block=128)
    assert shared.publish(SPACE, [new]) == [new]
    assert shared.get(SPACE, key().digest, LIST) is None
    shared.forget(SPACE, {name_of(record)})
    assert shared.publish(SPACE, [new]) == [new] == [shared.get(SPACE, key().digest, LIST)]


def test_a_choice_of_a_newer_version_stays_and_is_not_used(
    shared: SharedStore, spoil: Spoil, local: GuardedStore, layer_of: MakeLayer
) -> None:
    """Regression: such a record was replaced as if it were half of one."""
    content = json.loads(shared_record.encode(stored(0, 128)))
    del content["checksum"]
    content["tunings"][0]["choices"][0]["clocks_mhz"] = 1980
    newer = encoding.dumps({**content, "checksum": encoding.digest(content)})
    shared.publish(SPACE, [stored(0), stored(1)])
    spoil(name_of(stored(0)), newer)

    layer = layer_of(shared)
    layer.refresh(SPACE)
    assert local.choice(key(1).digest) == choice(1)
    assert local.choice(key(0).digest) is None
    assert layer.choice(key(0).digest, LIST) is None
    assert layer.claim(SPACE, key(0).digest, LIST, force=False).stored is None

    assert layer.publish(SPACE, stored(0, 64)) == stored(0, 64)

    (found,) = [each for each in pulled(shared, shared.names(SPACE)) if each.unknown]
    assert shared_record.encode(found) == newer


def test_writers_that_race_end_with_one_choice_for_all(
    url: str, kind: str, shared: SharedStore, children: Children
) -> None:
    """Three processes publish another choice for the same forty names at the same time."""
    if kind == "memory":
        pytest.skip("memory:// is one process's")
    script = """
import sys
from tests.store.shared.conftest import SPACE, stored
from safetune.store.shared.opening import open_shared
store = open_shared(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    record = stored(number, 16 << int(sys.argv[2]))
    print(store.publish(SPACE, [record])[0].choice.config["BLOCK"])
"""
    outputs = children.race(script, url, count=3)
    assert len(set(outputs)) == 1
    assert len(outputs[0].split()) == 40
    found = {each.choice.key: each.choice for each in pulled(shared, shared.names(SPACE))}
    assert [found[key(n).digest].config["BLOCK"] for n in range(40)] == [
        int(block) for block in outputs[0].split()
    ]


@pytest.mark.parametrize(
    "url", ["/shared/directory", "shared", "file://relative/path", "s3://", "no scheme://x"]
)
def test_a_malformed_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_SHARED", url)
    with pytest.raises(InvalidSetting, match=r"SAFETUNE_SHARED.*file:///directory"):
        Settings.current()


def test_an_unknown_scheme_is_refused_with_those_that_may_be_meant() -> None:
    with pytest.raises(InvalidSetting, match=r"nonsense://bucket.*no protocol.*s3, gs") as caught:
        open_shared("nonsense://bucket/folder")
    assert "before ://" in caught.value.fix


def test_a_password_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://someone:secret@127.0.0.1:1/db?password=secret"
    assert display_url(url) == "postgresql://127.0.0.1:1/db"
    for none in ("nothing:secret@host", "host=127.0.0.1 password=secret"):
        monkeypatch.setenv("SAFETUNE_SHARED", none)
        with pytest.raises(InvalidSetting) as caught:
            Settings.current()
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://u:se/cret@host/db", "postgresql://host/db"),
        ("postgresql://u:[secret@host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://u:se@cret@host/db?sslmode=require", "postgresql://host/db"),
        ("postgresql://u:se?cret@host/db", "postgresql://…"),
        ("postgresql://u:secret#x@host/db", "postgresql://…"),
        ("postgresql://host/db?password=se@cret", "postgresql://…"),
        ("s3://key:secret@bucket/folder", "s3://bucket/folder"),
        ("file:///data/team@lab/cache", "file:///data/team@lab/cache"),
    ],
)
def test_a_password_of_any_characters_is_not_shown(url: str, place: str) -> None:
    assert display_url(url) == place


@pytest.mark.parametrize(
    "url",
    [
        form.format(password=password)
        for form in (
            "postgresql://user:{password}@127.0.0.1:1/db",
            "postgresql://127.0.0.1:1/db?user=u&password={password}",
            "postgresql:///db?host=127.0.0.1&port=1&password={password}&sslmode=disable",
        )
        for password in (
            *("s3cr3t%zzTAIL", "s3cr3t/TAIL", "s3cr3t@TAIL", "s3cr3t#TAIL", "s3cr3t?TAIL"),
            *("s3cr3t:TAIL", "s3cr3t TAIL", "s3cr3t[TAIL", "s3cr3t%", "s3cr3t&TAIL=1"),
            *("s3cr3t,TAIL", "%73%33%63r3t%41", "s3cr3t\\TAIL", "s3cr3t=TAIL", "s3cr3t&port=TAIL"),
        )
    ],
)
def test_an_error_of_the_server_or_of_libpq_shows_no_password(url: str) -> None:
    """A library that takes a part of it for something else names that part."""
    postgres = pytest.importorskip("safetune.store.shared.postgres")
    with pytest.raises(StoreError) as caught:
        postgres.Postgres(url).names(SPACE)
    assert not re.search("s3cr3t|TAIL|%73|%33", str(caught.value))


def test_an_error_of_a_file_system_shows_no_password(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("fsspec.implementations.memory")

    class Telling(fsspec.implementations.memory.MemoryFileSystem):
        protocol = "telling"
        cachable = False

        def ls(self, path: str, *_: Any, **__: Any) -> Any:
            raise ValueError(f"cannot log in to {path}")

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return path

    fsspec.register_implementation("telling", Telling, clobber=True)
    with pytest.raises(StoreError, match=r"telling://host/folder: ValueError$") as caught:
        open_shared("telling://user:s3cr3t@host/folder").names(SPACE)
    assert "s3cr3t" not in str(caught.value)


def test_a_valid_record_stays_where_a_file_system_ignores_how_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Azure's does: it takes `mode="create"` among its other arguments, and overwrites."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("fsspec.implementations.memory")

    class Overwriting(fsspec.implementations.memory.MemoryFileSystem):
        protocol = "overwriting"
        store: ClassVar[dict[str, Any]] = {}

        def pipe_file(self, path: str, value: bytes, overwrite: bool = True, **_: Any) -> None:
            super().pipe_file(path, value, mode="overwrite")

    fsspec.register_implementation("overwriting", Overwriting, clobber=True)
    one, other = open_shared("overwriting://folder"), open_shared("overwriting://folder")
    assert one.publish(SPACE, [stored(0, 64)]) == [stored(0, 64)]
    assert other.publish(SPACE, [stored(0, 128)]) == [stored(0, 64)]
    assert one.get(SPACE, key().digest, LIST) == stored(0, 64)


def test_a_record_in_the_namespace_of_another_device_is_absent(shared: SharedStore) -> None:
    """A writer of the store can put a valid record anywhere; no node adopts it there."""
    record, elsewhere = stored(), encoding.digest("another device")
    shared.publish(elsewhere, [record])
    assert shared.get(elsewhere, record.choice.key, LIST) is None
    assert pulled(shared, shared.names(elsewhere), elsewhere) == []


def test_the_name_of_any_kernel_makes_a_valid_file_name() -> None:
    from dataclasses import replace

    record = stored()
    odd = replace(record, key=replace(record.key, kernel_name="../<lambda>/" + "ü" * 200))
    assert os.path.basename(file_name(odd)) == file_name(odd)
    assert len(file_name(odd)) < 200


def test_what_is_forgotten_is_gone_for_every_node(url: str, shared: SharedStore) -> None:
    assert shared.namespaces() == []
    shared.publish(SPACE, [stored(number) for number in range(3)])
    other = open_shared(url)
    assert other.namespaces() == [SPACE]
    other.forget(SPACE, {name_of(stored(1)), name_of(stored(7))})
    assert shared.names(SPACE) == {name_of(stored(0)), name_of(stored(2))}
    assert shared.get(SPACE, key(1).digest, LIST) is None
    other.close()
