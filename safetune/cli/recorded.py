"""`safetune tune --recorded`: the calls in the store, rebuilt and tuned one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from safetune.cli import targets
from safetune.errors import TargetError

if TYPE_CHECKING:
    from safetune.offline.replay import LeftOut, Rebuildable
    from safetune.offline.tasks import OfflineKernel, Task


class RecordedPlan:
    """The recorded calls. Iterating makes the tensors of one call at a time.

    Args:
        kernels: where to look for the calls' kernels; None: in the modules that defined them.
        left_out: filled with the calls that cannot be tuned.
    """

    def __init__(
        self,
        kernels: Sequence[OfflineKernel] | None,
        device: str | None,
        zeros: bool,
        left_out: list[LeftOut],
    ) -> None:
        self._named = kernels
        self._device = device
        self._zeros = zeros
        self._left_out = left_out
        self._found: list[Rebuildable] = []

    @property
    def kernels(self) -> Sequence[OfflineKernel]:
        """The kernels of the calls that can be tuned."""
        return [found.kernel for found in self._found]

    def check(self) -> int:
        """Return how many calls can be tuned.

        Raises:
            NoDevice: a kernel, or the device, needs a GPU and torch finds no GPU.
            TargetError: no call is recorded.
        """
        from safetune.offline import replay, tasks
        from safetune.store.local.recorded_calls import calls

        stored = calls(tasks.open_tuning_store())
        if self._named is not None:
            names = {kernel.name for kernel in self._named}
            stored = [call for call in stored if call.name in names]
        if not stored:
            raise TargetError("no such call is recorded; run the program with SAFETUNE_MODE=record")
        self._found, left_out = replay.sort_out(stored, self._named, self._zeros)
        self._left_out += left_out
        targets.check_device(self.kernels, self._device)
        return len(self._found)

    def __iter__(self) -> Iterator[Task]:
        import torch

        from safetune.offline.replay import LeftOut

        for found in self._found:
            device = self._device or ("cpu" if found.kernel.interpreted else "cuda")
            try:
                task = found.task(device)
            except torch.OutOfMemoryError as error:
                self._left_out.append(
                    LeftOut(found.call, f"there is not enough memory for its tensors: {error}")
                )
                continue
            yield task
