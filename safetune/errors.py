"""What safetune raises. A failed config is a value (`Outcome`); a failed tuning is one of these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetune.outcome import TRANSIENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safetune.outcome import Outcome


class SafetuneError(Exception):
    """The base of every error that safetune raises on purpose."""


class InvalidConfig(SafetuneError, ValueError):
    """A config, or the list of them, that no kernel launch could accept."""


class InvalidSetting(SafetuneError, ValueError):
    """A decorator argument or a SAFETUNE_* variable with a value that means nothing."""


class InvalidOperand(SafetuneError, ValueError):
    """A tensor or an option that a shipped kernel cannot work with; nothing was launched."""


class PhantomKey(SafetuneError, ValueError):
    """A key name that the kernel never reads, under `phantom="error"`."""


class NoDevice(SafetuneError, RuntimeError):
    """Neither a GPU nor Triton's interpreter is there to run a kernel on."""


class KernelNotTransferable(SafetuneError):
    """The kernel, a hook or an argument cannot be rebuilt in another process."""


class NotReproducible(KernelNotTransferable):
    """The call's inputs cannot be had in another process: addresses, or more bytes than fit."""


class WorkerUnavailable(SafetuneError):
    """No child process could be started; says nothing about any config."""


class NoMemory(WorkerUnavailable):
    """The device has no memory for a tuning now; says nothing about any config.

    Attributes:
        needed_bytes: free device memory below which trying again is pointless; 0 if unknown.
    """

    needed_bytes: int = 0

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class DeviceUnavailable(WorkerUnavailable):
    """A child must not use the device: its mode, MPS, or a process stuck on it forbids that."""


class CaptureError(SafetuneError, RuntimeError):
    """Something that cannot be done while a CUDA graph is being captured."""


class CaptureMiss(CaptureError):
    """A key without a choice under CUDA graph capture, under `capture_miss="error"`.

    Nothing was launched, and the capture is still valid.
    """


class TracingError(SafetuneError, RuntimeError):
    """A kernel reached a compiler or a transform that cannot carry it as it is."""


class MissingChoice(TracingError):
    """A key without a choice where nothing can be tuned: there are shapes, but no data."""


class StoreError(SafetuneError):
    """The database cannot be opened, read or written."""


class LeaseLost(StoreError):
    """Another process took this one for dead and tunes in its place; nothing was written."""


class Busy(WorkerUnavailable):
    """Another process is at it, and this one has waited as long as SAFETUNE_WAIT allows."""


class PackError(SafetuneError):
    """A file of choices that does not hold what it should; the message names it and the reason."""


class TargetError(SafetuneError):
    """A command-line TARGET that does not import, or holds nothing to tune."""


class WorkloadError(SafetuneError):
    """A workload function that raised, or yielded something else than a `Workload`."""


class NotInterpretable(SafetuneError):
    """A kernel that Triton's interpreter cannot run to its end, so that nothing can be checked."""


class NoWorkingConfig(SafetuneError, RuntimeError):
    """Every config failed.

    Attributes:
        outcomes: one (config as text, `Outcome`) pair per config tried.
        measured: how many of them were tried now; the others are known from earlier.
        transient: for one of them at least, the reason may pass; for a lack of memory it does.
    """

    def __init__(
        self, kernel: str, key: str, outcomes: Sequence[tuple[str, Outcome]], measured: int = 0
    ) -> None:
        self.outcomes = tuple(outcomes)
        self.measured = measured
        self.transient = any(outcome.verdict in TRANSIENT for _, outcome in self.outcomes)
        width = max((len(config) for config, _ in self.outcomes), default=0)
        rows = "\n".join(
            f"  {config:<{width}}  {outcome.label}  {outcome.message.splitlines()[0]}"
            if outcome.message
            else f"  {config:<{width}}  {outcome.label}"
            for config, outcome in self.outcomes
        )
        before = "" if measured else f" as found before (`safetune clear {kernel}` forgets it)"
        super().__init__(
            f"none of the {len(self.outcomes)} configs of {kernel} works for {key}{before}:\n{rows}"
        )
