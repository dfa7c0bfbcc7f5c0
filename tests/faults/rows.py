"""Every way a tuning can go wrong that has a name: the one list of them.

A test says which it is by `@pytest.mark.fault("row-id")`; a row may have several tests, and one
test several rows. `make faults` runs them and prints the list (see `table.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Side(str, Enum):
    """Where it goes wrong: a compile child, a measuring child, nowhere visible, the caller."""

    COMPILE = "compile"
    RUN = "run"
    SILENT = "silent"
    PARENT = "parent"


class Place(str, Enum):
    """What a row's test needs: CPU is Triton's interpreter, or a compiler without a GPU."""

    CPU = "CPU"
    GPU = "GPU"
    TWO_GPUS = "2 GPUs"


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        expected: the verdict of the config, or what the caller sees.
        places: in each of these the row has a test of its own.
    """

    id: str
    side: Side
    what: str
    expected: str
    places: tuple[Place, ...] = (Place.CPU,)


_GPU = (Place.GPU,)
_BOTH = (Place.CPU, Place.GPU)
_TWO = (Place.TWO_GPUS,)


def _rows(side: Side, *rows: tuple[Any, ...]) -> list[Row]:
    return [Row(row[0], side, *row[1:]) for row in rows]


ROWS: tuple[Row, ...] = (
    *_rows(
        Side.COMPILE,
        ("compile-exception", "the compiler raises a Python exception", "compile_error"),
        ("static-assert", "`tl.static_assert` fails", "compile_error"),
        ("compiler-abort", "LLVM aborts the compiling process", "compile_crash", _BOTH),
        ("compiler-exit", "`exit(1)` inside the compiler", "compile_crash"),
        ("compiler-segfault", "a segmentation fault inside the compiler", "compile_crash"),
        ("ptxas-failure", "ptxas refuses the code", "compile_error"),
        (
            "compile-hang",
            "a compilation passes its deadline, with a ptxas of its own at work",
            "compile_timeout, and no orphan is left",
        ),
        ("compile-memory", "a compilation eats memory", "a failure at the limit per child"),
    ),
    *_rows(
        Side.RUN,
        ("launch-exception", "an exception at launch", "launch_error"),
        ("no-shared-memory", "more shared memory than there is", "out_of_resources", _GPU),
        # As Triton raises it: ptxas keeps the registers of a known number of threads within bounds.
        ("no-registers", "more registers than there are", "out_of_resources"),
        ("illegal-address", "an illegal address", "illegal_access", _GPU),
        ("misaligned-address", "a misaligned address", "illegal_access", _GPU),
        ("device-assert", "`tl.device_assert` fails", "illegal_access", _GPU),
        ("endless-loop", "a loop without end in the kernel", "timeout", _BOTH),
        ("segfault", "SIGSEGV in the child", "died(SIGSEGV)", _BOTH),
        ("abort", "SIGABRT in the child", "died(SIGABRT)"),
        ("sigkill", "SIGKILL of the child", "died(SIGKILL)"),
        ("exit-zero", "`os._exit(0)` in the child", "died(exit code 0)"),
        ("garbage-message", "the child answers garbage", "protocol_error"),
        ("half-message", "the child answers half a message", "protocol_error"),
        ("no-message", "the child closes its pipe without an answer", "died, or protocol_error"),
        ("megabytes-printed", "the kernel prints megabytes", "ok, and nothing is blocked"),
        ("unpicklable-exception", "an exception that cannot be pickled", "launch_error"),
        (
            "no-memory",
            "an allocation fails in the child",
            "no_memory, tried again when there is memory",
            _GPU,
        ),
        ("late-fault", "a fault that shows after many launches only", "as at once", _BOTH),
        ("invalid-time", "a time of NaN or zero", "invalid_time"),
    ),
    *_rows(
        Side.SILENT,
        ("write-before", "a write before its storage", "out_of_bounds", _BOTH),
        ("write-after", "a write after its storage", "out_of_bounds", _BOTH),
        ("write-last-program", "the last program alone writes outside", "out_of_bounds", _BOTH),
        ("write-unowned", "a write into bytes that no argument covers", "ok, a warning", _BOTH),
        ("wrong-result", "one config of eight computes something else", "wrong_result", _BOTH),
        ("wrong-majority", "most disagree with `reference=`", "wrong_result", _BOTH),
        (
            "order-dependent",
            "right only because an earlier launch left its data behind",
            "order_dependent",
            _BOTH,
        ),
        ("fp16-split-k", "split-K in fp16 differs from run to run", "ok", _BOTH),
        ("float-atomics", "float atomics differ from run to run", "ok", _BOTH),
        ("partials", "partial sums per program, another layout per config", "ok", _BOTH),
        ("compaction", "unordered compaction, another order per config", "ok", _BOTH),
        ("two-differ", "two configs that differ", "ok, disputed, a warning", _BOTH),
        ("nan-outputs", "outputs that are NaN", "ok", _BOTH),
    ),
    *_rows(
        Side.PARENT,
        ("empty-call", "a call with empty tensors or a zero in its grid", "not tuned, not stored"),
        ("parent-killed", "SIGKILL of the caller", "no process is left"),
        ("ctrl-c", "Ctrl-C during tuning", "children gone, finished trials kept"),
        ("starter-thread-ends", "the thread that started the child ends", "nothing changes"),
        ("parent-forks", "the caller forks afterwards", "both can tune"),
        ("two-threads", "tuning from two threads", "one tuning per key"),
        ("autograd-backward", "tuning inside `autograd.Function.backward`", "tuned"),
        ("other-device", "tensors on a device that is not current", "tuned on theirs", _TWO),
        ("two-unlike-devices", "two unlike devices", "two choices", _TWO),
        ("visible-by-index", "`CUDA_VISIBLE_DEVICES` by index", "the child sees the same card"),
        ("visible-by-uuid", "`CUDA_VISIBLE_DEVICES` by UUID", "the child sees the same card"),
        ("visible-mig", "`CUDA_VISIBLE_DEVICES` by MIG id (parsing only)", "handed on as it is"),
        ("rank-variables", "a launcher's rank variables are set", "the child has no rank"),
        ("small-dev-shm", "`/dev/shm` of 64 MB", "not used"),
        ("mps", "the card is under MPS", "the fallback, and a reason"),
        ("exclusive-process", "EXCLUSIVE_PROCESS mode", "the fallback, and a reason"),
        ("process-limit", "RLIMIT_NPROC is reached", "the fallback, and a reason"),
        ("outside-kill", "SIGKILL of a child or its server from outside", "no config is blamed"),
        ("no-descriptors", "RLIMIT_NOFILE is reached", "the fallback, and a reason"),
        ("no-temporary-directory", "no temporary directory can be written", "not used"),
        ("no-working-directory", "the working directory has been deleted", "not used"),
        ("file-in-working-directory", "`json.py` in the working directory", "not imported"),
        ("core-file", "a child aborts, and core files are allowed", "no core file"),
        ("capture-elsewhere", "another thread captures a CUDA graph", "both finish", _GPU),
        ("card-nearly-full", "a card 95% full", "tuned, or the fallback and a reason", _GPU),
        (
            "stored-choice-fails",
            "a stored choice fails in the caller",
            "the next-best is launched, no retune loop",
        ),
    ),
)

BY_ID = {row.id: row for row in ROWS}
