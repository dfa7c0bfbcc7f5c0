"""A config runs on the card that its tensors are on; where none may run, the fallback does."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from safetune import safetune
from safetune.both import backend, cuda, cuda_driver

pytestmark = pytest.mark.gpu

N = 1 << 16
NOWHERE = "GPU-00000000-0000-0000-0000-000000000000"

Report = Callable[..., dict[str, Any]]


@pytest.fixture
def report(fresh_process: Any, scripts: Path) -> Report:
    """A function that tunes in a fresh process, under a CUDA_VISIBLE_DEVICES, and returns what it
    reports: for each device, its card, whether the result was right, and the cards of all trials.
    """

    def run(visible: str | None, then: str, where: str, *indices: int) -> dict[str, Any]:
        env = {"CUDA_VISIBLE_DEVICES": visible}
        result = fresh_process(scripts / "tune_on_device.py", then, where, *indices, env=env)
        return json.loads(result.stdout.splitlines()[-1])

    return run


def _uuid() -> str:
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("index", marks=pytest.mark.fault("visible-by-index")),
        pytest.param("uuid", marks=pytest.mark.fault("visible-by-uuid")),
        pytest.param("prefix", marks=pytest.mark.fault("visible-by-uuid")),
        pytest.param("unset", marks=pytest.mark.fault("visible-by-index")),
    ],
)
def test_the_child_sees_the_same_card(report: Report, form: str) -> None:
    visible = {"index": "0", "uuid": _uuid(), "prefix": _uuid()[:12], "unset": None}[form]
    seen = report(visible, "keep", "current", 0)
    assert seen["right"] == [True]
    assert seen["warnings"] == []
    assert seen["trials"] == [seen["uuids"] * 2]


@pytest.mark.fault("visible-by-index")
@pytest.mark.fault("visible-by-uuid")
@pytest.mark.parametrize("then", ["", "7", NOWHERE], ids=["empty", "index", "uuid"])
def test_variables_set_after_torch_has_listed_its_devices_change_nothing(
    report: Report, then: str
) -> None:
    """A model's launcher does this: this process keeps its cards, and a child would have none."""
    seen = report(None, then, "current", 0)
    assert seen["right"] == [True]
    assert seen["warnings"] == []
    assert seen["trials"] == [seen["uuids"] * 2]


@pytest.mark.two_gpus
class TestTwoCards:
    @pytest.mark.fault("other-device")
    @pytest.mark.parametrize("where", ["current", "other"])
    def test_tuned_on_the_tensors_card(self, report: Report, where: str) -> None:
        """Whichever is current: Triton launches there, and can where the cards see each other."""
        seen = report("0,1", "keep", where, 1)
        assert seen["right"] == [True]
        assert seen["warnings"] == []
        assert seen["trials"] == [seen["uuids"] * 2]

    @pytest.mark.fault("visible-by-index")
    @pytest.mark.parametrize("then", ["keep", "0", "0,1"])
    def test_in_another_order(self, report: Report, then: str) -> None:
        """An index means the same card in the child, also where the variable was turned since."""
        seen = report("1,0", then, "current", 1)
        assert seen["right"] == [True]
        assert seen["warnings"] == []
        assert seen["trials"] == [seen["uuids"] * 2]

    @pytest.mark.fault("two-unlike-devices")
    def test_one_choice_for_cards_of_a_kind_and_two_for_unlike_ones(self, report: Report) -> None:
        seen = report("0,1", "keep", "current", 0, 1)
        assert seen["right"] == [True, True]
        first, second = seen["uuids"]
        unlike = len({*seen["names"]}) == 2
        assert seen["trials"] == [[first] * 2, [first] * 2 + [second] * 2 * unlike]


@contextmanager
def _compute_mode(value: int) -> Iterator[None]:
    """Have the driver answer this, and the truth to all else."""

    class OneMode(cuda.Cuda):
        def compute_mode(self, index: int) -> cuda.ComputeMode:
            return cuda.ComputeMode(value)

    backend.register("cuda", OneMode(cuda_driver.load()))
    try:
        yield
    finally:
        backend.unregister("cuda")


@contextmanager
def _mps(directory: Path) -> Iterator[None]:
    """A control pipe where a server of MPS would have one, and that is read as by its daemon."""
    os.mkfifo(directory / "control")
    daemon = os.open(directory / "control", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(directory))
            yield
    finally:
        os.close(daemon)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        pytest.param(
            "exclusive", "EXCLUSIVE_PROCESS", marks=pytest.mark.fault("exclusive-process")
        ),
        pytest.param("mps", "control pipe", marks=pytest.mark.fault("mps")),
    ],
)
def test_a_card_that_no_child_may_use(
    kernels: Any,
    device: str,
    trials: Callable[[], list[Any]],
    choices: Callable[[], list[Any]],
    children_end: Callable[[float], list[int]],
    context_answers: Callable[[], None],
    tmp_path: Path,
    what: str,
    says: str,
) -> None:
    """One warning for a key, the fallback, a right result, and no process; then it tunes again."""
    configs = [triton.Config({"BLOCK": block}) for block in (256, 1024)]
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

    assert children_end(3.0) == []  # those of an earlier test
    with _compute_mode(3) if what == "exclusive" else _mps(tmp_path):
        (text,) = call(N)
        assert says in text
        assert "safetune tune" in text
        assert call(N) == []
    assert kernel.best_config is kernel.configs[0]
    assert trials() == choices() == []
    assert children_end(0.0) == []
    context_answers()

    assert call(N // 2) == []
    assert [trial.verdict for trial in trials()] == ["ok", "ok"]
