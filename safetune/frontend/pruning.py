"""Which configs `prune_configs_by` leaves for a call."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import triton.runtime.autotuner as triton_autotuner
from triton.runtime.autotuner import Config

from safetune.compilers import torch_compile

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner


def show_one_config(tuner: Autotuner) -> Autotuner:
    """Keep the user's functions for `prune`, and let torch, which traces them, find one config."""
    tuner.pruning = (tuner.early_config_prune, tuner.perf_model)
    tuner.shown = tuner.early_config_prune = tuner.perf_model = None
    show_one_of_several(tuner)
    return tuner


def show_one_of_several(tuner: Autotuner) -> None:
    """As above, where there was nothing to choose from before the configs were replaced."""
    if vars(tuner).get("shown", tuner) is not None or tuner.early_config_prune is not None:
        return
    if len(tuner.configs) > 1 or any(map(torch_compile.lost_options, tuner.configs)):
        tuner.shown = tuner.early_config_prune = torch_compile.one_config(tuner)


def prune(tuner: Autotuner, kwargs: dict[str, Any]) -> list[Config]:
    """Return the configs that are left, for the arguments in `tuner.nargs`."""
    stock = triton_autotuner.Autotuner.prune_configs
    if tuner.early_config_prune is not tuner.shown:  # replaced, as jax-triton does
        return stock(tuner, kwargs)
    early, ranked = copy.copy(tuner), copy.copy(tuner)
    early.early_config_prune, ranked.perf_model = tuner.pruning
    early.perf_model, ranked.early_config_prune = None, None
    ranked.configs = stock(early, kwargs)
    # Triton 3.6 takes a fraction of all the configs, and rounds it down to nothing.
    if isinstance(ranked.configs_top_k, float) and ranked.configs_top_k <= 1.0:
        ranked.configs_top_k = max(1, int(len(ranked.configs) * ranked.configs_top_k))
    return stock(ranked, kwargs)
