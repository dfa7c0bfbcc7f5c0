"""Several real processes on one database: races, kills and forks."""

from __future__ import annotations

import sqlite3

from safetune.store.local.store import Store


def test_two_processes_that_choose_at_once_get_the_same_choice(tmp_path, children):
    outputs = children.race(
        """
store = Store.open(directory)
at_the_same_time()
for generation in range(1, 41):
    print(store.put_choice(choice(f"from {sys.argv[2]}", generation)).config_digest)
""",
        tmp_path,
        count=2,
    )
    assert outputs[0] == outputs[1]
    store = Store.open(tmp_path)
    assert store.choice("key").config_digest == outputs[0].splitlines()[-1]
    store.close()


def test_a_reader_is_not_blocked_by_a_writer(store, records):
    store.put_choice(records.choice())
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    other.execute("UPDATE choice SET record = ''")
    assert store.choice("key") == records.choice()
    other.execute("ROLLBACK")
    other.close()


AFTER_FORK = """
def files():
    names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [name for name in names if name.startswith(str(directory.resolve()))]

store = Store.open(directory)
store.put_choice(choice("c1"))
store.put_trial(trial("parent"))
pid = fork()
if pid == 0:
    inherited = files()
    assert store.choice("key").config_digest == "c1"
    store.put_trial(trial("child"))
    assert len(store.trials("key")) == 2
    print("inherited", len(inherited), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert [each.config_digest for each in store.trials("key")] == ["parent", "child"]
store.put_trial(trial("after"))
print(len(store.trials("key")))
"""


def test_a_forked_child_opens_its_own_connection(tmp_path, children):
    """SQLite forbids to carry a connection across a fork, so the child inherits no open file."""
    output = children.run("fork = os.fork\n" + AFTER_FORK, tmp_path)
    assert output.splitlines() == ["inherited 0", "3"]


def test_a_fork_that_runs_no_hook_is_noticed(tmp_path, children):
    """A C extension's fork: the child does inherit the files, and must not use them."""
    script = "import ctypes\nfork = ctypes.PyDLL(None).fork\n" + AFTER_FORK.replace(
        '    store.put_trial(trial("child"))\n',
        '    store.put_trial(trial("child"))\n    assert len(files()) > len(inherited)\n',
    )
    output = children.run(script, tmp_path).splitlines()
    assert output[0] != "inherited 0"
    assert output[1] == "3"


def test_an_in_memory_store_is_empty_in_a_forked_child_and_kept_in_the_parent(tmp_path, children):
    output = children.run(
        """
store = Store.in_memory()
store.put_choice(choice("c1"))
pid = os.fork()
if pid == 0:
    assert store.choice("key") is None
    store.put_choice(choice("c2"))
    os._exit(0 if store.choice("key").config_digest == "c2" else 1)
assert os.waitpid(pid, 0)[1] == 0
print(store.choice("key").config_digest)
""",
        tmp_path,
    )
    assert output == "c1\n"


def test_a_fork_does_not_wait_for_a_slow_write(tmp_path, children):
    """A thread is in the middle of one: the fork gives up closing, the child starts afresh."""
    output = children.run(
        """
import signal, threading
store = Store.open(directory)
store.put_choice(choice("c1"))
begun, forked = threading.Event(), threading.Event()
def write():
    with store.connection.transaction() as connection:
        connection.execute("UPDATE key SET record = ''")
        begun.set()
        forked.wait()
thread = threading.Thread(target=write)
thread.start()
begun.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    os._exit(0 if store.choice("key").config_digest == "c1" else 1)
assert os.waitpid(pid, 0)[1] == 0
forked.set()
thread.join()
store.put_trial(trial("after"))
print([each.config_digest for each in store.trials("key")])
""",
        tmp_path,
    )
    assert output == "['after']\n"


def test_a_fork_while_a_thread_opens_a_store(tmp_path, children):
    """The locks of the module must be free in the child, whichever thread held them at the fork."""
    output = children.run(
        """
import signal
from safetune.settings import Settings
from safetune.store import lookup
from safetune.store.local import db_files as place
os.environ["SAFETUNE_CACHE_DIR"] = str(directory)
with place.creating, lookup._opening:
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if lookup.open_lookup(Settings.current()).store.choice("key") is None else 1)
print(os.waitpid(pid, 0)[1])
""",
        tmp_path,
    )
    assert output == "0\n"


def test_no_log_is_left_behind_by_a_process_that_ends(tmp_path, children):
    """The write-ahead log is folded into the database: `cp` of the one file is then complete."""
    script = """
import warnings
warnings.simplefilter("always", ResourceWarning)  # Python 3.13: unclosed database
store = Store.open(directory)
store.put_trial(trial("c1"))
"""
    child = children.start(script, tmp_path)
    assert child.communicate() == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["safetune.db", "safetune.db.lock"]
