"""A config's options are Triton's, and people are shown those that matter."""

from __future__ import annotations

import inspect

import pytest
import triton

from safetune.config import OPTION_DEFAULTS, config_text, shown_options
from safetune.lint.names import POSITIONS


@pytest.mark.internals
def test_the_options_and_their_defaults_are_tritons() -> None:
    parameters = inspect.signature(triton.Config).parameters
    assert tuple(parameters) == POSITIONS
    options = [name for name in POSITIONS if name not in ("kwargs", "pre_hook")]
    assert [(name, parameters[name].default) for name in options] == [*OPTION_DEFAULTS.items()]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (triton.Config({}), "num_warps=4 num_stages=3"),
        (
            triton.Config({"B": 1, "A": 2}, num_ctas=2),
            "A=2 B=1 num_warps=4 num_stages=3 num_ctas=2",
        ),
        (
            triton.Config({}, 8, 1, maxnreg=64, ir_override="kernel.ttgir"),
            "num_warps=8 num_stages=1 maxnreg=64 ir_override=kernel.ttgir",
        ),
    ],
)
def test_warps_and_stages_are_always_shown_and_other_options_if_they_are_set(
    config: triton.Config, text: str
) -> None:
    assert config_text(config) == text


def test_an_option_that_a_stored_config_lacks_is_not_shown() -> None:
    assert shown_options({"num_ctas": 1, "num_stages": 3}) == {"num_stages": 3}
