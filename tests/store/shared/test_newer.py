"""Records that a newer version wrote beside ours: not launched, not replaced."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from safetune.keys import encoding
from safetune.store.lookup import GuardedStore
from safetune.store.shared.files import file_name
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import FORMAT, encode

from .conftest import LIST, SPACE, MakeLayer, choice, key, stored, tuned


def newer(number: int) -> str:
    """Return a record with a field that this version does not know."""
    content = json.loads(encode(stored(number, 128)))
    del content["checksum"]
    content["tunings"][0]["choices"][0]["clocks_mhz"] = 1980
    return encoding.dumps({**content, "checksum": encoding.digest(content)})


@pytest.mark.parametrize("kind", ["directory", "objects", "postgres"])
def test_a_choice_of_a_newer_version_stays_and_is_not_used(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    local: GuardedStore,
    layer_of: MakeLayer,
) -> None:
    """Regression: such a record was replaced as if it were half of one."""
    text = newer(0)
    if kind == "postgres":
        url = request.getfixturevalue("database")
        backend = open_shared(url)
        backend.publish(SPACE, [stored(0), stored(1)])
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            update = "UPDATE safetune.choice SET record = %s WHERE key = %s"
            connection.execute(update, (text, key(0).digest))
    else:
        memory = f"memory://{uuid.uuid4().hex}"
        url = f"file://{tmp_path / 'shared'}" if kind == "directory" else memory
        backend = open_shared(url)
        backend.publish(SPACE, [stored(0), stored(1)])
        replace_record(url, kind, text)

    layer = layer_of(backend)
    layer.refresh(SPACE)
    assert local.choice(key(1).digest) == choice(1)
    assert local.choice(key(0).digest) is None
    assert layer.choice(key(0).digest, LIST) is None
    assert layer.claim(SPACE, key(0).digest, LIST, force=False).stored is None

    assert layer.publish(SPACE, stored(0, 64)) == stored(0, 64)

    (found,) = [each for each in backend.pull(SPACE, backend.names(SPACE)) if each.unknown]
    assert encode(found) == text


def test_a_choice_with_a_mark_of_a_newer_version_is_not_published(
    tmp_path: Path, local: GuardedStore, layer_of: MakeLayer
) -> None:
    """An older process of this node cannot know whether such a time holds elsewhere."""
    backend = open_shared(f"file://{tmp_path / 'shared'}")
    tuned(local, 0, marks=("cooled: 3 times",))
    tuned(local, 1, marks=("disputed: 2 of 3",))
    layer_of(backend).refresh(SPACE)
    assert {name.key for name in backend.names(SPACE)} == {key(1).digest}


def replace_record(url: str, kind: str, text: str) -> None:
    name = file_name(stored(0))
    if kind == "directory":
        bucket = Path(url.removeprefix("file://")) / str(FORMAT) / SPACE / key(0).digest[:2]
        (bucket / name).write_text(text)
        return
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.pipe_file(f"{root}/{FORMAT}/{SPACE}/{name}", text.encode())
