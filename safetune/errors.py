"""The exceptions and warnings of safetune. A failed config is an `Outcome`; a failed tuning is an
exception.
"""

from __future__ import annotations

import itertools
import traceback
from typing import TYPE_CHECKING, Any

from safetune.outcome import TRANSIENT, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from typing_extensions import Self

    from safetune.outcome import Outcome


class SafetuneError(Exception):
    """The base of every error that safetune raises on purpose.

    Attributes:
        fix: the remedy, if the code that raises it knows one; `safetune doctor` prints it.
    """

    fix = ""

    def with_fix(self, fix: str) -> Self:
        """Return this error, with a remedy."""
        self.fix = fix
        return self


class InvalidConfig(SafetuneError, ValueError):
    """No launch of the kernel can accept a config, or the list of configs."""


class NoConfigs(InvalidConfig, IndexError):
    """A launch whose list of configs was emptied after decoration; Triton raises `IndexError`."""


class InvalidSetting(SafetuneError, ValueError):
    """A decorator argument or a SAFETUNE_* variable has an invalid value."""


class InvalidOperand(SafetuneError, ValueError):
    """A shipped kernel does not support a tensor or an option; nothing was launched."""


class PhantomKey(SafetuneError, ValueError):
    """`key` has a name that the kernel never reads, under `phantom="error"`."""


class NoDevice(SafetuneError, RuntimeError):
    """There is neither a GPU nor Triton's interpreter to run a kernel."""


class KernelNotTransferable(SafetuneError):
    """The kernel, a hook or an argument cannot be rebuilt in another process."""


class NotReproducible(KernelNotTransferable):
    """The call's inputs cannot be copied to another process: addresses, or too many bytes."""


class TooMuchPinned(NotReproducible):
    """The call has more pinned host memory than a child may pin."""


class WorkerUnavailable(SafetuneError):
    """No child process could be started. No config is to blame."""


class NoMemory(WorkerUnavailable):
    """The device has too little free memory for a tuning now. No config is to blame."""


class DeviceUnavailable(WorkerUnavailable):
    """A child cannot use the device: its compute mode, MPS or a stuck process prevents it, or every
    launch fails there.
    """


class BackendError(WorkerUnavailable):
    """A device's driver does not answer a question that tuning depends on; nothing is tuned."""


class CaptureError(SafetuneError, RuntimeError):
    """The operation is not possible while a CUDA graph is being captured."""


class MissError(SafetuneError):
    """A key has no choice, with `on_miss="error"`.

    Nothing was tuned or launched; a CUDA graph capture under way is still valid.
    """


class TracingError(SafetuneError, RuntimeError):
    """A compiler or a transform cannot represent the kernel as it is."""


class MissingChoice(TracingError):
    """A key has no choice and cannot be tuned: the call has shapes but no data."""


class StoreError(SafetuneError):
    """The database cannot be opened, read or written."""


class Busy(WorkerUnavailable):
    """Another process is tuning the key, and this process has waited for SAFETUNE_WAIT seconds."""


class PackError(SafetuneError):
    """A pack cannot be read; the message names the file and the reason."""


class TargetError(SafetuneError):
    """A TARGET of the command line cannot be imported, or has nothing to tune."""


class WorkloadError(SafetuneError):
    """A workload function, or a function of its kernel, raised; or it yielded no `Workload`."""


class NotInterpretable(SafetuneError):
    """Triton's interpreter cannot run the kernel to completion, so nothing can be checked."""


class SafetuneWarning(UserWarning):
    """The base of every warning of safetune."""


class SettingWarning(SafetuneWarning):
    """An environment variable, or an argument of the decorator, has no effect."""


class PhantomKeyWarning(SettingWarning):
    """A key has a name that nothing reads, or a library's tuner has an unknown name."""


class StoreWarning(SafetuneWarning):
    """The store, the shared store or a pack cannot be used; the run continues without it.

    A general filter such as `-W error` shows it; one that names the class raises it.
    """


class TuningWarning(SafetuneWarning):
    """A key is not tuned, or some launches do not use the choice."""


class DisputeWarning(TuningWarning):
    """The configs of a key disagree about the result, so the choice may compute a wrong one."""


class CaptureWarning(SafetuneWarning):
    """A CUDA graph was captured without a choice, or with work that a replay does not repeat."""


class NothingToMeasure(SafetuneError):
    """A call launches no program, or has no element to read or write, so any config will do."""

    def __init__(self, kernel: str, key: str) -> None:
        super().__init__(
            f"{kernel} cannot be tuned for {key} on a call with nothing to do: its tensors are "
            "empty, or its grid has a zero. Tune it on a call that has work"
        )


class NoWorkingConfig(SafetuneError, RuntimeError):
    """Every config failed.

    Attributes:
        outcomes: pairs of a config as text and its `Outcome`.
        measured: the number of configs tried now; the other outcomes were stored before.
        transient: at least one config failed for a reason that may pass, such as memory.
        first: the config that the caller launches anyway, to get Triton's own error; None if that
            is not safe. See `miss.failures.first_config`.
    """

    first: Any = None

    def __init__(
        self, kernel: str, key: str, outcomes: Sequence[tuple[str, Outcome]], measured: int = 0
    ) -> None:
        self.outcomes = tuple(outcomes)
        self.measured = measured
        self.transient = any(outcome.verdict in TRANSIENT for _, outcome in self.outcomes)
        width = max((len(config) for config, _ in self.outcomes), default=0)
        rows = "\n".join(
            "  ".join([f"  {config:<{width}}", outcome.label, *outcome.message.splitlines()[:1]])
            for config, outcome in self.outcomes
        )
        hung = any(outcome.verdict is Verdict.TIMEOUT for _, outcome in self.outcomes)
        way_out = hung * (
            "\nA kernel that waits for another process, thread or stream waits forever in a tuning "
            f"process. If this one does, SAFETUNE_LEAVE={kernel} leaves it to Triton"
        )
        before = "" if measured else f" (stored results; `safetune clear {kernel}` deletes them)"
        super().__init__(
            f"none of the {len(self.outcomes)} configs of {kernel} works for {key}{before}:\n{rows}"
            f"\n`safetune show {kernel}` prints whole messages; "
            f'isolation="inline" runs the configs in this process, for a debugger{way_out}'
        )


def with_nearest(names: Iterable[object], known: Iterable[str]) -> str:
    """Return wrong names as message text, each with the nearest known name."""
    import difflib  # only for an error

    by_lower = {name.lower(): name for name in known}
    texts = []
    for name in names:
        near = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
        texts.append(f"{name!r}{''.join(f' (did you mean {by_lower[n]!r}?)' for n in near)}")
    return ", ".join(texts)


def from_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the program raised this during a wait for a child or a store.

    Python calls a handler on top of the interrupted frame, the next outer one in the traceback.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(_got(frame, outer) for outer, frame in itertools.pairwise(frames))


def _got(frame: FrameType, argument: FrameType) -> bool:
    values = list(frame.f_locals.values())
    values += [item for value in values if isinstance(value, tuple) for item in value]
    return any(value is argument for value in values)
