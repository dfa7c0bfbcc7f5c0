"""A program in a warm Python sees and does what it would in a fresh one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

PROBE = """
import atexit, json, os, sys, threading
main = sys.modules["__main__"]
atexit.register(print, "at exit")
def after_main():
    threading.main_thread().join()
    print("thread")
threading.Thread(target=after_main).start()
print(json.dumps({
    "globals": main is not None and vars(main) is globals(),
    "name": __name__, "file": globals().get("__file__"), "argv": sys.argv,
    "path": sys.path, "cwd": os.getcwd(), "environment": dict(os.environ),
    "leads its session": os.getsid(0) == os.getpid(),
    "safetune": [name for name in sys.modules if name.partition(".")[0] == "safetune"],
    "open": [os.get_inheritable(fd) for fd in (0, 1, 2)],
}))
print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["code", "script"])
def test_a_program_sees_what_it_would_see_in_a_fresh_interpreter(
    fresh_process: FreshProcess, tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    program = script if kind == "script" else PROBE
    # macOS and some shells add this to a process's own environment.
    env = {"SAFETUNE_MODE": "frozen", "LC_CTYPE": None, "MARK": "a b"}
    fresh, warm = (fresh_process(program, "--x", 1, env=env, warm=warm) for warm in (False, True))
    assert warm.stdout == fresh.stdout
    assert warm.stderr == fresh.stderr == "to stderr\n"


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(7)",
        "raise SystemExit('a message')",
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "def fail(): raise ValueError('on purpose')\nfail()",
        "1 +",
    ],
)
def test_a_program_ends_as_it_would_in_a_fresh_interpreter(
    fresh_process: FreshProcess, code: str
) -> None:
    fresh, warm = (fresh_process(code, warm=warm, ends=None) for warm in (False, True))
    assert (warm.returncode, warm.stdout) == (fresh.returncode, fresh.stdout)
    assert warm.stderr == fresh.stderr


def test_a_program_leaves_nothing_to_the_next(fresh_process: FreshProcess) -> None:
    fresh_process("import sys, os; sys.marked = 1; os.environ['MARK'] = '1'", warm=True)
    done = fresh_process(
        "import sys, os; print(hasattr(sys, 'marked'), 'MARK' in os.environ)", warm=True
    )
    assert done.stdout == "False False\n"


def test_a_program_that_does_not_end_is_killed_and_the_next_one_runs(
    fresh_process: FreshProcess,
) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"did not end within 0\.1 s"):
        fresh_process("import threading; threading.Event().wait()", warm=True, timeout_s=0.1)
    assert fresh_process("print('here')", warm=True).stdout == "here\n"


@pytest.mark.parametrize("warm", [False, True])
def test_a_program_that_ends_otherwise_than_it_should_fails_its_test(
    fresh_process: FreshProcess, warm: bool
) -> None:
    fresh_process("raise SystemExit(3)", warm=warm, ends=3)
    with pytest.raises(AssertionError, match="on purpose"):
        fresh_process("raise SystemExit('on purpose')", warm=warm)
