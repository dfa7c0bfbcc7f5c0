"""What the tests of modes share: a kernel, and a tuner whose swaps can be waited for."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.config import config_digest, config_record
from safetune.launch.key_state import KeyState, KeyStates
from safetune.miss import failures
from safetune.miss.resolve import Miss
from safetune.store.packs import exchange, packs
from safetune.store.packs.packs import name_of, read_pack
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice

#: For anything that should happen soon; far more than it takes on a loaded machine.
SOON_S = 60.0


@triton.jit
def copy_kernel(dst, src, n, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


class Swaps(KeyStates):
    """A tuner's states that report every config that a key launches from then on."""

    def __init__(self, tuner: Any) -> None:
        super().__init__(tuner)
        self._swaps: queue.Queue[Any] = queue.Queue()

    def publish(self, state: KeyState) -> None:
        super().publish(state)
        if state.hit is not None:
            self._swaps.put(state.hit)

    def next(self) -> Any:
        """Return the config that is written next, now or soon."""
        return self._swaps.get(timeout=SOON_S)

    @property
    def idle(self) -> bool:
        return self._swaps.empty()


class Copies:
    """A tuned copy kernel and ways to call it."""

    def __init__(self, *hooks: Any, blocks: tuple[int, ...] = (), **options: Any) -> None:
        blocks = blocks or tuple(16 << number for number in range(len(hooks)))
        hooks = hooks or (None,) * len(blocks)
        configs = [
            triton.Config({"BLOCK": block}, pre_hook=hook)
            for block, hook in zip(blocks, hooks, strict=True)
        ]
        options.setdefault("key", ["n"])
        self.tuner = safetune(configs=configs, **options)(copy_kernel)
        self.tuner.states = self.swaps = Swaps(self.tuner)

    def __call__(self, n: int = 100, flag: int = 0, grid: Any = None) -> int:
        """Copy n elements, check the result, and return the BLOCK that did it."""
        src = torch.arange(n, dtype=torch.float32)
        dst = torch.zeros(n)
        self.tuner[grid or (lambda meta: (triton.cdiv(n, meta["BLOCK"]),))](dst, src, n, FLAG=flag)
        assert torch.equal(dst, src)
        return self.block(self.tuner.best_config)

    @staticmethod
    def block(config: Any) -> int:
        return config.kwargs["BLOCK"]


@pytest.fixture
def copies() -> type[Copies]:
    return Copies


class Clock:
    """The time by which a tuning is tried again; a test lets it go on."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(failures, "clock", made := Clock())
    return made


class Packed:
    """Writes packs for a tuner of `Copies`, made without tuning."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, made: Copies, block: int, n: int = 100, **changes: Any) -> Path:
        """Say that this BLOCK is the choice for n; `changes` are fields of key or choice."""
        arguments = (torch.zeros(n), torch.zeros(n), n)
        request = Miss(made.tuner, arguments, {"FLAG": 0, "grid": (1,)}).request()
        (config,) = (c for c in request.configs if c.kwargs["BLOCK"] == block)
        choice = ChoiceRecord(
            key="",
            generation=1,
            config_digest=config_digest(config),
            config=config_record(config),
            declared=request.declared,
            median_ms=1.0,
            measured=2,
            created=1795262400.0,
        )
        of_choice = {name: changes.pop(name) for name in tuple(changes) if hasattr(choice, name)}
        key = replace(KeyRecord.of(request.key), **changes)
        entry = packs.checked(StoredChoice(key, replace(choice, **of_choice)))
        path = self.directory / name_of(entry)
        others = read_pack(path) if path.exists() else []
        exchange.write(path, packs.dump(exchange.merged([entry], others)))
        return path


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packed:
    """A directory of packs, which SAFETUNE_PACKS names."""
    directory = tmp_path / "packs"
    directory.mkdir()
    monkeypatch.setenv("SAFETUNE_PACKS", str(directory))
    return Packed(directory)
