"""Values of dropped names neither tune nor compile again: counted, and by Triton's own hash."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from safetune import safetune
from safetune.child.session import ConfigLaunch
from safetune.errors import PhantomKeyWarning
from safetune.inputs import kernel_pickle
from safetune.inputs.compile_spec import capture_spec
from safetune.miss.resolve import Miss
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

TARGET = GPUTarget("cuda", 90, 32)
#: Multiples of 16, odd numbers, 1, and one beyond 32 bits: Triton specializes on each.
VALUES_OF_T = (1, 2, 16, 100, 4096, 1 << 33)
VALUES_OF_NB = (1, 2, 8, 1024)
D = 32


#: A module of its own: grids in the module of a kernel are readers, and the ones below read all.
MODULE = '''
import triton.language as tl

def norm_kernel(x, out, n, T, D: tl.constexpr, NB: tl.constexpr, BT: tl.constexpr):
    """Doubles n rows. T and NB are what FLA's norm kernels have: nothing reads them."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    offset = row[:, None] * D + tl.arange(0, D)[None, :]
    mask = (row < n)[:, None]
    tl.store(out + offset, tl.load(x + offset, mask=mask) * 2, mask=mask)
'''


@pytest.fixture(scope="module")
def norm_kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("kernels") / "pinning_kernels.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("pinning_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.norm_kernel


def tuned(kernel: Any, **options: Any) -> Any:
    configs = [triton.Config({"BT": rows}, num_warps=warps) for rows in (4, 8) for warps in (1, 2)]
    made = safetune(configs=configs, key=["D", "T", "NB"], **options)(kernel)
    with pytest.warns(PhantomKeyWarning, match="'T', 'NB' in key= of .* are never read"):
        made.explain_key()
    return made


def calls() -> Iterator[tuple[int, int]]:
    yield from ((t, nb) for t in VALUES_OF_T for nb in VALUES_OF_NB)


def test_all_values_of_a_dropped_name_share_one_tuning(norm_kernel: Any, tmp_path: Path) -> None:
    """The grid sees the caller's values all the same."""
    log = tmp_path / "hooks"
    grids: set[tuple[int, int]] = set()
    path = str(log)

    def bench(launch: Any, quantiles: Any) -> list[float]:
        launch()
        with open(path, "a") as file:
            file.write(f"{os.getpid()} tuned\n")
        return [1.0]

    def grid(meta: dict[str, Any]) -> tuple[int]:
        grids.add((meta["T"], meta["NB"]))
        return (triton.cdiv(8, meta["BT"]),)

    kernel = tuned(triton.jit(norm_kernel), do_bench=bench)
    with pytest.warns(UserWarning, match=r"the launch grid reads NB, T.*keep=\['NB', 'T'\]"):
        _launch_all(kernel, grid)

    assert len(kernel.cache) == 1
    ((key, trials),) = open_lookup(Settings.current()).store.trials_of("norm_kernel")
    assert len(trials) == len(kernel.configs)
    assert dict(key.call["values"]).keys() == {"D"}
    assert grids == set(calls())
    tunings = [line for line in log.read_text().splitlines() if line.endswith("tuned")]
    assert len({line.split()[0] for line in tunings}) == 1


def _launch_all(kernel: Any, grid: Any) -> None:
    for t, nb in calls():
        x = torch.randn(8, D)
        out = torch.zeros_like(x)
        kernel[grid](x, out, 8, t, D=D, NB=nb)
        assert torch.equal(out, 2 * x)


class Compiled:
    """A kernel launched up to where Triton would compile, as on an H100; there is none here."""

    def __init__(self, jit: JITFunction) -> None:
        self.hashes: list[str] = []
        self._jit = jit
        backend = make_backend(TARGET)
        binder = create_function_from_signature(jit.signature, jit.params, backend)
        jit.device_caches = {0: ({}, {}, TARGET, backend, binder)}
        jit._do_compile = self._note

    def _note(
        self,
        key: Any,
        signature: Any,
        device: Any,
        constexprs: Any,
        options: Any,
        attrs: Any,
        *_: Any,
    ) -> None:
        self.hashes.append(ASTSource(self._jit, signature, constexprs, attrs).hash())


@contextmanager
def device_zero() -> Iterator[None]:
    """Let Triton's launch ask for the current device and stream where there is no driver."""
    from triton.runtime import driver

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(driver), "active", Driver(), raising=False)
        yield


def hashes(kernel: Any, jit: JITFunction, keywords: bool, **more: Any) -> list[str]:
    """Return what is compiled for each T and NB with the kernel's first config."""
    compiled = Compiled(jit)
    x = torch.zeros(16, D)
    for t, nb in calls():
        extra = dict(kernel.configs[0].all_kwargs()) if hasattr(kernel, "configs") else more
        with device_zero():
            if hasattr(kernel, "shapes"):
                args, kwargs = _arguments(x, t, nb, keywords)
                shape = kernel.shapes.of(args, kwargs)
                args, kwargs = shape.pinned(args, kwargs)
            else:
                args, kwargs = _arguments(x, t, nb, keywords)
            jit.run(*args, grid=(1,), warmup=False, **kwargs, **extra)
    return compiled.hashes


def _arguments(x: torch.Tensor, t: int, nb: int, keywords: bool) -> tuple[Any, dict[str, Any]]:
    if keywords:
        return (x, x, 8), {"NB": nb, "D": D, "T": t}
    return (x, x, 8, t), {"D": D, "NB": nb}


@pytest.mark.internals
@pytest.mark.parametrize("keywords", [False, True])
def test_all_values_of_a_dropped_name_share_one_compilation(
    norm_kernel: Any, keywords: bool
) -> None:
    jit = JITFunction(norm_kernel)
    kernel = tuned(jit)
    assert kernel.key_report.pinned == ("T", "NB")
    found = hashes(kernel, jit, keywords)
    assert len(found) == len(VALUES_OF_T) * len(VALUES_OF_NB)
    assert len(set(found)) == 1


@pytest.mark.internals
@pytest.mark.parametrize("keywords", [False, True])
def test_a_child_compiles_the_specialisation_that_the_caller_launches(
    norm_kernel: Any, keywords: bool
) -> None:
    """For every config; the spec is what `resolve` captures in the measuring child."""
    jit = JITFunction(norm_kernel)
    kernel = tuned(jit)
    compiled = Compiled(jit)
    launched, told = set(), set()
    x = torch.zeros(16, D)
    for t, nb in calls():
        args, kwargs = _arguments(x, t, nb, keywords)
        pinned, pinned_kwargs = kernel.shapes.of(args, kwargs).pinned(args, kwargs)
        for config in kernel.configs:
            with device_zero():
                call = Miss(kernel, args, {**kwargs, "grid": (1,)}).call
                options = config.all_kwargs()
                jit.run(*pinned, grid=(1,), warmup=False, **pinned_kwargs, **options)
                copy = JITFunction(norm_kernel)
                copy.device_caches = jit.device_caches
                launch = ConfigLaunch(replace(call, kernel=copy), config, (1,))
                spec = kernel_pickle.unpack(capture_spec(copy, launch, 0))
            signature, constexprs, attrs, options, target = spec
            assert target == TARGET
            told.add((ASTSource(copy, signature, constexprs, attrs).hash(), options["num_warps"]))
            launched.add((compiled.hashes[-1], config.num_warps))
    assert told == launched
    assert len(told) == len(kernel.configs)


@pytest.mark.internals
def test_without_pinning_each_value_compiles(norm_kernel: Any) -> None:
    """What the test above would see if nothing were pinned: Triton's own behaviour."""
    jit = JITFunction(norm_kernel)
    found = hashes(jit, jit, False, BT=4, num_warps=1)
    # 1, a multiple of 16 and another number are three kinds of T; one beyond 32 bits is a fourth.
    assert len(set(found)) == 4 * len(VALUES_OF_NB)


@pytest.mark.internals
def test_kept_names_are_not_pinned(norm_kernel: Any) -> None:
    jit = JITFunction(norm_kernel)
    kernel = safetune(
        configs=[triton.Config({"BT": 4}), triton.Config({"BT": 8})],
        key=["D", "T", "NB"],
        keep=["T", "NB"],
    )(jit)
    assert kernel.key_report.pinned == ()
    assert len(set(hashes(kernel, jit, False))) == 4 * len(VALUES_OF_NB)
