"""Fork hooks and exit hooks run in one declared order, which `safetune/forks.py` declares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import safetune

PACKAGE = Path(safetune.__file__).parent

#: Registers a hook that names itself, for the last and the first stage in this order.
HOOKS = """
import os, sys
from safetune import forks

def says(text):
    return lambda: print(text, flush=True)

def fails():
    raise ValueError("broken on purpose")

for stage in (forks.STAGES[-1], forks.STAGES[0]):
    for number in (1, 2):
        forks.register(
            stage,
            before=says(f"before {stage} {number}"),
            after_in_parent=says(f"parent {stage} {number}"),
            after_in_child=says(f"child {stage} {number}"),
            at_exit=says(f"exit {stage} {number}"),
        )
"""


def lines_of(result: Any) -> list[str]:
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_hooks_run_in_the_declared_order_around_a_fork_and_at_exit(fresh_process: Any) -> None:
    """The order was that in which modules happened to be imported."""
    code = """
if (pid := os.fork()) == 0:
    os._exit(0)
os.waitpid(pid, 0)
"""
    lines = lines_of(fresh_process(HOOKS + code))
    down = ["report 2", "report 1", "database 2", "database 1"]
    up = down[::-1]
    of_parent = [line for line in lines if not line.startswith("child")]
    assert [line for line in lines if line.startswith("child")] == [f"child {x}" for x in up]
    assert of_parent == [
        *(f"before {x}" for x in down),
        *(f"parent {x}" for x in up),
        *(f"exit {x}" for x in down),
    ]


def test_a_hook_that_raises_is_logged_and_the_others_still_run(fresh_process: Any) -> None:
    code = """
forks.register(forks.STAGES[0], after_in_child=fails, at_exit=fails)
forks.register(forks.STAGES[1], after_in_child=says("child last"))
if (pid := os.fork()) == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    result = fresh_process(HOOKS + code)
    lines = lines_of(result)
    assert "child last" in lines
    assert lines[-1] == "exit database 1"
    assert result.stderr.count("ValueError: broken on purpose") == 2


def test_a_forked_worker_of_multiprocessing_calls_its_exit_hook(fresh_process: Any) -> None:
    """Such a worker leaves without `atexit`."""
    code = """
import multiprocessing
owner = os.getpid()
forks.register_worker_exit(says, lambda: print(os.getpid() == owner, flush=True))
worker = multiprocessing.get_context("fork").Process(target=int)
worker.start()
worker.join()
"""
    said = [line for line in lines_of(fresh_process(HOOKS + code)) if line in ("True", "False")]
    assert sorted(said) == ["False", "True"]


def test_a_method_is_called_as_long_as_its_object_is_there(fresh_process: Any) -> None:
    code = """
class Owner:
    def __init__(self, name):
        self.name = name
        forks.register("report", at_exit=self.tell)
    def tell(self):
        print(self.name)

gone, there = Owner("gone"), Owner("there")
del gone
"""
    lines = lines_of(fresh_process(HOOKS + code))
    assert "there" in lines
    assert "gone" not in lines


def test_a_lock_that_another_thread_holds_is_free_in_a_forked_child(fresh_process: Any) -> None:
    code = """
lock = forks.lock()
lock.acquire()
if (pid := os.fork()) == 0:
    os._exit(lock.acquire(blocking=False))
print("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), lock.locked())
"""
    assert "exit code 1 True" in lines_of(fresh_process(HOOKS + code))


#: Locks that are held while code of the user's runs, or around a fork itself.
HELD_AROUND_FORKS = {
    "integrations/prepare.py": "_one_at_a_time",
    "launch/key_state.py": "_changing",
    "verify/interpretation.py": "_LOCK",
}


def test_every_lock_of_a_module_is_free_in_a_forked_child() -> None:
    """A worker of a DataLoader would wait for good for a lock that another thread held."""
    plain = {
        str(path.relative_to(PACKAGE)): found[1]
        for path in PACKAGE.rglob("*.py")
        if (found := re.search(r"(?m)^(\w+) = threading\.R?Lock\(", path.read_text("utf-8")))
    }
    assert plain == HELD_AROUND_FORKS


def test_a_child_collects_garbage_that_is_forked_while_another_thread_pauses_that(
    fresh_process: Any,
) -> None:
    code = """
import gc, os, threading
from safetune.both import backend

paused, over = threading.Event(), threading.Event()

def pause():
    with backend.no_collection():
        paused.set()
        over.wait()

thread = threading.Thread(target=pause, daemon=True)
thread.start()
paused.wait()
if (pid := os.fork()) == 0:
    with backend.no_collection():
        assert not gc.isenabled()
    os._exit(0 if gc.isenabled() else 7)
assert os.waitpid(pid, 0)[1] == 0
assert not gc.isenabled(), "the thread goes on"
over.set()
thread.join()
assert gc.isenabled()
"""
    lines_of(fresh_process(code))


def test_a_child_forked_while_a_property_is_computed_computes_it(fresh_process: Any) -> None:
    """Of Python before 3.12, `functools.cached_property` would wait for a thread of the parent."""
    code = """
import signal, threading
entered, may_end = threading.Event(), threading.Event()

class Object:
    @forks.cached_property
    def number(self):
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            may_end.wait()
        return [1]

thread = threading.Thread(target=lambda: Object().number)
thread.start()
entered.wait()
if (pid := os.fork()) == 0:
    signal.alarm(10)
    made = Object()
    os._exit(7 if made.number is made.number else 8)
print("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
may_end.set()
thread.join()
"""
    assert "exit code 7" in lines_of(fresh_process(HOOKS + code))
