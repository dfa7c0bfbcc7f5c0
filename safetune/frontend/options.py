"""The arguments of `@safetune`: names for the decorator, the tuner, and adopted Triton tuners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any

from safetune.keys.identity import is_interpreted
from safetune.keys.written_key import Key
from safetune.tuning.requests import Limits

if TYPE_CHECKING:
    from safetune.tuning.search import Proposer


@dataclass(frozen=True, repr=False)
class Options:
    """The parameters of `safetune`. `triton.autotune` also has those before `phantom`."""

    configs: Any = None
    key: Key = ()
    prune_configs_by: dict[str, Any] | None = None
    reset_to_zero: Iterable[str] | None = None
    restore_value: Iterable[str] | None = None
    pre_hook: Callable[..., object] | None = None
    post_hook: Callable[..., object] | None = None
    warmup: int | None = None
    rep: int | None = None
    use_cuda_graph: bool = False
    do_bench: Callable[..., Any] | None = None
    cache_results: bool = False
    _: KW_ONLY
    phantom: str | None = None
    keep: Iterable[str] = ()
    isolation: str = "worker"
    compile_timeout_s: float = Limits.compile_timeout_s
    run_timeout_s: float = Limits.run_timeout_s
    scratch: Iterable[str] = ()
    reference: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    inputs: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    on_miss: str | None = None
    measure: str | None = None
    same_bits: bool | None = None
    budget: int | str | None = None
    proposer: Proposer | None = None

    @classmethod
    def of(cls, tuner: Any) -> Options:
        """Return the options of a Triton tuner."""
        deprecated = tuner.use_cuda_graph or tuner.num_warmups or tuner.num_reps
        return cls(
            tuner.configs,
            tuner.keys,
            reset_to_zero=tuner.reset_to_zero,
            restore_value=tuner.restore_value,
            pre_hook=tuner.pre_hook if tuner.user_defined_pre_hook else None,
            post_hook=tuner.post_hook if tuner.user_defined_post_hook else None,
            prune_configs_by={
                "perf_model": tuner.perf_model,
                "top_k": tuner.configs_top_k,
                "early_config_prune": tuner.early_config_prune,
            },
            do_bench=None if deprecated and is_interpreted(tuner.fn) else tuner._do_bench,
        )

    def of_triton(self) -> dict[str, Any]:
        """Return the constructor arguments of Triton's tuner, without the configs and the key."""
        names = [option.name for option in fields(self)[2:] if not option.kw_only]
        return {name: getattr(self, name) for name in names}


Options.__init__.__qualname__ = "safetune"  # the name in a TypeError
