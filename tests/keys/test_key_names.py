"""What becomes of each name in a key, and what the user is told."""

from __future__ import annotations

import functools
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton

from safetune.errors import InvalidSetting, PhantomKey, PhantomKeyWarning
from safetune.keys.key_names import KeyReport
from safetune.keys.written_key import lenient
from safetune.settings import PhantomPolicy
from tests.keys import phantom_kernels
from tests.keys.classified import classify

Load = Callable[[str], ModuleType]

KERNEL = """
@jit(do_not_specialize=["T", 1])
def kernel(
    x,
    count,
    T,
    D: tl.constexpr,
    NB: tl.constexpr,
    n_hint,
    FLAG: tl.constexpr,
    BLOCK: tl.constexpr,
    T_BUCKET,
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FLAG:
        tl.store(x + offsets * D, T, mask=offsets < count)

def launch(x, n):
    kernel[lambda meta: (triton.cdiv(meta["T"], meta["BLOCK"]),)](x, n)
"""
CONFIGS = [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})]


@pytest.fixture(params=[False, True], ids=["compiler", "interpreter"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    return functools.partial(phantom_kernels.load, tmp_path, interpret=request.param)


@pytest.fixture
def kernel(load: Load) -> Any:
    return load(KERNEL).kernel


def quietly(*args: Any, **kwargs: Any) -> KeyReport:
    """`classify` where the warnings are not the subject."""
    with warnings.catch_warnings(), lenient():
        warnings.simplefilter("ignore", PhantomKeyWarning)
        return classify(*args, **{"configs": CONFIGS, **kwargs})


def kinds(report: KeyReport) -> dict[str, str]:
    return {name.name: name.kind.value for name in report.names}


def test_every_name_has_its_kind(kernel: Any) -> None:
    key = ["D", "absent", "NB", "T_BUCKET", "n_hint", "T"]
    report = quietly(kernel, key, keep=["n_hint"])
    assert kinds(report) == {
        "D": "read",
        "absent": "unknown",
        "NB": "phantom",
        "T_BUCKET": "bucket",
        "n_hint": "kept",
        "T": "read",
    }
    assert report.kept == ("D", "T_BUCKET", "n_hint", "T")
    assert report.dropped == ("absent", "NB")
    assert report.pinned == ("NB",)
    assert not report.kept_all


def test_every_phantom_is_pinned_constexpr_or_not(kernel: Any) -> None:
    assert quietly(kernel, ["D", "NB", "n_hint"]).pinned == ("NB", "n_hint")


@pytest.mark.parametrize(
    "name",
    [
        "T_BUCKET",
        "bucket_t",
        "BucketedT",
        "CACHE_KEY_SEQLEN_Q",
        "cache_key_n",
        "AUTOTUNE_Z",
        "seq_key",
    ],
)
def test_names_of_buckets_are_kept(load: Load, name: str) -> None:
    kernel = load(f"@jit\ndef kernel(x, {name}):\n    tl.store(x, 1)").kernel
    assert kinds(quietly(kernel, ["x", name]))[name] == "bucket"


@pytest.mark.parametrize("name", ["KEY", "keys", "key_len", "MY_CACHE_KEYS", "NB", "CACHE", "TUNE"])
def test_other_unread_names_are_dropped(load: Load, name: str) -> None:
    kernel = load(f"@jit\ndef kernel(x, {name}):\n    tl.store(x, 1)").kernel
    assert kinds(quietly(kernel, ["x", name]))[name] == "phantom"


def test_a_bucket_that_the_body_reads_is_of_kind_read(load: Load) -> None:
    kernel = load("@jit\ndef kernel(x, T_BUCKET):\n    tl.store(x, T_BUCKET)").kernel
    assert kinds(quietly(kernel, ["T_BUCKET"])) == {"T_BUCKET": "read"}


def test_the_reason_names_the_reader(kernel: Any, load: Load) -> None:
    reasons = {name.name: name.reason for name in quietly(kernel, ["D", "T"]).names}
    file = Path(load(KERNEL).kernel.fn.__code__.co_filename).name
    assert reasons["D"] == f"read by the body ({file}:18)"


def test_a_grid_is_a_reader(load: Load) -> None:
    text = """
    @jit
    def kernel(x, n, NB):
        tl.store(x, 1)
    def launch(x, n):
        kernel[(n,)](x, n, 3)
    """
    report = quietly(load(textwrap.dedent(text)).kernel, ["n", "NB"])
    assert kinds(report) == {"n": "read", "NB": "phantom"}
    assert "the grid (" in report.names[0].reason


@pytest.mark.parametrize(
    "readers",
    [
        {"prune_configs_by": {"early_config_prune": lambda configs, named, **kw: named["NB"]}},
        {"prune_configs_by": {"perf_model": lambda NB, **kwargs: NB, "top_k": 1}},
        {"pre_hook": lambda kwargs, reset_only=False: kwargs["NB"]},
        {"post_hook": lambda kwargs, exception: kwargs["NB"]},
        {"configs": [triton.Config({}, pre_hook=lambda nargs: nargs["NB"])]},
        {"pre_hook": print},
    ],
)
def test_callbacks_are_readers(kernel: Any, readers: dict[str, Any]) -> None:
    assert kinds(quietly(kernel, ["D", "NB"], **readers))["NB"] == "read"


def test_heuristics_above_and_below_the_tuner_are_readers(load: Load) -> None:
    text = """
    @triton.heuristics({"EVEN": lambda args: args["NB"] % 2 == 0})
    @jit
    def kernel(x, NB, n, EVEN: tl.constexpr):
        tl.store(x, EVEN)
    """
    heuristics = load(textwrap.dedent(text)).kernel
    for kernel in (heuristics, heuristics.fn):
        assert kinds(quietly(kernel, ["NB", "n"])) == {"NB": "read", "n": "phantom"}


# what the user is told


def messages(*args: Any, **kwargs: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        classify(*args, **{"configs": CONFIGS, **kwargs})
    assert all(item.category is PhantomKeyWarning for item in caught)
    return [str(item.message) for item in caught]


def test_all_phantoms_are_in_one_warning(kernel: Any) -> None:
    (message,) = messages(kernel, ["D", "NB", "n_hint"])
    assert message == (
        "safetune: 'NB', 'n_hint' in key= of kernel are never read, so safetune ignores them: "
        "every new value would be tuned and compiled again. Pass keep=['NB', 'n_hint'] to keep them"
    )


def test_the_warning_points_at_the_kernel(kernel: Any) -> None:
    with pytest.warns(PhantomKeyWarning) as caught:
        classify(kernel, ["D", "NB"], configs=CONFIGS)
    assert (caught[0].filename, caught[0].lineno) == (kernel.fn.__code__.co_filename, 5)


@pytest.mark.parametrize("policy", list(PhantomPolicy))
def test_unknown_names_are_an_error_with_the_nearest_names(
    kernel: Any, policy: PhantomPolicy
) -> None:
    """Misspelt, a name would merge all sizes into one choice."""
    for keep in ([], ["t"]):
        with pytest.raises(InvalidSetting) as caught:
            classify(kernel, ["D", "t", "conut", "else"], configs=[], policy=policy, keep=keep)
        assert str(caught.value).startswith(
            "key of kernel has 't' (did you mean 'T'?), 'conut' (did you mean 'count'?), 'else', "
            "which is not one of x, count, T, D, NB,"
        )


def test_an_unknown_name_in_prune_configs_by_is_an_error(kernel: Any) -> None:
    """Its function would never be called."""
    with pytest.raises(InvalidSetting) as caught:
        classify(kernel, ["D"], configs=[], prune_configs_by={"early_prune": lambda c, n: c})
    assert str(caught.value) == (
        "prune_configs_by of kernel has 'early_prune' (did you mean 'early_config_prune'?), which "
        "is not one of early_config_prune, perf_model, top_k"
    )


def test_a_key_without_phantoms_has_no_warning(kernel: Any) -> None:
    assert messages(kernel, ["D", "T", "T_BUCKET", "n_hint"], keep=["n_hint"]) == []
    assert messages(kernel, []) == []


def test_the_policy_keep_keeps_every_phantom(kernel: Any) -> None:
    assert messages(kernel, ["D", "NB"], policy=PhantomPolicy.KEEP) == []
    report = classify(kernel, ["D", "NB"], configs=CONFIGS, policy=PhantomPolicy.KEEP)
    assert (report.kept, report.pinned) == (("D", "NB"), ())


def test_the_policy_error_raises_for_a_phantom(kernel: Any) -> None:
    with pytest.raises(PhantomKey, match=r"\.py:5: 'NB' in key= of kernel is never read"):
        classify(kernel, ["D", "NB"], configs=CONFIGS, policy=PhantomPolicy.ERROR)
    quiet = classify(kernel, ["D", "NB"], configs=CONFIGS, policy=PhantomPolicy.ERROR, keep=["NB"])
    assert quiet.kept == ("D", "NB")


@pytest.mark.parametrize("policy", [PhantomPolicy.DROP, PhantomPolicy.ERROR])
@pytest.mark.parametrize("more", [[], ["absent"]])
def test_phantoms_are_kept_if_no_other_name_is_left(
    kernel: Any, policy: PhantomPolicy, more: list[str]
) -> None:
    """One choice for every shape is worse than tuning too often."""
    report = quietly(kernel, ["NB", "n_hint", *more], policy=policy)
    assert report.kept == ("NB", "n_hint")
    assert (report.kept_all, report.pinned, report.dropped) == (True, (), tuple(more))
    last = messages(kernel, ["NB", "n_hint"], policy=policy)[-1]
    assert last.endswith("safetune keeps them, because no other name would be left")


def test_only_unknown_names_are_not_kept(kernel: Any) -> None:
    """Triton 3.9 raises for them in its own constructor, 3.6 does not."""
    report = quietly(kernel, ["absent"])
    assert (report.kept, report.kept_all) == ((), False)


# What a key lacks


def test_a_key_does_not_lack_what_heuristics_set(load: Load) -> None:
    text = """
    @triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
    @jit
    def kernel(x, n, unread, EVEN: tl.constexpr):
        tl.store(x, EVEN)
    """
    assert quietly(load(textwrap.dedent(text)).kernel, ["n"]).missing == ()


def test_constexprs_that_the_key_lacks_are_in_the_report(kernel: Any) -> None:
    report = quietly(kernel, ["D"])
    assert report.missing == ("FLAG",)
    assert str(report).endswith("read, and not in the key: FLAG")
    assert quietly(kernel, ["D", "FLAG"]).missing == ()


@pytest.mark.parametrize(
    "annotation", ["tl.constexpr", "'tl.constexpr'", "constexpr", '"constexpr"']
)
def test_every_spelling_of_constexpr_is_recognised(load: Load, annotation: str) -> None:
    text = (
        f"from triton.language import constexpr\n@jit\ndef kernel(x, N: {annotation}):\n    x + N"
    )
    assert quietly(load(text).kernel, []).missing == ("N",)


# bad input


@pytest.mark.parametrize("key", ["D", "x, D", ""])
def test_a_key_of_one_string_is_an_error(kernel: Any, key: str) -> None:
    with pytest.raises(
        InvalidSetting, match=rf"key='{key}' is one string; write key=\[\"{key}\"\]"
    ):
        classify(kernel, key, configs=CONFIGS)


def test_keep_of_one_string_is_an_error(kernel: Any) -> None:
    with pytest.raises(InvalidSetting, match=r'keep=\["NB"\]'):
        classify(kernel, ["NB"], configs=CONFIGS, keep="NB")


def test_a_name_of_another_type_is_an_error(kernel: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"key contains 3, of type int; give argument names"):
        classify(kernel, ["D", 3], configs=CONFIGS)


def test_a_kept_name_outside_the_key_is_an_error(kernel: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"has 'NB', 'n_hint', which is not in key=\['D'\]"):
        classify(kernel, ["D"], configs=CONFIGS, keep=["NB", "n_hint"])


@pytest.mark.parametrize("kind", [tuple, iter, dict.fromkeys, lambda names: [*names, "D"]])
def test_any_iterable_of_names_is_accepted(kernel: Any, kind: Callable[[list[str]], Any]) -> None:
    assert classify(kernel, kind(["D", "FLAG"]), configs=CONFIGS).kept == ("D", "FLAG")


def test_a_key_of_none_is_empty(kernel: Any) -> None:
    assert classify(kernel, None, configs=CONFIGS).kept == ()


def test_the_report_prints_every_name_with_its_reason(kernel: Any) -> None:
    text = str(quietly(kernel, ["D", "absent", "NB", "T_BUCKET"]))
    file = kernel.fn.__code__.co_filename
    assert text == (
        f"kernel ({file}:5)\n"
        f"  D         read     read by the body ({Path(file).name}:18)\n"
        "  absent    unknown  not a parameter of the kernel; dropped\n"
        "  NB        phantom  nothing reads it; dropped\n"
        "  T_BUCKET  bucket   nothing reads it; named like a bucket\n"
        "  read, and not in the key: FLAG"
    )
    assert "every call shares one choice" in str(quietly(kernel, []))


def test_equal_reports_are_equal(kernel: Any) -> None:
    first, second = quietly(kernel, ["D", "NB"]), quietly(kernel, ["D", "NB"])
    assert first == second
    assert first.unread == ("NB",)


@pytest.mark.internals
def test_missing_source_keeps_everything() -> None:
    scope: dict[str, Any] = {}
    exec("def kernel(x, NB):\n    pass\n", scope)
    jit = phantom_kernels.jit_decorator(interpret=True)(scope["kernel"])
    report = classify(jit, ["NB"], configs=[])
    assert report.kept == ("NB",)
    assert "source is missing" in report.names[0].reason


@pytest.mark.internals
def test_unknown_names_never_reach_triton(kernel: Any) -> None:
    """C5: 3.9 raises for them, 3.6 ignores them; filtered, both accept what is left."""
    report = quietly(kernel, ["D", "absent"])
    tuner = triton.autotune(configs=CONFIGS, key=list(report.kept))(kernel)
    assert list(tuner.keys) == ["D"]
