"""Fork hooks and exit hooks run in one declared order, which `safetune/forks.py` declares."""

from __future__ import annotations

from typing import Any

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
