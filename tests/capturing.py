"""Fixtures for tests of graph capture: a kernel, and a stand-in for the CUDA driver."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.miss import under_capture
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from tests.backends import FakeBackend, launching_on


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


class Copies:
    """A tuner of `copy_kernel`, and its launches.

    Args:
        hooks: of the configs, whose BLOCKs are 16, 32, 64 …; three configs without any.
        fastest: the BLOCK that is to win.
    """

    def __init__(self, *hooks: Any, fastest: int | None = None, **options: Any) -> None:
        hooks = hooks or (None, None, None)
        blocks = [16 << number for number in range(len(hooks))]
        if fastest is not None:
            options["do_bench"] = _winning(fastest)
            hooks = tuple(map(_noting, blocks, hooks))
        configs = [
            triton.Config({"BLOCK": block}, pre_hook=hook)
            for block, hook in zip(blocks, hooks, strict=True)
        ]
        self.tuner = safetune(configs=configs, key=["n"], **options)(copy_kernel)

    def __call__(self, n: int = 100) -> int:
        """Copy n elements, check the result, and return the BLOCK that did it."""
        src = torch.arange(n, dtype=torch.float32)
        dst = torch.zeros(n)
        self.launch(dst, src, n)
        assert torch.equal(dst, src)
        return int(self.tuner.best_config.kwargs["BLOCK"])

    def launch(self, dst: torch.Tensor, src: torch.Tensor, n: int) -> None:
        self.tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](dst, src, n)


def _noting(block: int, hook: Any) -> Any:
    def note(arguments: dict[str, Any]) -> None:
        import builtins

        builtins.safetune_test_block = block  # of the process that measures
        if hook is not None:
            hook(arguments)

    return note


def _winning(fastest: int) -> Any:
    def bench(launch: Any, quantiles: Any) -> list[float]:
        import builtins

        launch()
        return [1.0 if builtins.safetune_test_block == fastest else 2.0] * 3

    return bench


@pytest.fixture
def copies() -> type[Copies]:
    return Copies


class Driver(FakeBackend):
    """Answers that this thread's stream is part of a capture, or of none."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.local()
        self.questions = 0

    def capture_id(self, stream: int) -> int:
        self.questions += 1
        return getattr(self._thread, "capture", 0)

    @contextlib.contextmanager
    def capturing(self, capture: int) -> Iterator[None]:
        self._thread.capture = capture
        try:
            yield
        finally:
            self._thread.capture = 0


@pytest.fixture(autouse=True)
def no_earlier_misses() -> None:
    under_capture._misses.clear()


@pytest.fixture
def driver() -> Iterator[Driver]:
    stub = Driver()
    with launching_on(stub):
        yield stub


@pytest.fixture
def tried(cache_dir: Path) -> Callable[[], list[str]]:
    """A function that returns the verdict of every config tried."""

    def read() -> list[str]:
        known = open_lookup(Settings.current()).store.trials_of("copy_kernel")
        return [trial.outcome.verdict.value for _, trials in known for trial in trials]

    return read


class Gate:
    """A config's hook that waits in a child, before each launch, until the gate opens."""

    def __init__(self, folder: Path) -> None:
        self._path, self._bell = folder / "gate", folder / "bell"
        os.mkfifo(self._path)
        os.mkfifo(self._bell)
        self._keeper: int | None = os.open(self._path, os.O_RDWR)
        self._listener = os.open(self._bell, os.O_RDWR)

    def hook(self) -> Any:
        path, bell, caller = str(self._path), str(self._bell), os.getpid()

        def wait(arguments: dict[str, Any]) -> None:
            if os.getpid() != caller:
                with open(bell, "ab") as ring:
                    ring.write(b".")
                with open(path) as gate:  # nothing is written: it ends when no writer is left
                    gate.read()

        return wait

    def reached(self) -> None:
        """Return when a child has come to the gate."""
        os.read(self._listener, 1)

    def open(self) -> None:
        """Let everything through, now and later."""
        if self._keeper is not None:
            reader = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            os.close(self._keeper)
            self._keeper = None
            # A file in its place, so that who comes later does not wait for a writer.
            os.unlink(self._path)
            self._path.touch()
            os.close(reader)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.open()
    os.close(made._listener)
