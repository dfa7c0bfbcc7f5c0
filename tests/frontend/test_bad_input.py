"""What a user can get wrong, and the message that says so; and what only looks wrong."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import Autotuner, InvalidConfig, InvalidSetting, NoWorkingConfig, safetune, settings
from safetune.errors import PhantomKeyWarning
from safetune.integrations.install import install
from safetune.settings import Settings

N = 256
CONFIGS = [triton.Config({"BLOCK": size}) for size in (32, 128)]
FULL = pytest.mark.full
DEFAULT = triton.Config({}, num_warps=4, num_stages=3, num_ctas=1)


@triton.jit
def copy_kernel(dst, src, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offsets, tl.load(src + offsets, mask=offsets < N), mask=offsets < N)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(N, meta["BLOCK"]),)


def launch(kernel: Any, device: str, **kwargs: Any) -> bool:
    """Launch; return whether the copy is right."""
    src, dst = torch.randn(N, device=device), torch.zeros(N, device=device)
    kernel[grid](dst, src, N, **kwargs)
    return torch.equal(src, dst)


def message(caught: pytest.ExceptionInfo[BaseException]) -> str:
    return str(caught.value)


class TestConfigs:
    def test_an_entry_that_is_not_a_config_is_an_error(self) -> None:
        with pytest.raises(InvalidConfig) as caught:
            safetune(configs=[*CONFIGS, {"BLOCK": 64}], key=["N"])(copy_kernel)

        assert message(caught) == (
            "configs[2] of copy_kernel is {'BLOCK': 64} (dict); it must be a triton.Config, "
            "e.g. triton.Config({'BLOCK': 128}, num_warps=4)"
        )

    def test_a_kwarg_that_is_nothing(self) -> None:
        with pytest.raises(InvalidConfig) as caught:
            safetune(configs=[CONFIGS[0], triton.Config({"BLOKC": 64})], key=["N"])(copy_kernel)

        assert message(caught) == (
            "configs[1] of copy_kernel sets 'BLOKC' (did you mean 'BLOCK'?), which is neither a "
            "parameter of the kernel (dst, src, N, BLOCK) nor a back-end option"
        )

    @pytest.mark.parametrize("configs", [CONFIGS, CONFIGS[:1]], ids=["two", "one"])
    def test_the_call_passes_what_the_configs_set(
        self, device: str, configs: list[triton.Config]
    ) -> None:
        kernel = safetune(configs=configs, key=["N"])(copy_kernel)

        with pytest.raises(InvalidConfig) as caught:
            launch(kernel, device, BLOCK=64)

        assert message(caught) == (
            "Conflicting meta-parameters: BLOCK. The configs of copy_kernel set them, and so does "
            "this call: leave them out of the call or of the configs."
        )
        assert isinstance(caught.value, ValueError), "what triton.autotune raises"

    @pytest.mark.parametrize("kwargs", [None, 16, "BLOCK"])
    def test_kwargs_that_are_no_dict(self, kwargs: Any) -> None:
        """It was a TypeError of Python's: 'NoneType' object is not iterable."""
        with pytest.raises(InvalidConfig) as caught:
            safetune(configs=[CONFIGS[0], triton.Config(kwargs)], key=["N"])(copy_kernel)

        assert "it must be a triton.Config, e.g. triton.Config({'BLOCK': 128}" in message(caught)

    def test_configs_that_are_no_list(self) -> None:
        with pytest.raises(InvalidConfig) as caught:
            safetune(configs=3, key=["N"])(copy_kernel)

        assert message(caught) == (
            "configs=3 of copy_kernel is not a list of triton.Configs; write [...]"
        )

    def test_a_hook_of_a_config_that_is_no_function(self) -> None:
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=[triton.Config({}, pre_hook=3)], key=["N"])(copy_kernel)

        assert message(caught) == "configs[0].pre_hook=3 of copy_kernel is not a function"

    def test_the_same_positionally_and_when_the_choice_is_known(self, device: str) -> None:
        kernel = safetune(configs=CONFIGS, key=["N"])(copy_kernel)
        assert launch(kernel, device)
        src = torch.randn(N, device=device)

        with pytest.raises(InvalidConfig, match="Conflicting meta-parameters: BLOCK"):
            kernel[grid](src, src, N, 64)

    def test_the_call_passes_an_option_of_the_configs(self, device: str) -> None:
        """The kernel was tuned first, and then Python's own TypeError came."""
        kernel = safetune(configs=CONFIGS, key=["N"])(copy_kernel)

        with pytest.raises(InvalidConfig, match=r"Conflicting meta-parameters: num_warps\. The"):
            launch(kernel, device, num_warps=8)

        assert not hasattr(kernel, "configs_timings")

    def test_a_call_without_a_grid_says_how_to_launch(self) -> None:
        kernel = safetune(configs=CONFIGS, key=["N"])(copy_kernel)
        with pytest.raises(TypeError) as caught:
            kernel(torch.zeros(8), torch.zeros(8), 8)
        assert str(caught.value) == ("write copy_kernel[grid](...): a launch needs a grid")

    def test_a_misspelled_parameter(self) -> None:
        with pytest.raises(TypeError, match=r"argument 'keys' \(did you mean 'key'\?\)$"):
            safetune(configs=CONFIGS, keys=["N"])  # type: ignore[call-arg]

    def test_configs_that_were_replaced_do_not_conflict(self, device: str) -> None:
        kernel = safetune(configs=CONFIGS, key=["N"])(copy_kernel)
        kernel.configs = [triton.Config({}, num_warps=2)]

        assert launch(kernel, device, BLOCK=64)

    def test_a_config_that_pruning_removes_does_not_conflict(self, device: str) -> None:
        def prune(configs: list[triton.Config], named: dict[str, Any], **kwargs: Any) -> Any:
            return [config for config in configs if not config.kwargs]

        configs = [CONFIGS[0], triton.Config({}, num_warps=2), triton.Config({}, num_warps=4)]
        kernel = safetune(
            configs=configs, key=["N"], prune_configs_by={"early_config_prune": prune}
        )(copy_kernel)

        assert launch(kernel, device, BLOCK=64)
        assert len(kernel.configs_timings) == 2

    def test_no_config_works(self, device: str) -> None:
        configs = [triton.Config({"BLOCK": size}) for size in (33, 65)]
        kernel = safetune(configs=configs, key=["N"])(copy_kernel)

        with pytest.raises(Exception, match="power of 2") as caught:
            launch(kernel, device)

        assert not isinstance(caught.value, NoWorkingConfig), "Triton's own error"
        (note,) = caught.value.__notes__
        first, *rows, last = note.splitlines()
        assert "`safetune show copy_kernel`" in last
        assert first == "safetune: none of the 2 configs of copy_kernel works for N=256 (float32):"
        for row, size in zip(rows, (33, 65), strict=True):
            assert row.startswith(f"  BLOCK={size} num_warps=4 num_stages=3  ")
            assert "error" in row
        assert not kernel.cache

    def test_duplicates_are_dropped_with_a_warning(self, device: str) -> None:
        with pytest.warns(UserWarning, match="listed twice") as caught:
            kernel = safetune(
                configs=[*CONFIGS, triton.Config({"BLOCK": 32})],
                key=["N"],
            )(copy_kernel)

        assert [str(each.message) for each in caught] == [
            "safetune: configs[2] of copy_kernel is listed twice (BLOCK=32 num_warps=4 "
            "num_stages=3); the second is dropped"
        ]
        assert kernel.configs == CONFIGS


class TestSettings:
    @pytest.mark.parametrize("isolation", ["process", "", None])
    def test_isolation(self, isolation: Any) -> None:
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["N"], isolation=isolation)(copy_kernel)

        assert message(caught) == (
            f"isolation={isolation!r} is not valid; use one of: worker, config, inline"
        )

    @pytest.mark.parametrize("name", ["compile_timeout_s", "run_timeout_s"])
    @pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "5", None, True])
    def test_timeouts(self, name: str, value: Any) -> None:
        """A string was compared with zero: a TypeError that named neither kernel nor setting."""
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["N"], **{name: value})(copy_kernel)

        assert message(caught) == (
            f"{name}={value!r} of copy_kernel must be a number of seconds over 0"
        )

    def test_phantom(self) -> None:
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["N"], phantom="ignore")(copy_kernel)

        assert message(caught) == "phantom='ignore' is not valid; use one of: drop, keep, error"

    def test_phantom_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAFETUNE_PHANTOM", "ignore")

        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["N"])(copy_kernel)

        assert "SAFETUNE_PHANTOM='ignore' is not valid; use one of: drop, keep, error" in message(
            caught
        )

    def test_mode(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = safetune(configs=CONFIGS, key=["N"])(copy_kernel)
        monkeypatch.setenv("SAFETUNE_MODE", "fast")

        with pytest.raises(InvalidSetting) as caught:
            launch(kernel, device)

        assert message(caught).startswith("SAFETUNE_MODE='fast' is not valid; use one of: tune, ")
        monkeypatch.setenv("SAFETUNE_MODE", "tune")
        assert launch(kernel, device), "the failure was not kept as the choice"
        assert len(kernel.configs_timings) == 2

    @pytest.mark.parametrize("name", ["reset_to_zero", "restore_value"])
    @pytest.mark.internals
    def test_names_that_are_no_arguments(self, name: str) -> None:
        """Triton 3.6 says nothing, and fails with KeyError at the first launch."""
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["N"], **{name: ["dst", "dts"]})(copy_kernel)

        assert message(caught) == (
            f"{name} of copy_kernel contains names that are not kernel arguments: 'dts' "
            "(did you mean 'dst'?). Valid argument names are: dst, src, N, BLOCK."
        )

    @pytest.mark.parametrize("name", ["reset_to_zero", "restore_value", "scratch"])
    def test_names_as_one_string(self, name: str) -> None:
        """The message was of the arguments d, s and t."""
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["N"], **{name: "dst"})(copy_kernel)

        assert (
            message(caught) == f"{name}='dst' of copy_kernel is one string; write {name}=[\"dst\"]"
        )

    @pytest.mark.parametrize("name", ["reset_to_zero", "restore_value", "scratch", "key", "keep"])
    @pytest.mark.parametrize("value", [1, True])
    def test_names_that_are_no_list(self, name: str, value: Any) -> None:
        """Python said "'bool' object is not iterable", which names no argument."""
        with pytest.raises(InvalidSetting) as caught:
            safetune(**{"configs": CONFIGS, "key": ["N"], name: value})(copy_kernel)

        said, _, remedy = message(caught).partition(" is not a list of argument names; write ")
        assert said.removesuffix(" of copy_kernel") == f"{name}={value}"
        assert remedy.startswith(f"{name}=[")

    @pytest.mark.parametrize("name", ["pre_hook", "post_hook", "do_bench"])
    def test_functions_that_are_none(self, name: str) -> None:
        """Known at the first launch, from the tuning process; a false value is none, as in Triton.

        `pre_hook=zeroes and hook` is False for some kernels.
        """
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["N"], **{name: "dst"})(copy_kernel)

        assert message(caught) == f"{name}='dst' of copy_kernel is not a function"
        safetune(configs=CONFIGS, key=["N"], **{name: False})(copy_kernel)

    @pytest.mark.parametrize("name", ["early_config_prune", "perf_model"])
    def test_pruning_by_what_is_no_function(self, name: str) -> None:
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["N"], prune_configs_by={name: 3})(copy_kernel)

        assert message(caught) == f"{name}=3 of copy_kernel is not a function"

    @pytest.mark.parametrize("value", [print, [print]], ids=["a function", "a list"])
    def test_pruning_that_is_no_dict(self, value: Any) -> None:
        """Python said that a function is not iterable."""
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["N"], prune_configs_by=value)(copy_kernel)

        assert message(caught) == (
            f"prune_configs_by={value!r} of copy_kernel is not a dict; write "
            'prune_configs_by={"early_config_prune": ...}'
        )

    @pytest.mark.parametrize("name", ["reset_to_zero", "restore_value", "scratch", "key", "keep"])
    def test_names_that_can_be_read_once(self, name: str) -> None:
        """An iterator was empty once its names had been checked."""
        options: dict[str, Any] = {"key": ["N"], name: iter(["N"])}
        kernel = safetune(configs=iter(CONFIGS), **options)(copy_kernel)
        assert kernel.configs == CONFIGS
        assert list(kernel.keys) == ["N"]
        hooks = kernel.hooks
        assert (hooks.reset_to_zero, hooks.restore_value, hooks.scratch) == tuple(
            ("N",) if name == each else () for each in ("reset_to_zero", "restore_value", "scratch")
        )

    def test_key_as_one_string(self) -> None:
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key="src")(copy_kernel)

        assert message(caught) == "key='src' is one string; write key=[\"src\"]"

    def test_keep_as_one_string(self) -> None:
        """It was split into letters before anyone looked."""
        with pytest.raises(InvalidSetting) as caught:
            safetune(configs=CONFIGS, key=["src"], keep="src")(copy_kernel)

        assert message(caught) == "keep='src' is one string; write keep=[\"src\"]"

    def test_keep_of_what_the_key_lacks(self) -> None:
        with pytest.raises(InvalidSetting, match=r"keep=\['dst'\] of copy_kernel has 'dst', which"):
            safetune(configs=CONFIGS, key=["N"], keep=["dst"])(copy_kernel)

    @pytest.mark.parametrize("target", [print, lambda x: x, 3])
    def test_no_kernel_below(self, target: Any) -> None:
        with pytest.raises(
            InvalidSetting, match=r"which is not a Triton kernel: put @triton\.jit below"
        ):
            safetune(configs=CONFIGS, key=["N"])(target)

    def test_a_kernel_beside_other_arguments(self) -> None:
        """The key was dropped: the kernel had Triton's default config and one choice."""
        with pytest.raises(
            InvalidSetting, match=r"^configs=<.*> is a kernel; write safetune\(conf"
        ):
            safetune(copy_kernel, key=["N"])

    def test_no_kernel_below_a_bare_decorator(self) -> None:
        """It became a decorator, and said so at the first launch: not subscriptable."""
        with pytest.raises(InvalidSetting, match=r"@triton\.jit below"):

            @safetune
            def forgotten(x: Any) -> None: ...


class TestSurroundings:
    def test_a_cache_directory_that_cannot_be_made(
        self, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Below a file: root may write wherever the permission bits forbid it."""
        blocked = tmp_path / "file"
        blocked.write_text("")
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(blocked / "cache"))
        kernel = safetune(configs=CONFIGS, key=["N"])(copy_kernel)
        again = safetune(configs=CONFIGS, key=["N"])(copy_kernel)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert launch(kernel, device)
            assert launch(again, device)

        texts = [str(each.message) for each in caught]
        assert len(texts) == 1, texts
        assert str(blocked / "cache") in texts[0]
        assert texts[0].endswith("; choices are kept in memory, for this process only")
        assert len(kernel.configs_timings) == 2
        assert again.bench_time == 0, "the second tuner finds the choice in memory"
        assert again.best_config == kernel.best_config

    def test_no_gpu_and_no_interpreter(self, tmp_path: Path, fresh_process: Any) -> None:
        script = tmp_path / "no_gpu.py"
        script.write_text(NO_GPU)

        result = fresh_process(
            script, env={"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}, warm=True
        )

        name, _, text = result.stdout.strip().partition(": ")
        assert name == "NoDevice"
        assert text.startswith("Triton finds no GPU (")
        assert text.endswith(
            "Set TRITON_INTERPRET=1 before the kernel is decorated to run it in Triton's "
            "interpreter, or SAFETUNE_MODE=off to turn tuning off."
        )


NO_GPU = """
import torch, triton, triton.language as tl
from safetune import SafetuneError, safetune

@safetune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["N"])
@triton.jit
def kernel(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N), mask=offsets < N)

try:
    kernel[(8,)](torch.zeros(256), 256)
except SafetuneError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.internals
class TestAccepted:
    """What Triton accepts is not an error."""

    @pytest.mark.parametrize("configs", [None, [], ()])
    def test_no_configs(self, device: str, configs: Any) -> None:
        kernel = safetune(configs=configs, key=["N"])(copy_kernel)

        assert kernel.configs == [DEFAULT]
        assert launch(kernel, device, BLOCK=64)

    @pytest.mark.parametrize(
        "key",
        [("N",), (name for name in ["N"]), {"N": 1}.keys(), {"N": None}, {"N"}, ["N", "N"]],
        ids=["tuple", "generator", "keys", "dict", "set", "twice"],
    )
    def test_key_as_any_iterable(self, device: str, key: Any) -> None:
        kernel = safetune(configs=CONFIGS, key=key)(copy_kernel)

        assert kernel.keys == ["N"]
        assert launch(kernel, device)

    @pytest.mark.parametrize("key", [[], ()])
    def test_an_empty_key(self, device: str, key: Any) -> None:
        kernel = safetune(configs=CONFIGS, key=key)(copy_kernel)

        assert launch(kernel, device)
        assert launch(kernel, device)
        assert len(kernel.cache) == 1

    def test_a_config_kwarg_that_is_a_backend_option(self, device: str) -> None:
        configs = [
            triton.Config({"BLOCK": 64, "enable_fp_fusion": fusion}) for fusion in (True, False)
        ]
        kernel = safetune(configs=configs, key=["N"])(copy_kernel)

        assert launch(kernel, device)
        assert len(kernel.configs_timings) == 2

    def test_unknown_key_names_of_a_tuner_of_tritons(self, device: str) -> None:
        """Triton 3.9 raises and 3.6 ignores them; vLLM's KDA kernel had one."""
        tuner = triton.autotune(configs=CONFIGS, key=["N"])(copy_kernel)
        tuner.keys = ["N", "NC"]
        with pytest.warns(PhantomKeyWarning) as caught:
            kernel = safetune(tuner)

        assert [str(each.message) for each in caught] == [
            "safetune: key of copy_kernel has 'NC' (did you mean 'N'?), which is not one of dst, "
            "src, N, BLOCK; ignored"
        ]
        assert isinstance(kernel, Autotuner)
        assert kernel.key_names == ["N"]
        assert kernel.keys == ["N", "NC"]
        assert launch(kernel, device)

    def test_positional_parameters_of_the_decorator(self, device: str) -> None:
        kernel = safetune(CONFIGS, ["N"], None, ["dst"], None)(copy_kernel)

        assert kernel.reset_to_zero == ["dst"]
        assert launch(kernel, device)


class TestReference:
    """A mistake in it is one of the program: trying again later would not cure it."""

    @pytest.mark.parametrize(
        ("reference", "said"),
        [
            (
                lambda a: {"out": a["src"]},
                "returned a value for 'out', which the call does",
            ),
            pytest.param(
                lambda a: {"dts": a["src"]},
                r"returned a value for 'dts' \(did you mean 'dst'\?\)",
                marks=FULL,
            ),
            pytest.param(
                lambda a: {"N": 3},
                "returned 'N', which is not a tensor argument",
                marks=FULL,
            ),
            (lambda a: {"dst": a["src"][:3]}, r"returned a tensor of shape \(3,\) for dst, whose"),
            pytest.param(lambda a: {"dst": "abc"}, "returned a str for dst: ", marks=FULL),
            pytest.param(lambda a: a["src"], r"returned tensor\(", marks=FULL),
            pytest.param(
                lambda a: None, "returned None; it must return a dict of values", marks=FULL
            ),
            (lambda a: a["scr"], "raised KeyError: 'scr'"),
        ],
    )
    def test_a_reference_that_returns_something_else_is_an_error(
        self, device: str, reference: Any, said: str
    ) -> None:
        kernel = safetune(configs=CONFIGS, key=["N"], reference=reference)(copy_kernel)
        with pytest.raises(InvalidSetting, match=f"^reference= of copy_kernel {said}"):
            launch(kernel, device)

    def test_a_right_reference(self, device: str) -> None:
        right = safetune(configs=CONFIGS, key=["N"], reference=lambda a: {"dst": a["src"]})
        assert launch(right(copy_kernel), device)


class TestEnvironment:
    def test_a_misspelt_variable_is_one_warning_with_the_nearest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MOD", "off")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Settings.current()
            Settings.current()
        assert [str(each.message) for each in caught] == [
            "safetune: ignoring unknown setting 'SAFETUNE_MOD' (did you mean 'SAFETUNE_MODE'?)"
        ]

    @pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
    @pytest.mark.parametrize("value", ["abc", "0", "-2", "1.5"])
    def test_a_number_of_processes_that_is_not_one(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        monkeypatch.setenv(name, value)
        with pytest.warns(UserWarning, match=f"{name}='{value}' is not a positive integer"):
            found = Settings.current()
        assert (found.world_size, found.local_world_size) == (1, 1)

    @pytest.mark.parametrize(
        "value", ["NB", "kernel:", ":NB", "kernel:NB;other:M", "a b:NB", "k:1"]
    )
    def test_names_to_keep_that_are_malformed(self, value: str) -> None:
        with pytest.raises(InvalidSetting, match=r"^keep=.* is not a list of kernel:name"):
            install(keep=[value])

    @pytest.mark.parametrize("value", ["my kernel", "a:b", "kernel;other", "lib/kernel"])
    def test_kernels_to_leave_that_are_malformed(
        self, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        monkeypatch.setenv("SAFETUNE_LEAVE", f"fine,{value}")
        with pytest.raises(InvalidSetting, match=f"^SAFETUNE_LEAVE has {value!r}, which is not"):
            Settings.current()

    def test_every_variable_that_is_read_is_known(self) -> None:
        text = Path(settings.__file__).read_text()
        assert set(re.findall(r'"(SAFETUNE_[A-Z_]+)"', text)) <= settings.VARIABLES
