"""One decorator for the other: the same results, and what safetune makes of a key."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from safetune import PhantomKey, safetune
from safetune.errors import PhantomKeyWarning
from safetune.launch.call_shape import CallShape
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

N = SIZE = 256
CONFIGS = [triton.Config({"BLOCK": size}) for size in (32, 128)]


@triton.jit
def add_kernel(out, x, y, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    total = tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask)
    tl.store(out + offsets, total, mask=mask)


@triton.jit
def scale_kernel(x, FACTOR, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < N)
    tl.store(x + offsets, value * FACTOR, mask=offsets < N)


@triton.jit
def bias_kernel(x, bias, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < N)
    if bias is not None:
        value += tl.load(bias + offsets, mask=offsets < N)
    tl.store(x + offsets, value, mask=offsets < N)


@triton.jit
def typed_kernel(x, N, KIND: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < N).to(DTYPE)
    tl.store(x + offsets, value.to(tl.float32), mask=offsets < N)


@triton.jit
def unread_kernel(x, N, NB, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)


@triton.jit
def defaults_kernel(x, A=1, B=1, N=256, BLOCK: tl.constexpr = 32):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < N)
    tl.store(x + offsets, value * A + B, mask=offsets < N)


@triton.jit
def annotated_kernel(x: Tensor, N: int = SIZE, BLOCK: tl.constexpr = 32):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(N, meta["BLOCK"]),)


class Tunings:
    """Counts tunings: pruning runs once in each, in this process, and leaves all configs."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def prune(self) -> dict[str, Any]:
        def prune(configs: list[triton.Config], named: dict[str, Any], **kwargs: Any) -> Any:
            self.count += 1
            return configs

        return {"early_config_prune": prune}


@pytest.fixture
def tunings() -> Tunings:
    return Tunings()


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.randn(N, device=device)


def launch(launched: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Launch so that no search of this file's text finds which grid goes with which kernel."""
    launched[grid](*args, **kwargs)


def stored_keys(name: str) -> list[dict[str, Any]]:
    """Return the calls of one kernel that the store has trials for."""
    store = open_lookup(Settings.current()).store
    return [key.call for key, _ in store.trials_of(name)]


class TestSameResults:
    """Tuning with Triton in this process and with safetune, everything else being equal."""

    @staticmethod
    def tuned(decorator: Any, kernel: Any, **options: Any) -> Any:
        def do_bench(run: Callable[[], None], quantiles: object) -> list[float]:
            run()
            return [1.0, 1.0, 1.0]

        return decorator(configs=CONFIGS, key=["N"], do_bench=do_bench, **options)(kernel)

    def test_aliasing_arguments(self, x: torch.Tensor) -> None:
        results = []
        for decorator in (triton.autotune, safetune):
            value = x.clone()
            kernel = self.tuned(decorator, add_kernel, restore_value=["out"])
            kernel[grid](value, value, value, N)
            results.append(value)

        assert torch.equal(*results)
        assert torch.equal(results[0], x + x)

    def test_globals_in_the_signature_alone(self, x: torch.Tensor) -> None:
        """A default and an annotation failed in the child with `name 'Tensor' is not defined`."""
        expected = x + 1

        self.tuned(safetune, annotated_kernel)[grid](x, N=N)

        assert torch.equal(x, expected)


class TestKeyValues:
    def test_equal_numbers_of_three_types_are_three_keys(
        self, x: torch.Tensor, tunings: Tunings
    ) -> None:
        """Triton lets them share one entry: they are equal as parts of a tuple."""
        kernel = safetune(
            configs=CONFIGS, key=["KIND"], keep=["KIND"], prune_configs_by=tunings.prune
        )(typed_kernel)

        for value in (1, True, 1.0, 1, True, 1.0):
            kernel[grid](x, N, value, tl.float32)

        assert len(list(kernel.states)) == 3
        assert len(kernel.cache) == 1, "as parts of Triton's key they are equal"
        assert tunings.count == 3
        values = [call["values"] for call in stored_keys("typed_kernel")]
        assert sorted(map(repr, values)) == sorted(
            ["[['KIND', 1]]", "[['KIND', True]]", "[['KIND', 1.0]]"]
        )

    def test_equal_numbers_inside_tuples_too(self) -> None:
        """A hashable tuple went into the memory key as it was, and (1,) == (True,)."""
        kernel = safetune(configs=CONFIGS, key=["FACTOR"])(scale_kernel)
        shape = CallShape(kernel, 3, ())

        keys = {shape.key((None, value, N), {}) for value in ((1,), (True,), (1.0,), [1])}

        assert len(keys) == 4

    def test_none_and_a_tensor(self, x: torch.Tensor, tunings: Tunings) -> None:
        kernel = safetune(configs=CONFIGS, key=["N"], prune_configs_by=tunings.prune)(bias_kernel)
        expected = x + x

        kernel[grid](x, None, N)
        kernel[grid](x, x.clone(), N)
        kernel[grid](x.clone(), None, N)

        assert tunings.count == 2
        assert torch.equal(x, expected)

    def test_a_list(self, x: torch.Tensor, tunings: Tunings) -> None:
        """Triton raises TypeError: unhashable."""
        kernel = safetune(
            configs=CONFIGS, key=["KIND"], keep=["KIND"], prune_configs_by=tunings.prune
        )(typed_kernel)

        for value in ([1, 2], [1, 2], [2, 1], (1, 2)):
            kernel[grid](x, N, value, tl.float32)

        assert tunings.count == 3

    def test_dtypes_of_triton_and_torch(self, x: torch.Tensor, tunings: Tunings) -> None:
        heuristic = {"DTYPE": lambda a: tl.float16 if a["KIND"] == torch.float16 else tl.float32}
        kernel = safetune(configs=CONFIGS, key=["KIND"], prune_configs_by=tunings.prune)(
            triton.heuristics(heuristic)(typed_kernel)
        )
        half = x.clone()

        for value in (torch.float32, torch.float16, torch.float32):
            kernel[grid](half if value is torch.float16 else x.clone(), N, value)
        assert tunings.count == 2
        assert torch.equal(half, x.half().float())

        plain = safetune(configs=CONFIGS, key=["DTYPE"], prune_configs_by=tunings.prune)(
            typed_kernel
        )
        for dtype in (tl.float32, tl.float16, tl.float32):
            plain[grid](x.clone(), N, 0, dtype)
        assert tunings.count == 4

    def test_keywords_in_another_order_do_not_swap_dtypes(
        self, x: torch.Tensor, tunings: Tunings
    ) -> None:
        """The dtypes stood in the order of the call, so (y, x) looked like (x, y)."""
        kernel = safetune(configs=CONFIGS, key=["N"], prune_configs_by=tunings.prune)(add_kernel)
        out = torch.empty_like(x)

        kernel[grid](out, x=x, y=x.half(), N=N)
        kernel[grid](out, y=x, x=x.half(), N=N)

        assert tunings.count == 2
        assert len(list(kernel.states)) == 2

    def test_a_value_left_out_does_not_move_another_into_its_place(
        self, x: torch.Tensor, tunings: Tunings
    ) -> None:
        """A call without A and one without B had the same key when B and A were equal."""
        kernel = safetune(configs=CONFIGS, key=["A", "B"], prune_configs_by=tunings.prune)(
            defaults_kernel
        )
        y = x.clone()

        kernel[grid](x, A=3)
        kernel[grid](y, B=3)

        assert tunings.count == 2
        assert torch.allclose(x - 1, (y - 3) * 3, atol=1e-4)

    def test_a_launch_option_may_be_unhashable(self, x: torch.Tensor) -> None:
        kernel = safetune(configs=CONFIGS, key=["N"])(scale_kernel)
        options = {"grid": grid, "warmup": False, "extern_libs": {"libdevice": "a.bc"}}
        other = {**options, "extern_libs": {"libdevice": "b.bc"}}
        shape = CallShape(kernel, 3, tuple(options))

        assert shape.key((x, 2, N), options) == shape.key((x, 2, N), dict(options))
        assert shape.key((x, 2, N), options) != shape.key((x, 2, N), other)


class TestPhantoms:
    def test_dropped_and_pinned_while_the_grid_sees_the_callers_value(
        self, x: torch.Tensor, tunings: Tunings
    ) -> None:
        counted = safetune(configs=CONFIGS, key=["N", "NB"], prune_configs_by=tunings.prune)(
            unread_kernel
        )
        with pytest.warns(PhantomKeyWarning, match=r"'NB' in key= .*keep=\['NB'\]"):
            counted.explain_key()
        seen: list[int] = []

        def watching(meta: dict[str, Any]) -> tuple[int]:
            seen.append(meta["NB"])
            return (triton.cdiv(N, meta["BLOCK"]),)

        expected = x + 4

        with warnings.catch_warnings(record=True) as caught:
            for value in (2, 3, 5, 7):
                launch(counted, watching, x, N, value)

        assert any("keep=['NB'] to tune each value" in str(each.message) for each in caught)
        assert tunings.count == 1
        assert len(counted.cache) == 1
        assert seen[-3:] == [3, 5, 7]
        assert set(seen) == {2, 3, 5, 7}
        assert torch.allclose(x, expected)

    def test_hooks_of_a_config_see_the_callers_value(self, x: torch.Tensor) -> None:
        seen: list[int] = []

        def hook(arguments: dict[str, Any]) -> None:
            seen.append(arguments[name])

        name = "NB"
        configs = [triton.Config({"BLOCK": 32})]
        counted = safetune(configs=configs, key=["N", "NB"])(unread_kernel)
        with pytest.warns(PhantomKeyWarning):
            counted.explain_key()
        counted.configs[0].pre_hook = hook

        counted[grid](x, N, 7)
        counted[grid](x, N, NB=8)

        assert seen == [7, 8]

    def test_one_warning_per_grid_and_tuning(self, x: torch.Tensor) -> None:
        counted = safetune(configs=CONFIGS, key=["N", "NB"])(unread_kernel)
        with pytest.warns(PhantomKeyWarning):
            counted.explain_key()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            launch(counted, lambda meta: (meta["NB"] * 0 + 8,), x, N, 2)
            launch(counted, lambda meta: (meta["NB"] * 0 + 8,), x, N, 3)

        texts = [str(each.message) for each in caught]
        assert len([text for text in texts if "keep=['NB']" in text]) == 1, texts

    @pytest.mark.parametrize(
        "options", [{"keep": ["NB"]}, {"phantom": "keep"}], ids=["keep=", "phantom=keep"]
    )
    def test_kept(self, x: torch.Tensor, tunings: Tunings, options: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PhantomKeyWarning)
            counted = safetune(
                configs=CONFIGS, key=["N", "NB"], prune_configs_by=tunings.prune, **options
            )(unread_kernel)

        for value in (2, 3, 5, 2):
            counted[grid](x, N, value)

        assert counted.keys == ["N", "NB"]
        assert tunings.count == 3

    def test_an_error_on_request(self) -> None:
        with pytest.raises(PhantomKey, match="'NB' in key= of unread_kernel is never read"):
            safetune(configs=CONFIGS, key=["N", "NB"], phantom="error")(unread_kernel)

    def test_the_environment_sets_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAFETUNE_PHANTOM", "error")
        with pytest.raises(PhantomKey, match="NB"):
            safetune(configs=CONFIGS, key=["N", "NB"])(unread_kernel)

        counted = safetune(configs=CONFIGS, key=["N", "NB"], phantom="keep")(unread_kernel)

        assert counted.keys == ["N", "NB"], "what the decorator says wins"


class TestMemory:
    @pytest.mark.parametrize("key", [["N"], ["x", "N"]], ids=["values", "a pointer"])
    def test_no_tensor_outlives_its_call(self, device: str, key: list[str]) -> None:
        kernel = safetune(configs=CONFIGS, key=key)(scale_kernel)
        tensors = [torch.ones(N, device=device) for _ in range(3)]
        references = [weakref.ref(tensor) for tensor in tensors]

        gc.disable()  # a cycle would keep device memory until the next collection
        try:
            kernel[grid](tensors[0], 2, N)  # tunes
            kernel[grid](tensors[1], 2, N)  # knows the choice
            kernel[grid](tensors[2], FACTOR=2, N=N)
            assert all(torch.equal(tensor, torch.full_like(tensor, 2.0)) for tensor in tensors)
            tensors.clear()
            alive = [reference() is not None for reference in references]
        finally:
            gc.enable()

        assert alive == [False, False, False]
        assert len(kernel.cache) == 1
        assert not any(isinstance(part, torch.Tensor) for part in next(iter(kernel.cache)))
