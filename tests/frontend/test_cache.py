"""`kernel.cache` and the other attributes have what those of Triton's tuner have.

Programs read the first parts of its keys, write them to files as JSON or text, and put them back.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl

import safetune
from safetune.errors import InvalidConfig, InvalidSetting
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]
OTHER = triton.Config({"BLOCK": 64}, num_warps=2)

pytestmark = pytest.mark.filterwarnings("ignore::safetune.errors.PhantomKeyWarning")


@triton.jit
def add_kernel(x, y, n, NB, KIND: tl.constexpr = 0, BLOCK: tl.constexpr = 16):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x + offsets, mask=mask).to(tl.float32)
    if KIND == 1:
        value += 1
    tl.store(y + offsets, value, mask=mask)


@triton.jit
def plain_kernel(x, y, n, UNREAD, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y + offsets, tl.load(x + offsets, mask=mask), mask=mask)


def clock(launch: Callable[[], object], quantiles: Any) -> list[float]:
    launch()
    return [1.0, 1.0, 1.0]


def triton_s(key: Any, **options: Any) -> Any:
    return triton.autotune(CONFIGS, [*key], do_bench=clock, **options)(add_kernel)


def ours(key: Any, **options: Any) -> Any:
    return safetune.safetune(CONFIGS, key, **options)(add_kernel)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


X, HALF, Y = torch.arange(64.0), torch.arange(64.0).half(), torch.zeros(64)
Point = namedtuple("Point", "x y")
ONE = {"early_config_prune": lambda configs, named, **kwargs: configs[1:]}

CALLS: dict[str, tuple[list[str], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "values and dtypes": (["n", "NB"], [((X, Y, 64, 3), {})]),
    "the order of key": (["NB", "n"], [((HALF, Y, 64, 3), {})]),
    "by keyword": (["n"], [((), {"NB": 2, "y": Y, "n": 64, "x": HALF})]),
    "a name with a default": (["n", "KIND"], [((X, Y, 64, 3), {"KIND": 1})]),
    "a name that is left out": (["n", "KIND"], [((X, Y, 64, 3), {})]),
    "several keys": (
        ["n", "KIND"],
        [((X, Y, n, 3), {"KIND": k}) for n in (60, 64) for k in (0, 1)],
    ),
    "other types": (["KIND"], [((X, Y, 64, 3), {"KIND": k}) for k in ("text", None, 0.5, (1, 2))]),
    "classes of tuples": (
        ["KIND"],
        [((X, Y, 64, 3), {"KIND": k}) for k in (Point(1, 2), (Point(3, (4, "a")), 5))],
    ),
    "a dtype": (["KIND"], [((X, Y, 64, 3), {"KIND": tl.float16})]),
    "an option of the launch": (["n"], [((X, Y, 64, 3), {"num_ctas": 1})]),
    "no names": ([], [((HALF, Y, 64, 3), {})]),
}


@pytest.mark.parametrize("kind", [kind for kind in CALLS if "option" not in kind])
def test_the_keys_are_tritons(kind: str) -> None:
    names, calls = CALLS[kind]
    both = triton_s(names, prune_configs_by=ONE), ours(names, prune_configs_by=ONE)
    for args, kwargs in calls:
        for kernel in both:
            kernel[grid](*args, **kwargs)
    stock, kernel = both
    assert list(kernel.cache) == list(stock.cache)
    assert [*map(str, kernel.cache)] == [*map(str, stock.cache)]
    assert dict(kernel.cache) == stock.cache
    assert kernel.keys == stock.keys


def test_values_of_a_dropped_name_are_one_entry_under_the_first() -> None:
    kernel = safetune.safetune(CONFIGS, ["n", "UNREAD"], prune_configs_by=ONE)(plain_kernel)
    for nb in range(5, 44):
        kernel[grid](X, Y, 64, nb)
    key = (64, 5, "torch.float32", "torch.float32")
    assert list(kernel.cache) == [key]
    for nb in (5, 43, 1000):
        other = (64, nb, *key[2:])
        assert other in kernel.cache
        assert kernel.cache[other] is kernel.cache.get(other) is CONFIGS[1]
    for other in [(65, *key[1:]), (64, 5, "torch.float16", key[3]), key[:3], (*key, 1), 64, "text"]:
        assert other not in kernel.cache
        assert kernel.cache.get(other) is None
        with pytest.raises(KeyError):
            kernel.cache[other]


def test_a_write_for_one_value_of_a_dropped_name_is_for_all() -> None:
    kernel = safetune.safetune(CONFIGS, ["UNREAD", "n"])(plain_kernel)
    kernel.cache[(9, 64, *FLOATS)] = OTHER
    assert kernel.cache[(8, 64, *FLOATS)] is OTHER, "before any call, too"
    for nb in (3, 4, 9):
        kernel[grid](X, Y, 64, nb)
        assert kernel.best_config is OTHER
    assert list(kernel.cache) == [(3, 64, *FLOATS)]
    del kernel.cache[(1, 64, *FLOATS)]
    assert kernel.cache == {}
    kernel[grid](X, Y, 64, 9)
    assert kernel.best_config is not OTHER


class Scale:
    def __init__(self, by: int) -> None:
        self.by = by

    def of(self, value: Any) -> Any:
        return value * self.by


@pytest.mark.parametrize(
    "made",
    [
        lambda by: lambda value: value * by,
        lambda by: functools.partial(max, by),
        lambda by: Scale(by).of,
        Scale,
        lambda by: (1, (Scale(by), "a")),
    ],
    ids=["lambda", "partial", "method", "object", "in a tuple"],
)
def test_values_of_one_identity_are_one_entry_found_by_each(made: Callable[[int], Any]) -> None:
    """The second lambda of one text launched the choice, and `get` had None for its key."""
    kernel = ours(["n", "KIND"], prune_configs_by=ONE)
    one, same, other = made(2), made(2), made(3)
    for kind in (one, same):
        launched(kernel, 64, 3, kind)
    assert len(kernel.cache) == 1
    for kind in (one, same, made(2)):
        assert kernel.cache.get((64, kind, *FLOATS)) is CONFIGS[1]
    assert (64, other, *FLOATS) not in kernel.cache
    kernel.cache[(64, other, *FLOATS)] = OTHER
    assert launched(kernel, 64, 3, made(3)) is OTHER
    assert launched(kernel, 64, 3, same) is CONFIGS[1]


def test_a_tensor_in_the_key_is_not_kept() -> None:
    kernel = ours(["x", "n"], keep=["x"], prune_configs_by=ONE)
    kernel[grid](X, Y, 64, 1)
    assert list(kernel.cache) == [("torch.float32", 64, "torch.float32", "torch.float32")]
    assert kernel.cache[X, 64, "torch.float32", "torch.float32"] is CONFIGS[1]


FLOATS = ("torch.float32", "torch.float32")

#: What is written, and two calls that it is for.
WRITES: dict[str, tuple[Any, Any, list[tuple[int, int, Any]]]] = {
    "Triton's key": (["n", "KIND"], (64, 1, *FLOATS), [(64, 3, 1), (64, 4, 1)]),
    "a bucket": ({"n": triton.next_power_of_2}, (50, *FLOATS), [(64, 3, 0), (40, 3, 0)]),
    "the bucket itself": ({"n": triton.next_power_of_2}, (64, *FLOATS), [(33, 3, 0), (64, 3, 0)]),
    "equal values of other types": (
        ["n", "KIND"],
        (64.0, True, *FLOATS),
        [(64, 3, 1), (64, 3, 1.0)],
    ),
    "a tuple as a list": (
        ["n", "KIND"],
        (64, [1, [2]], *FLOATS),
        [(64, 3, (1, (2,))), (64, 3, (1, (2,)))],
    ),
    "a dtype as text": (["KIND"], ("fp16", *FLOATS), [(64, 3, tl.float16), (60, 3, tl.float16)]),
}
WAYS: dict[str, Callable[[Any, Any], None]] = {
    "item": lambda kernel, key: kernel.cache.__setitem__(key, OTHER),
    "update": lambda kernel, key: kernel.cache.update([(key, OTHER)]),
    "setdefault": lambda kernel, key: kernel.cache.setdefault(key, OTHER) and None,
    "|=": lambda kernel, key: kernel.cache.__ior__([(key, OTHER)]) and None,
}


def launched(kernel: Any, n: int, nb: int, kind: Any) -> triton.Config:
    out = torch.zeros(64)
    kernel[grid](X, out, n, nb, kind)
    assert torch.equal(out[:n], X[:n] + (kind == 1))
    return kernel.best_config


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_is_launched(what: str, way: str) -> None:
    """Untimed, though it is in no list; and nothing of it is stored."""
    key, written, calls = WRITES[what]
    kernel = ours(key)
    WAYS[way](kernel, written)
    assert [launched(kernel, *call) for call in calls] == [OTHER] * 2
    assert not hasattr(kernel, "configs_timings")
    assert open_lookup(Settings.current()).store.choices() == []
    assert len(kernel.cache) == 1
    assert kernel.cache[written] is OTHER
    del kernel.cache[written]
    assert kernel.cache == {}


@pytest.mark.parametrize("mode", ["off", "frozen", "record", "background", "tune"])
def test_in_every_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", mode)
    kernel = ours(["n"])
    kernel.cache = {(64, *FLOATS): OTHER}
    assert launched(kernel, 64, 1, 0) is OTHER
    kernel.cache[(64, *FLOATS)] = CONFIGS[1]
    assert launched(kernel, 64, 1, 0) is CONFIGS[1]
    assert kernel.cache == {(64, *FLOATS): CONFIGS[1]}
    assert kernel.resolve(X, Y, 64, 1).provenance == "written"


def test_after_a_tuning_and_back() -> None:
    kernel = ours(["n"])
    chosen = launched(kernel, 64, 1, 0)
    kernel.cache[(64, *FLOATS)] = OTHER
    assert launched(kernel, 64, 1, 0) is OTHER
    safetune.sync()
    assert launched(kernel, 64, 1, 0) is OTHER
    (stored,) = open_lookup(Settings.current()).store.choices()
    del kernel.cache[(64, *FLOATS)]
    assert launched(kernel, 64, 1, 0) is chosen
    assert open_lookup(Settings.current()).store.choices() == [stored]


def test_a_cache_that_is_swapped_and_put_back() -> None:
    """As benchmarks of one config do: what the program had written was lost."""
    kernel = ours(["n"])
    kernel.cache[(64, *FLOATS)] = OTHER
    saved = kernel.cache
    kernel.cache = {(64, *FLOATS): CONFIGS[1]}
    assert launched(kernel, 64, 1, 0) is CONFIGS[1]
    kernel.cache = saved
    assert launched(kernel, 64, 1, 0) is OTHER


def test_a_cache_that_was_replaced_is_a_dictionary_of_its_own() -> None:
    """What a program did with it was done to the new one."""
    kernel = ours(["n"])
    kernel.cache[(64, *FLOATS)] = OTHER
    former = kernel.cache
    kernel.cache = {(64, *FLOATS): CONFIGS[1]}
    assert pickle.loads(pickle.dumps(former)) == former == {(64, *FLOATS): OTHER}
    former.clear()
    assert (former, dict(kernel.cache)) == ({}, {(64, *FLOATS): CONFIGS[1]})


def test_a_copy_with_a_cache_of_its_own() -> None:
    """Recorders of launches make one: its cache was also the original's."""
    kernel = ours(["n"])
    kernel.cache[(64, *FLOATS)] = OTHER
    copied = copy.copy(kernel)
    assert launched(copied, 64, 1, 0) is OTHER
    copied.cache = {(64, *FLOATS): CONFIGS[1]}
    assert launched(copied, 64, 1, 0) is CONFIGS[1]
    assert launched(kernel, 64, 1, 0) is OTHER


def test_a_config_that_cannot_be_launched_is_an_error_as_under_triton() -> None:
    kernel = ours(["n"])
    kernel.cache[(64, *FLOATS)] = triton.Config({"BLOCK": 48})
    with pytest.raises(Exception, match="power of 2"):
        launched(kernel, 64, 1, 0)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_a_copy_of_the_cache_is_plain(copied: Any) -> None:
    kernel = ours(["n"], prune_configs_by=ONE)
    launched(kernel, 64, 1, 0)
    found = copied(kernel.cache)
    assert type(found) is dict
    assert list(found) == [(64, *FLOATS)]


PROGRAM = """
import ast, json, pickle, sys
import torch, triton, triton.language as tl
import safetune

@safetune.safetune([triton.Config({"BLOCK": b}) for b in (16, 32)], ["n", "NB", "KIND"])
@triton.jit
def add_kernel(x, n, NB, KIND: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < n) + KIND[0], mask=offsets < n)

def launch(nb, n=50):
    x = torch.zeros(50)
    add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n, nb, (2, 3))
    assert (x == 2).all()
"""
LOADS = {
    "JSON": "[(tuple(key), config) for key, config in json.load(open('table'))]",
    "text": "[(ast.literal_eval(key), c) for key, c in json.load(open('texts')).items()]",
    "pickle": "pickle.load(open('pickle', 'rb')).items()",
}


@pytest.mark.parametrize(
    "how", ["pickle", *(pytest.param(how, marks=pytest.mark.full) for how in ("JSON", "text"))]
)
def test_a_table_that_a_program_saves_is_used_by_the_next(
    how: str, fresh_process: FreshProcess, tmp_path: Path
) -> None:
    save = (
        "launch(7)\n"
        "table = [[list(key), {'BLOCK': 64}] for key in add_kernel.cache]\n"
        "json.dump(table, open('table', 'w'))\n"
        "json.dump({str(key): {'BLOCK': 64} for key in add_kernel.cache}, open('texts', 'w'))\n"
        "pickle.dump({key: {'BLOCK': 64} for key in add_kernel.cache}, open('pickle', 'wb'))\n"
        "print(*add_kernel.cache)\n"
    )
    (program := tmp_path / "program.py").write_text(PROGRAM + save)
    done = fresh_process(program, cwd=tmp_path, warm=True)
    assert done.stdout == "(50, 7, (2, 3), 'torch.float32')\n", done.stderr
    load = (
        f"for key, config in {LOADS[how]}:\n"
        "    add_kernel.cache[key] = triton.Config(config)\n"
        "launch(8)\n"
        "print(add_kernel.best_config.kwargs['BLOCK'], hasattr(add_kernel, 'bench_time'))\n"
        "print(*add_kernel.cache)\n"
    )
    program.write_text(PROGRAM + load)
    for mode in ("frozen", "tune"):
        env = {"SAFETUNE_MODE": mode, "SAFETUNE_CACHE_DIR": str(tmp_path / "another")}
        done = fresh_process(program, cwd=tmp_path, env=env, warm=True)
        assert done.stdout == "64 False\n(50, 8, (2, 3), 'torch.float32')\n", done.stderr


class TestKeys:
    @pytest.mark.parametrize(
        "change",
        [
            lambda keys: keys.append("KIND"),
            lambda keys: keys.extend(["KIND"]),
            lambda keys: keys.insert(0, "KIND"),
            lambda keys: keys.__setitem__(slice(None), ["KIND", "n"]),
            lambda keys: keys.__iadd__(["KIND"]),
        ],
        ids=["append", "extend", "insert", "slice", "+="],
    )
    def test_a_change_in_place_counts(self, change: Callable[[Any], Any]) -> None:
        kernel = ours(["n"], prune_configs_by=ONE)
        stock = triton_s(["n"], prune_configs_by=ONE)
        for each in (kernel, stock):
            for kind in (0, 1):
                launched(each, 64, 1, kind)
            assert len(each.cache) == 1
            change(each.keys)
            each.cache.clear()
            for kind in (0, 1):
                launched(each, 64, 1, kind)
        assert kernel.keys == stock.keys
        assert kernel.cache == stock.cache
        assert len(kernel.cache) == 2

    def test_a_name_is_taken_away(self) -> None:
        kernel = ours(["n", "KIND"], prune_configs_by=ONE)
        kernel.keys.remove("KIND")
        for kind in (0, 1):
            launched(kernel, 64, 1, kind)
        assert len(kernel.cache) == 1
        assert kernel.keys.pop() == "n"
        assert kernel.keys == []

    def test_buckets_and_kept_names_stay(self) -> None:
        kernel = ours({"n": triton.next_power_of_2}, prune_configs_by=ONE)
        kernel.keys.append("KIND")
        for n, kind in ((40, 0), (50, 0), (50, 1)):
            launched(kernel, n, 1, kind)
        assert [key[:2] for key in kernel.cache] == [(40, 0), (50, 1)]
        kept = ours(["n", "NB"], keep=["NB"])
        kept.keys += ["KIND"]
        assert kept.key_names == ["n", "NB", "KIND"]

    def test_a_name_that_is_no_parameter(self) -> None:
        kernel = ours(["n"])
        with pytest.raises(InvalidSetting, match="'m'"):
            kernel.keys.append("m")
        assert kernel.keys == ["n"]

    def test_a_copy_is_a_plain_list_and_a_copied_tuner_has_its_own(self) -> None:
        kernel = ours(["n"])
        keys = pickle.loads(pickle.dumps(kernel.keys))
        assert (type(keys), keys) == (list, ["n"])
        other = copy.copy(kernel)
        other.keys.append("KIND")
        assert (kernel.keys, other.keys) == (["n"], ["n", "KIND"])


class TestConfigs:
    @pytest.mark.parametrize("launches", [0, 2])
    def test_an_emptied_list_is_tritons_error(self, launches: int) -> None:
        kernel = safetune.safetune([*CONFIGS], ["n"], prune_configs_by=ONE)(add_kernel)
        for _ in range(launches):
            launched(kernel, 64, 1, 0)
        kernel.configs.clear()
        with pytest.raises(IndexError, match="configs of add_kernel is now empty") as caught:
            launched(kernel, 64, 1, 0)
        assert isinstance(caught.value, InvalidConfig)
        kernel.configs += CONFIGS
        assert launched(kernel, 64, 1, 0) is CONFIGS[1]


#: Attributes of Triton's tuner whose content is as on Triton's after each of the launches below.
SAME = (
    *("arg_names", "base_fn", "cache", "cache_results", "configs", "configs_top_k", "fn", "keys"),
    *("nargs", "num_reps", "num_warmups", "perf_model", "reset_to_zero", "restore_copies"),
    *("restore_value", "use_cuda_graph", "user_defined_post_hook", "user_defined_pre_hook"),
    *("best_config", "post_hook", "pre_hook"),
)

#: Those whose content differs, and what a test says of it.
OTHERS = {"_do_bench", "bench_time", "configs_timings", "early_config_prune", "do_bench"}


def content(kernel: Any, name: str) -> Any:
    value = getattr(kernel, name, "none")
    return value.__qualname__.rpartition(".")[2] if callable(value) and "hook" in name else value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"restore_value": ["y"], "reset_to_zero": ("x",)},
        {
            "pre_hook": lambda args, reset_only=False: None,
            "post_hook": lambda args, exception: None,
        },
        {"prune_configs_by": {"top_k": 2}},
    ],
    ids=["plain", "restored", "hooks", "top_k"],
)
def test_attributes_have_what_tritons_have(options: dict[str, Any]) -> None:
    """After the first launch, a known one, another key, and a second tuner that looks up."""
    for _ in range(2):
        stock = triton.autotune(CONFIGS, ["n", "KIND"], do_bench=clock, **options)(add_kernel)
        kernel = safetune.safetune(CONFIGS, ["n", "KIND"], do_bench=clock, **options)(add_kernel)
        for n, kind in ((64, 0), (64, 0), (50, 1)):
            for each in (stock, kernel):
                each[grid](X.clone(), Y.clone(), n, 1, kind)
            kernel.cache[(n, kind, *FLOATS)] = stock.best_config  # all are equally fast
            kernel[grid](X.clone(), Y.clone(), n, 1, kind)
            known = {name for name in vars(stock) if hasattr(stock, name)}
            assert known <= {*SAME, *OTHERS}, "a new Triton has another"
            found = {name: content(kernel, name) for name in SAME}
            assert found == {name: content(stock, name) for name in SAME}
            assert list(kernel.configs_timings) == list(stock.configs_timings) == CONFIGS
            assert [len(times) for times in kernel.configs_timings.values()] == [3, 3]
            assert type(kernel.bench_time) is float


def test_duplicates_are_warned_of_unless_a_library_lists_them(
    fresh_process: FreshProcess,
) -> None:
    code = (
        "import triton, triton.language as tl\n"
        "import safetune\n"
        "{install}\n"
        "@{decorator}([triton.Config({{'BLOCK': b}}) for b in (16, 32, 16)], ['n'])\n"
        "@triton.jit\n"
        "def add_kernel(x, n, BLOCK: tl.constexpr):\n"
        "    tl.store(x + tl.arange(0, BLOCK), n)\n"
        "print(len(add_kernel.configs))\n"
    )
    own = code.format(install="", decorator="safetune.autotune")
    library = code.format(install="safetune.install()", decorator="triton.autotune")
    for program, warned in ((own, True), (library, False)):
        done = fresh_process(program, warm=True)
        assert done.stdout == "2\n", done.stderr
        assert ("listed twice" in done.stderr) is warned
