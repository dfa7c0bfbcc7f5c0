"""Locks of keys: one process and one thread at a time, and free when the process ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.store.local import locks
from safetune.store.local.locks import try_lock
from tests.store.local.conftest import HOLD


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "safetune.db"


@pytest.fixture
def holder(holding: Any, tmp_path: Path) -> Any:
    """A process that has locked `key`."""
    return holding(tmp_path, "key")


def wait_for_death(pid: int) -> None:
    """Until it is a zombie, which no process has reaped."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def assert_free(database: Path, name: str = "key") -> None:
    lock = try_lock(database, name)
    assert lock is not None
    lock.release()


def test_one_process_has_it_until_it_lets_go(database: Path, holder: Any, children: Any) -> None:
    assert try_lock(database, "key") is None
    assert_free(database, "another key")
    assert locks.locked(database, ["key", "another key"]) == {"key"}
    children.end(holder, "\n")
    assert locks.locked(database, ["key"]) == set()
    assert_free(database)


def test_a_lock_ends_with_its_process(database: Path, holder: Any) -> None:
    assert try_lock(database, "key") is None
    holder.kill()
    wait_for_death(holder.pid)
    assert_free(database)


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_owner(
    database: Path, children: Any, tmp_path: Path
) -> None:
    """Such as a DataLoader's worker: with flock, it would hold the key as long as it lives."""
    owner = children.start(
        """
from safetune.store.local.locks import try_lock
lock = try_lock(directory / "safetune.db", "key")
if not (pid := os.fork()):
    sys.stdin.readline()
    os._exit(0)
print(pid, flush=True)
sys.stdin.readline()
""",
        tmp_path,
    )
    child = int(owner.stdout.readline())
    assert try_lock(database, "key") is None
    owner.kill()
    wait_for_death(owner.pid)
    os.kill(child, 0)  # raises unless it is alive
    assert_free(database)
    os.kill(child, signal.SIGKILL)


def test_a_fork_does_not_hold_what_its_parent_holds(
    database: Path, children: Any, tmp_path: Path
) -> None:
    output = children.run(
        """
from safetune.store.local.locks import locked, try_lock
database = directory / "safetune.db"
lock = try_lock(database, "key")
if not (pid := os.fork()):
    lock.release()
    assert try_lock(database, "key") is None
    assert try_lock(database, "own") is not None
    os._exit(0)
print(os.waitpid(pid, 0)[1], locked(database, ["key", "own"]))
""",
        tmp_path,
    )
    assert output == "0 {'key'}\n"


def test_threads_exclude_each_other(database: Path) -> None:
    lock = try_lock(database, "key")
    assert lock is not None
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(try_lock(database, "key")))
    thread.start()
    thread.join()
    assert found == [None]
    assert try_lock(database, "key") is None
    assert locks.locked(database, ["key"]) == {"key"}
    lock.release()
    lock.release()  # once more has no effect on the next owner
    assert_free(database)


@pytest.fixture
def in_a_namespace(tmp_path: Path) -> Iterator[Any]:
    """A process that has locked `key`, and is process 1 of a PID namespace of its own."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c"]
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    script = f"import sys\nfrom pathlib import Path\ndirectory = Path(sys.argv[1])\n{HOLD}"
    process = subprocess.Popen(
        [*command, script, str(tmp_path), "key"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if line != "True\n":
        _, errors = process.communicate()
        assert "unshare" in errors, errors
        pytest.skip(f"no PID namespace can be made here: {errors.strip()}")
    yield process
    process.kill()
    process.communicate()


def test_processes_in_two_pid_namespaces_exclude_each_other(
    database: Path, in_a_namespace: Any
) -> None:
    """Two containers on one directory: each may call another process by the same number."""
    assert try_lock(database, "key") is None
    pid = in_a_namespace.pid
    os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text()), signal.SIGKILL)
    in_a_namespace.wait()  # `unshare` ends when the process is gone
    assert_free(database)


def test_a_lock_file_that_was_replaced_is_opened_anew(
    database: Path, children: Any, tmp_path: Path
) -> None:
    """The user has emptied the cache directory; the others lock the new file."""
    old = try_lock(database, "key")
    assert old is not None
    for path in tmp_path.iterdir():
        path.unlink()
    new = try_lock(database, "key")
    assert new is not None
    old.release()
    assert children.end(children.start(HOLD, tmp_path, "key"), "\n") == "False\n"
    new.release()


def test_descriptors_that_a_daemon_has_closed_are_opened_again(
    database: Path, children: Any, tmp_path: Path
) -> None:
    """Else it would lock bytes of whatever file has the number now."""
    output = children.run(
        """
from safetune.store.local.locks import try_lock
try_lock(directory / "safetune.db", "key").release()
os.closerange(3, 256)
other = [os.open("/dev/null", os.O_RDWR) for _ in range(3)]
print(try_lock(directory / "safetune.db", "key") is not None, flush=True)
sys.stdin.readline()
""",
        tmp_path,
    )
    assert output == "True\n"


def test_where_there_is_no_lock_file_nothing_is_locked_and_none_is_made(database: Path) -> None:
    assert locks.locked(database, ["key"]) == set()
    assert locks.locked(None, ["key"]) == set()
    assert list(database.parent.iterdir()) == []


def test_a_lock_file_that_is_a_link_is_not_followed(database: Path, tmp_path: Path) -> None:
    assert_free(database)
    (lock_file,) = tmp_path.iterdir()
    lock_file.rename(tmp_path / "elsewhere")
    lock_file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        try_lock(database, "key")


def test_a_node_is_the_processes_that_share_a_lock_file(
    database: Path, children: Any, tmp_path: Path
) -> None:
    script = "from safetune.store.local.locks import node_id\nprint(node_id(directory / 's.db'))"
    (tmp_path / "other").mkdir()
    first, second = (children.run(script, tmp_path) for _ in range(2))
    other = children.run(script, tmp_path / "other")
    assert first == second
    assert first != other
    assert locks.node_id(None) != locks.node_id(None)


def test_containers_of_one_machine_that_share_a_directory_are_one_node(
    database: Path, children: Any, tmp_path: Path
) -> None:
    """Regression: by the names of their hosts they were two, and each waited for the other's lease
    for 15 s after a process had died."""
    script = "from safetune.store.local.locks import node_id\n{}print(node_id(directory / 's.db'))"
    container = (
        "import ctypes, socket\n"
        "if ctypes.CDLL(None).unshare(0x04000000):  # a namespace for the host's name\n"
        "    raise SystemExit(print('forbidden'))\n"
        "socket.sethostname('container')\n"
    )
    outside, inside = (children.run(script.format(each), tmp_path) for each in ("", container))
    if inside == "forbidden\n":
        pytest.skip("this machine does not let a test make a container")
    assert inside == outside
