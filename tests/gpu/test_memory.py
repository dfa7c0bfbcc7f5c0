"""First calls on a card that the caller has nearly filled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from safetune import safetune

pytestmark = pytest.mark.gpu

N = 1 << 16
#: Less than a context takes.
TOO_LITTLE = 128 << 20


def _fill(device: str, left: int) -> torch.Tensor | None:
    """Take all of the card's memory but `left` bytes."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    size = torch.cuda.mem_get_info()[0] - left
    return torch.empty(max(0, size), dtype=torch.uint8, device=device)


@pytest.mark.fault("card-nearly-full")
@pytest.mark.parametrize("left", ["a twentieth", "too little"])
def test_tuned_in_what_is_left_or_not_at_all(
    kernels: Any,
    device: str,
    trials: Callable[[], list[Any]],
    choices: Callable[[], list[Any]],
    children_end: Callable[[float], list[int]],
    context_answers: Callable[[], None],
    left: str,
) -> None:
    """No config is blamed; when the memory is free again, the next key is tuned."""
    configs = [triton.Config({"BLOCK": block}) for block in (256, 512, 1024)]
    kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
    x, y = (torch.randn(N, device=device) for _ in range(2))

    def call(n: int) -> list[str]:
        out = torch.zeros(n, device=device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
        assert torch.equal(out, x[:n] + y[:n])
        texts = [str(warning.message) for warning in caught]
        return [text for text in texts if "is not tuned" in text]

    assert children_end(3.0) == []  # those of an earlier test, and what they hold
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else 0
    held = _fill(device, total // 20 if left == "a twentieth" else TOO_LITTLE)
    told = call(N)
    verdicts = {trial.verdict for trial in trials()}
    if told:
        (text,) = told
        assert "memory" in text
        assert verdicts <= {"no_memory"}
        assert choices() == []
        assert kernel.best_config is kernel.configs[0]
    else:
        assert verdicts == {"ok"}
        assert len(choices()) == 1
        assert left == "a twentieth" or device == "cpu"
    context_answers()

    del held
    if device == "cuda":
        torch.cuda.empty_cache()
    before = len(trials())
    assert call(N // 2) == []
    assert [trial.verdict for trial in trials()[before:]] == ["ok"] * len(configs)
    context_answers()
