"""What Inductor keeps of a config, and what it would lose without a word."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune.config import config_text
from safetune.errors import TracingError

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner

#: What is kept besides its keyword arguments.
_CARRIED = ("num_warps", "num_stages")


def not_carried(config: Config) -> dict[str, Any]:
    """Return the launch options of a config that Inductor would lose without a word."""
    default = Config({}).all_kwargs()
    return {
        name: value
        for name, value in config.all_kwargs().items()
        if name not in config.kwargs and name not in _CARRIED and value != default.get(name)
    }


def portable(tuner: Autotuner, order: Sequence[Config]) -> tuple[int, ...]:
    """Return the places of the configs that are kept whole; warns where that is not the first.

    Raises:
        TracingError: there is none.
    """
    kept = [config for config in order if not not_carried(config)]
    lost = not_carried(order[0])
    if lost:
        name = tuner.base_fn.__name__
        told = f"torch.compile loses {lost} of {name}'s config {config_text(order[0])}"
        if not kept:
            raise TracingError(
                f"{told}, and no other config is without such options: add one, or wrap the launch "
                "in a torch.library.custom_op, which torch.compile leaves alone"
            )
        warnings.warn(f"{told}: {config_text(kept[0])} is compiled instead", stacklevel=2)
    places = {id(config): place for place, config in enumerate(tuner.configs)}
    return tuple(places[id(config)] for config in kept)
