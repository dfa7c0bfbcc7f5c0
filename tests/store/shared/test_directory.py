"""A directory as network file systems have it: other users, other clients, half-written files."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safetune.errors import StoreError
from safetune.store.records import StoredChoice
from safetune.store.shared import files as module
from safetune.store.shared.files import Directory
from safetune.store.shared.protocol import FORMAT, Name, name_of

from .conftest import LIST, SPACE, Children, key, pulled, stored

PREAMBLE = """
import os, resource, signal, sys, warnings
from pathlib import Path
from tests.store.shared.conftest import SPACE, stored
from safetune.store.shared.files import Directory
from safetune.store.shared.protocol import Unwritable
store = Directory(Path(sys.argv[1]))
"""


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that other users can reach, unlike pytest's."""
    directory = Path(tempfile.mkdtemp(prefix="safetune-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_a_record_has_its_name_once_its_content_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []

    def fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)
        assert list(tmp_path.rglob("*.json")) == []

    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    Directory(tmp_path / "shared").publish(SPACE, [stored()])
    (record,) = tmp_path.rglob("*.json")
    (temporary,) = synced
    assert temporary.parent == record.parent
    assert temporary.name.startswith(f".{record.name}.")


def test_a_directory_that_may_only_be_read_is_read(open_path: Path, children: Children) -> None:
    """As another user: root may write anywhere."""
    shared = open_path / "shared"
    shared.mkdir()
    Directory(shared).publish(SPACE, [stored()])
    for path in [shared, *shared.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    output = children.run(
        PREAMBLE + "if os.getuid() == 0: os.setuid(65534)\n"
        "print(store.names(SPACE) and 'read')\n"
        "try: store.publish(SPACE, [stored(1)])\n"
        "except Unwritable as error: print(error)\n"
        "print(store.publish(SPACE, [stored(0, 999)])[0].choice.config)\n",
        shared,
    )
    read, problem, found = output.splitlines()
    assert read == "read"
    assert problem.startswith(f"cannot write to the shared store file://{shared}: ")
    assert found == "{'BLOCK': 64}"


def test_a_full_disk_leaves_no_half_record(tmp_path: Path, children: Children) -> None:
    """A write that is cut short leaves nothing behind under any name."""
    (tmp_path / "shared").mkdir()
    output = children.run(
        PREAMBLE + "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try: store.publish(SPACE, [stored()])\n"
        "except Unwritable as error: print(error)\n",
        tmp_path / "shared",
    )
    assert "File too large" in output
    assert files(tmp_path) == []


def test_a_share_that_is_not_mounted_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*/nowhere/shared.*No such file"):
        Directory(tmp_path / "missing" / "nowhere" / "shared").names(SPACE)


def test_an_unmounted_share_is_not_made_on_the_local_disk(tmp_path: Path) -> None:
    """Choices below its mount point would be hidden by the next mount."""
    share = tmp_path / "mount" / "team"
    with pytest.raises(StoreError, match=r"cannot write to .*No such file"):
        Directory(share).publish(SPACE, [stored()])
    assert list(tmp_path.iterdir()) == []
    share.parent.mkdir()  # the mount point
    empty = f"mount is empty, perhaps not mounted: create {share} first"
    with pytest.raises(StoreError, match=f"cannot use .*{empty}"):
        Directory(share).names(SPACE)
    with pytest.raises(StoreError, match=f"cannot use .*{empty}"):
        Directory(share).publish(SPACE, [stored()])
    (tmp_path / "mount" / "other").mkdir()  # mounted, with something on it
    assert Directory(share).publish(SPACE, [stored()]) == [stored()]


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "endless file": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", ODD)
def test_one_odd_entry_is_a_miss_and_the_others_are_read_and_written(
    kind: str, tmp_path: Path
) -> None:
    """In the place of a record, and in that of a directory of records."""
    store = Directory(tmp_path)
    store.publish(SPACE, [stored(number) for number in range(6)])
    space = tmp_path / str(FORMAT) / SPACE
    (path,) = space.rglob(f"*{key(0).digest}*")
    path.unlink()
    ODD[kind](path)
    bucket = space / key(7).digest[:2]
    assert not bucket.exists()
    ODD[kind](bucket)

    assert store.get(SPACE, key(0).digest, LIST) is None
    names = store.names(SPACE)
    assert {found.choice.key for found in pulled(store, names)} == {
        key(number).digest for number in range(1, 6)
    }
    new = [stored(0, 128), stored(7), stored(6)]
    assert store.publish(SPACE, new) == new
    assert store.get(SPACE, key(6).digest, LIST) == stored(6)
    assert os.path.lexists(path), "what is not a file is left as it is"


def test_a_file_where_the_directory_should_be_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "shared"
    place.write_text("")
    assert Directory(place).names(SPACE) == set()
    with pytest.raises(StoreError, match="cannot write to"):
        Directory(place).publish(SPACE, [stored()])


def test_files_of_other_programs_are_not_records(tmp_path: Path) -> None:
    store = Directory(tmp_path)
    store.publish(SPACE, [stored()])
    bucket = tmp_path / str(FORMAT) / SPACE / key().digest[:2]
    for name in (".add.tmp", "README", f"x.{'0' * 32}.{'1' * 32}.0.json", "x.json"):
        (bucket / name).write_text("{}")
    (bucket / f"dir.{'0' * 32}.{'1' * 32}.1.json").mkdir()
    assert {name.key for name in store.names(SPACE)} == {key().digest, "0" * 32}
    assert pulled(store, store.names(SPACE)) == [stored()]


def test_a_record_that_cannot_be_read_is_not_replaced(open_path: Path, children: Children) -> None:
    """Another user's file under a tight umask is a choice, though not one for this user."""
    (open_path / "shared").mkdir()
    store = Directory(open_path / "shared")
    store.publish(SPACE, [stored()])
    (path,) = (open_path / "shared").rglob("*.json")
    path.chmod(0)
    for each in path.parents[:4]:
        each.chmod(0o777)
    output = children.run(
        PREAMBLE + "if os.getuid() == 0: os.setuid(65534)\n"
        "print(store.publish(SPACE, [stored(0, 128), stored(1)]) == [stored(0, 128), stored(1)])\n",
        open_path / "shared",
    )
    path.chmod(0o600)
    assert output == "True\n"
    assert store.names(SPACE) == {name_of(stored()), name_of(stored(1))}
    assert store.get(SPACE, key().digest, LIST) == stored()


class TestLinks:
    """Links on a file system that is not local."""

    def paths(self, tmp_path: Path) -> tuple[Path, Path]:
        (tmp_path / "temporary").write_text("new")
        return tmp_path / "temporary", tmp_path / "record"

    def test_a_link_whose_reply_was_lost_has_succeeded(self, tmp_path: Path) -> None:
        """NFS repeats the request, and reports EEXIST for its own success."""
        temporary, path = self.paths(tmp_path)

        def link(source: Path, target: Path) -> None:
            os.link(source, target)
            raise FileExistsError(errno.EEXIST, "File exists")

        module.give_name(temporary, path, link)
        assert path.read_text() == "new"

    def test_without_hard_links_the_file_is_renamed_if_the_name_is_free(
        self, tmp_path: Path
    ) -> None:
        temporary, path = self.paths(tmp_path)

        def link(source: Path, target: Path) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        module.give_name(temporary, path, link)
        assert path.read_text() == "new"
        temporary.write_text("newer")
        module.give_name(temporary, path, link)
        assert path.read_text() == "new"

    def test_any_other_error_is_raised(self, tmp_path: Path) -> None:
        temporary, path = self.paths(tmp_path)

        def link(source: Path, target: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(OSError, match="No space"):
            module.give_name(temporary, path, link)


def test_a_record_published_between_the_check_and_the_write_wins(tmp_path: Path) -> None:
    """Another node publishes after this one has looked, and before it has written."""

    class SlowWriter(Directory):
        def _read(self, path: Path, namespace: str, name: Name) -> StoredChoice | None:
            found = super()._read(path, namespace, name)
            if found is None:
                Directory(tmp_path).publish(SPACE, [stored(0, 64)])
            return found

    assert SlowWriter(tmp_path).publish(SPACE, [stored(0, 128)]) == [stored(0, 64)]
    assert Directory(tmp_path).get(SPACE, key().digest, LIST) == stored(0, 64)
