"""Which configs a tuner leaves for one call, with the prune functions that it has now."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import triton.runtime.autotuner as triton_autotuner
from triton.runtime.autotuner import Config

from safetune.compilers import torch_compile
from safetune.launch import call_shape


class PruningTuner(triton_autotuner.Autotuner):  # type: ignore[misc]
    """Triton's tuner; torch finds a prune function of ours on it in place of the user's."""

    @cached_property
    def shapes(self) -> call_shape.CallShapes:
        """The shapes of its calls, which refer to it: no copy has them before it is launched, as
        one is made for each prune and keeps the arguments of the call.
        """
        return call_shape.CallShapes(self)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Config]:
        """Return the configs that `prune_configs_by` leaves, for the arguments in `self.nargs`."""
        stock = triton_autotuner.Autotuner.prune_configs
        early, ranked = copy.copy(self), copy.copy(self)
        early.early_config_prune, ranked.perf_model = self.prune_functions
        early.perf_model, ranked.early_config_prune = None, None
        ranked.configs = stock(early, kwargs)
        # Triton 3.6 takes a fraction of all the configs, and rounds it down to zero.
        if isinstance(ranked.configs_top_k, float) and ranked.configs_top_k <= 1.0:
            ranked.configs_top_k = max(1, int(len(ranked.configs) * ranked.configs_top_k))
        return stock(ranked, kwargs)  # type: ignore[no-any-return]

    @property
    def prune_functions(self) -> tuple[Any, Any]:
        """The user's own, or those that were set instead later, as jax-triton does."""
        early, model = self.pruning
        replaced = self.early_config_prune is not self.shown
        return self.early_config_prune if replaced else early, self.perf_model or model

    def take_pruning(self) -> None:
        """Keep the user's functions for `prune_configs`: torch traces those that it finds here."""
        self.pruning: tuple[Any, Any] = (self.early_config_prune, self.perf_model)
        self.shown: Any = None
        self.early_config_prune: Any = None
        self.perf_model: Any = None
        self.show_one_config()

    def show_one_config(self) -> None:
        """Have torch find a prune function that leaves one config, if there are several."""
        if vars(self).get("shown", self) is not None or self.early_config_prune is not None:
            return
        if len(self.configs) > 1 or any(map(torch_compile.lost_options, self.configs)):
            self.shown = torch_compile.one_config(self, self.pruning[0])
            self.early_config_prune = self.shown

    def pruned_for(self, named: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[Config]:
        """Return the configs that are left for one call; this tuner stays as it is."""
        return call_shape.pruned_configs(self, named, kwargs)

    def warmup(self, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Compile every config left by pruning in this process, as `triton.autotune` does."""
        shape = self.shapes.of(args, kwargs)
        named = call_shape.named_arguments(self.arg_names, args)
        pinned_args, pinned_kwargs = shape.pinned(args, kwargs)
        return [
            self.fn.warmup(*pinned_args, **pinned_kwargs, **config.all_kwargs())
            for config in self.pruned_for(named, kwargs)
        ]
