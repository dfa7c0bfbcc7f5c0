"""What holds after every fault, whatever it was; the fixture `harmless` gives every test these."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.isolation import child_handle
from tests import stored_rows
from tests.ready import is_ready

#: An idle measuring child leaves after 2 s, and one that was let go of at once.
LEAVING_S = 20.0
#: A child's context takes hundreds of MiB; the binary of a choice a few.
MEMORY_SLACK = 64 << 20

_sizes = itertools.count(1000)


@triton.jit
def next_kernel(out, x, n, WIDTH: tl.constexpr):
    offset = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n) + 1, mask=offset < n)


@dataclass(frozen=True)
class Trial:
    """A row of the trial table."""

    config: dict[str, Any]
    verdict: str
    detail: str
    message: str
    stderr: str
    median_ms: float | None
    marks: list[str]

    @property
    def label(self) -> str:
        return f"died({self.detail})" if self.verdict == "died" else self.verdict


#: Seconds within which a child that has ended is waited for.
REAPED_S = 2.0


class Harmless:
    """Launches that tune while configs misbehave, and what is to hold after each of them."""

    def __init__(self, cache_dir: Path, device: str) -> None:
        self._database = cache_dir / "safetune.db"
        self._device = device

    def trials(self) -> list[Trial]:
        """Return the rows of the test's store, read without safetune.

        Every tuning marks its first config as `first`, which is left out.
        """
        columns = "config, verdict, detail, message, stderr, median_ms, marks"
        connection = stored_rows.connected(self._database)
        with contextlib.closing(connection):
            found = connection.execute(f"SELECT {columns} FROM trial ORDER BY rowid").fetchall()
        marks = [[each for each in json.loads(row[6] or "[]") if each != "first"] for row in found]
        rows = zip(found, marks, strict=True)
        return [Trial(json.loads(row[0]), *row[1:6], of_row) for row, of_row in rows]

    def check(
        self,
        launch: Callable[[], object],
        wanted: Mapping[Any, str],
        *,
        by: str = "BLOCK",
        after: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> dict[Any, Trial]:
        """Launch, and fail unless every config has its verdict and no other process was hurt.

        Args:
            launch: a call that tunes.
            wanted: the label of each config's verdict, by its value of `by`.
            after: by name, a tensor of the caller and the bits that it holds then.

        Returns:
            Each config's trial.
        """
        if self._device == "cuda":  # what the first kernels of a process load stays
            self._check_device()
            x = torch.arange(512, device=self._device)
            next_kernel[(1,)](torch.zeros_like(x), x, 512, WIDTH=512)
        before = self._memory()
        launch()
        for name, (tensor, bits) in (after or {}).items():
            assert torch.equal(_bytes(tensor), _bytes(bits)), f"{name} is not what it should be"
        trials = {trial.config[by]: trial for trial in self.trials() if by in trial.config}
        labels = {value: trial.label for value, trial in trials.items()}
        assert labels == dict(wanted), "\n".join(map(str, [labels, *trials.values()]))
        for trial in trials.values():
            if trial.verdict == "ok":
                assert trial.median_ms is not None
                assert trial.median_ms > 0
            else:
                self._check_says_what_happened(trial)
        self.check_nothing_is_left(before)
        return trials

    def _check_says_what_happened(self, trial: Trial) -> None:
        assert trial.message, trial
        assert trial.median_ms is None
        assert len(trial.stderr) <= 2000
        if trial.verdict == "died":
            assert re.fullmatch(r"SIG[A-Z]+|exit code \d+", trial.detail), trial

    def check_nothing_is_left(self, memory: int | None = None) -> None:
        """Fail unless the caller's device answers, the next tuning works, and all are gone."""
        self._check_device()
        self._check_next_tuning()
        for server in _servers():
            deadline = time.monotonic() + REAPED_S
            while "Z" in _children(server).values() and time.monotonic() < deadline:
                os.sched_yield()
            states = _children(server)
            assert [pid for pid, state in states.items() if state == "Z"] == [], "not reaped"
            assert [pid for child in states for pid in _children(child)] == [], "grandchildren"
        child_handle.idle.drop()
        assert self._children_are_gone()
        if memory is not None and self._device == "cuda":
            left = memory - self._memory()
            assert left < MEMORY_SLACK, f"{left >> 20} MiB of device memory are left behind"

    def _check_device(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        assert torch.arange(1000, device=self._device).sum().item() == 499500

    def _check_next_tuning(self) -> None:
        n, before = next(_sizes), len(self.trials())
        configs = [triton.Config({"WIDTH": width}) for width in (512, 1024)]
        kernel = safetune(configs=configs, key=["n"])(next_kernel)
        x = torch.arange(n, device=self._device)
        out = torch.zeros_like(x)
        kernel[lambda meta: (triton.cdiv(n, meta["WIDTH"]),)](out, x, n)
        assert torch.equal(out, x + 1)
        assert [trial.verdict for trial in self.trials()[before:]] == ["ok", "ok"]

    def _children_are_gone(self) -> bool:
        deadline = time.monotonic() + LEAVING_S
        return all(_ends(pid, deadline) for server in _servers() for pid in list(_children(server)))

    def _memory(self) -> int:
        if self._device != "cuda":
            return 0
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def _children(pid: int) -> dict[int, str]:
    """Return the state of each child of a process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid:
                found[int(folder.name)] = state
    return found


def _servers() -> list[int]:
    found = []
    for pid in _children(os.getpid()):
        with contextlib.suppress(OSError):
            if b"safetune.child.server_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _ends(pid: int, deadline: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return is_ready(handle, max(0.0, deadline - time.monotonic()))
    finally:
        os.close(handle)
