"""A cache directory on a network file system: the database is on the node's own disk."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from safetune.errors import StoreError
from safetune.settings import Settings
from safetune.store.local import db_files
from safetune.store.local.db_files import locate
from tests.store.children import Children

#: statfs(2) as of a file system of another type, below one directory.
_STATFS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
int statfs(const char *path, struct statfs *found) {
    int (*real)(const char *, struct statfs *) = dlsym(RTLD_NEXT, "statfs");
    const char *below = getenv("NETWORK_DIRECTORY");
    int result = real(path, found);
    if (result == 0 && below && strncmp(path, below, strlen(below)) == 0)
        found->f_type = strtoul(getenv("NETWORK_TYPE"), 0, 0);
    return result;
}
"""

#: A process of a node: tells where its database is, what it finds and what it is told.
_NODE = """
import warnings
from tests.store.shared.conftest import LIST, SPACE, key, tuned
from safetune.errors import StoreError
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    opened = open_lookup(Settings.current())
    found = opened.find(key(1), LIST)
    if sys.argv[2:] == ["tune"]:
        tuned(opened.store, 1, 64)
        opened.store.shared.pull(SPACE)
    told = [str(each.message) for each in caught]
print(json.dumps([str(opened.store.path), found and found.config["BLOCK"], told]))
"""


@pytest.fixture(scope="session")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose `statfs` says what NETWORK_TYPE says."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    library = tmp_path_factory.mktemp("statfs") / "statfs.so"
    command = [compiler, "-shared", "-fPIC", "-xc", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=_STATFS, text=True, check=True)
    return library


class Cluster:
    """Nodes with disks of their own and one home on a network."""

    def __init__(self, folder: Path, children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._children, self._monkeypatch = folder, children, monkeypatch
        self.home = folder / "home"
        self.home.mkdir()

    def run(self, node: str, *words: str, **environment: str) -> Any:
        disk = self.folder / node
        disk.mkdir(exist_ok=True)
        with self._monkeypatch.context() as patch:
            for name in ("SAFETUNE_CACHE_DIR", "SAFETUNE_SHARED", "XDG_CACHE_HOME"):
                patch.delenv(name, raising=False)
            for name, value in {"HOME": str(self.home), "TMPDIR": str(disk), **environment}.items():
                patch.setenv(name, value)
            return json.loads(self._children.run(_NODE, "unused", *words))


@pytest.fixture
def cluster(
    tmp_path: Path, preload: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> Cluster:
    made = Cluster(tmp_path, children, monkeypatch)
    monkeypatch.setenv("LD_PRELOAD", str(preload))
    monkeypatch.setenv("NETWORK_DIRECTORY", str(made.home))
    monkeypatch.setenv("NETWORK_TYPE", "0x6969")
    return made


@pytest.mark.parametrize(
    "variable", ["HOME", pytest.param("SAFETUNE_CACHE_DIR", marks=pytest.mark.full)]
)
def test_a_choice_outlives_the_job_and_reaches_the_other_nodes(
    cluster: Cluster, variable: str
) -> None:
    cache = cluster.home / (".cache/safetune" if variable == "HOME" else "choices")
    environment = {} if variable == "HOME" else {variable: str(cache)}
    path, found, told = cluster.run("one", "tune", **environment)
    assert found is None
    assert Path(path).is_relative_to(cluster.folder / "one")
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    assert [text for text in told if "(NFS)" in text and str(cache) in text] == told != []
    shutil.rmtree(cluster.folder / "one")  # as at the end of a job
    other_path, found, told = cluster.run("two", **environment)
    assert Path(other_path).is_relative_to(cluster.folder / "two")
    assert (found, len(told)) == (64, 1)
    assert list(cache.rglob("*.json"))
    assert not [*cluster.home.rglob("*.db*"), *cluster.home.rglob("*lock*")]


def test_an_explicit_shared_store_is_the_one_that_is_used(cluster: Cluster) -> None:
    shared = cluster.folder / "shared"
    path, _, told = cluster.run("one", "tune", SAFETUNE_SHARED=f"file://{shared}")
    assert Path(path).is_relative_to(cluster.folder / "one")
    assert len(told) == 1
    assert list(shared.rglob("*.json"))
    assert not list(cluster.home.rglob("*.json"))


@pytest.mark.full
def test_frozen_makes_nothing_and_finds_the_shared_choices(cluster: Cluster) -> None:
    before = cluster.run("one", SAFETUNE_MODE="frozen")
    assert before[:2] == ["None", None]
    assert list(cluster.home.iterdir()) == list((cluster.folder / "one").iterdir()) == []
    cluster.run("one", "tune")
    assert cluster.run("two", SAFETUNE_MODE="frozen")[1] == 64
    assert list((cluster.folder / "two").iterdir()) == []


def settings_of(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Settings:
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(directory))
    monkeypatch.delenv("SAFETUNE_SHARED", raising=False)
    return Settings.current()


def test_a_mount_that_cannot_be_looked_at_is_the_shared_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In frozen mode: the shared store warns of it, and no launch fails."""

    def exists(_: Path) -> bool:
        raise PermissionError

    with monkeypatch.context() as patched:
        settings = settings_of(patched, tmp_path / "mount")
        patched.setattr(Path, "exists", exists)
        found = locate(settings, lambda _: "NFS", writes=False)
    assert found.choices == tmp_path / "mount"


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0x0BD00BD0, "Lustre"),
        (0x47504653, "GPFS"),
        (0x19830326, "BeeGFS"),
        (0xFF534D42, "CIFS"),
        (0x65735546, "FUSE"),
    ],
)
def test_network_file_systems_are_known_by_their_number(
    tmp_path: Path, number: int, name: str
) -> None:
    """Of a directory that does not exist yet, by the one that it will be in."""
    there = {tmp_path / "home": number, tmp_path: 0xEF53}
    assert db_files.network_of(tmp_path / "home" / "not" / "yet", there.get) == name
    assert db_files.network_of(tmp_path, there.get) == ""


@pytest.mark.parametrize("names", [("a", "b"), ("a/cache", "b/cache")])
def test_each_cache_directory_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    directories = {
        locate(settings_of(monkeypatch, tmp_path / name), lambda _: "NFS").directory
        for name in names
    }
    assert len(directories) == 2
    assert {directory.parent for directory in directories} == {Path(tempfile.gettempdir())}


def test_a_directory_of_another_user_on_the_disk_of_a_node_is_refused(cluster: Cluster) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    directory = Path(cluster.run("one")[0]).parent
    shutil.rmtree(directory)
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    path, _, told = cluster.run("one", "tune")
    assert path == "None"
    assert list(cluster.home.rglob("*.json")), "the shared store is used all the same"
    assert "belongs to another user" in told[1]
    assert (len(told), list(directory.iterdir())) == (2, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o755, 0o775, 0o757])
def test_a_directory_of_root_is_trusted_unless_others_may_write(mode: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, mode)
        os.seteuid(12345)
        try:
            with (
                contextlib.nullcontext()
                if mode == 0o755
                else pytest.raises(StoreError, match="belongs to another user")
            ):
                db_files.check(Path(directory) / "safetune.db")
        finally:
            os.seteuid(0)
