"""What a candidate runs on: the caller's tensors again, draws, or what `inputs=` makes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune import InvalidSetting, safetune, triton_internals
from safetune.errors import StoreWarning
from safetune.messages import warn_once
from tests.conftest import stop_servers

N = 100
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


@triton.jit
def copy_beside_kernel(dst, src, n, beside, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


@triton.jit
def gather_kernel(dst, table, n, BLOCK: tl.constexpr):
    """dst[i, :] = what the i-th address points to."""
    row = tl.program_id(0)
    src = tl.load(table + row).to(tl.pointer_type(tl.float32))
    for start in range(0, n, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        value = tl.load(src + offset, mask=offset < n)
        tl.store(dst + row * n + offset, value, mask=offset < n)


@triton.jit
def address_kernel(dst, address, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    src = address.to(tl.pointer_type(tl.float32))
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def blocks(*sizes: int, **options: Any) -> list[triton.Config]:
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def bits(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's elements, whatever their type."""
    plain = tensor.detach().contiguous()
    return hashlib.sha256(plain.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def facts(tensor: torch.Tensor) -> list[Any]:
    """Return what a kernel could tell two tensors apart by."""
    return [
        list(tensor.shape),
        list(tensor.stride()),
        str(tensor.dtype),
        tensor.data_ptr() % 16 if tensor.numel() else 0,
        bits(tensor),
    ]


def teller(log: Any, *names: str, also: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return a hook that notes the facts of these arguments, in whatever process it runs."""
    write = log.writer()

    def tell(arguments: dict[str, Any]) -> None:
        told = [facts(arguments[name]) for name in names]
        write(json.dumps([told, None if also is None else also(arguments)]))

    return tell


def told_by_children(log: Any) -> list[Any]:
    return [json.loads(text) for pid, text in log.lines() if pid != os.getpid()]


def of_every_kind() -> dict[str, torch.Tensor]:
    base = torch.arange(96, dtype=torch.float32).reshape(8, 12)
    return {
        "transposed": base.t(),
        "storage offset": base[2:5, 3:],
        "off by one element": base.flatten()[1:],
        "every third": base[:, ::3],
        "expanded": torch.full((1,), 3.0).expand(4, 5),
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "bool": torch.tensor([True, False, True]),
        "int8": torch.arange(-3, 5, dtype=torch.int8),
        "int64": torch.arange(5) << 40,
        "float16": base.half(),
        "bfloat16": base.bfloat16(),
        "float8": torch.linspace(-2, 2, 16).to(torch.float8_e4m3fn),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
        "parameter": torch.nn.Parameter(torch.randn(4, 4)),
    }


class TestCopies:
    @pytest.mark.parametrize("kind", of_every_kind())
    def test_have_what_the_caller_s_has(self, kind: str, log: Any, records: Any) -> None:
        beside = of_every_kind()[kind]
        hook = teller(log, "beside")
        kernel = safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(copy_beside_kernel)
        src, dst = torch.randn(N), torch.zeros(N)
        kernel[grid](dst, src, N, beside)
        assert torch.equal(dst, src)
        assert records.labels() == {16: "ok", 32: "ok"}
        told = told_by_children(log)
        assert len(told) >= 2
        assert [each for each in told if each != [[facts(beside)], None]] == []

    def test_complex_tensors_are_copied(self, log: Any) -> None:
        """A kernel gets their parts; its hook sees both, in one storage."""
        numbers = torch.randn(N, dtype=torch.complex64)
        parent, write = os.getpid(), log.writer()

        def hook(arguments: dict[str, Any]) -> None:
            if os.getpid() != parent:
                write(bits(torch.view_as_real(numbers)))
                numbers[0] = 7j
                write(arguments["src"][1].item())
                numbers[0] = 0

        kernel = safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(copy_kernel)
        before = numbers.clone()
        src, dst = torch.view_as_real(numbers).flatten(), torch.zeros(2 * N)
        warn_once.cache_clear()  # another test of this process may have had it
        with pytest.warns(StoreWarning, match="pre_hook"):  # one over a tensor has no identity
            kernel[grid](dst, src, 2 * N)
        assert torch.equal(dst, src)
        assert torch.equal(numbers, before)
        assert len(kernel.configs_timings) == 2
        texts = [text for _, text in log.lines()]
        assert texts[0] == bits(torch.view_as_real(before))
        assert texts[1] == "7.0"

    def test_views_of_one_packed_buffer_stay_views_of_one(self, log: Any, records: Any) -> None:
        """Query, key and value of one projection; the query is written in place."""
        packed = torch.randn(3, N)
        query, key, value = packed.unbind(0)

        @triton.jit
        def kernel(q, k, v, n, BLOCK: tl.constexpr):
            offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            mask = offset < n
            total = tl.load(k + offset, mask=mask) + tl.load(v + offset, mask=mask)
            tl.store(q + offset, tl.load(q + offset, mask=mask) + total, mask=mask)

        def distances(arguments: dict[str, Any]) -> list[int]:
            start = arguments["q"].data_ptr()
            return [arguments[name].data_ptr() - start for name in "kv"]

        hook = teller(log, "q", "k", "v", also=distances)
        expected = query + (key + value)
        before = [facts(tensor) for tensor in (query, key, value)]
        safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(kernel)[grid](
            query, key, value, N
        )
        assert torch.equal(packed[0], expected)
        assert records.labels() == {16: "ok", 32: "ok"}
        told = told_by_children(log)
        assert {json.dumps(apart) for _, apart in told} == {json.dumps([4 * N, 8 * N])}
        starts = [tensors for tensors, _ in told if tensors == before]
        assert len(starts) >= 2, "each config starts from the caller's bits"

    def test_an_input_that_is_also_the_output_stays_one_tensor(self, records: Any) -> None:
        @triton.jit
        def kernel(x, out, n, BLOCK: tl.constexpr):
            offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + offset, mask=offset < n)
            tl.store(out + offset, value + 1, mask=offset < n)

        x = torch.zeros(N)
        safetune(configs=blocks(16, 32), key=["n"])(kernel)[grid](x, x, N)
        assert torch.equal(x, torch.ones(N))
        assert records.labels() == {16: "ok", 32: "ok"}


@triton.jit
def twice(value):
    return value + value


class TestOtherArguments:
    @pytest.mark.skipif(
        triton_internals.version() < (3, 8), reason="this Triton's interpreter takes no bool"
    )
    def test_none_scalars_strings_dtypes_and_functions(self, log: Any, records: Any) -> None:
        @triton.jit
        def kernel(
            dst, src, bias, n, scale, flag, MODE: tl.constexpr, DTYPE: tl.constexpr,
            FUNCTION: tl.constexpr, BLOCK: tl.constexpr,
        ):  # fmt: skip
            offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            value = FUNCTION(tl.load(src + offset, mask=offset < n).to(DTYPE)) * scale
            if bias is not None:
                value += tl.load(bias + offset, mask=offset < n)
            if MODE == "negative":
                value = -value
            if flag:
                value += 1
            tl.store(dst + offset, value, mask=offset < n)

        write = log.writer()

        def hook(arguments: dict[str, Any]) -> None:
            names = ("bias", "n", "scale", "flag", "MODE", "DTYPE")
            write([arguments[name] for name in names])

        src, dst = torch.randn(N), torch.zeros(N)
        tuned = safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(kernel)
        tuned[grid](dst, src, None, N, 0.5, True, MODE="negative", DTYPE=tl.float32, FUNCTION=twice)
        assert torch.allclose(dst, 1 - src)
        assert records.labels() == {16: "ok", 32: "ok"}
        assert {text for _, text in log.lines()} == {
            f"[None, {N}, 0.5, True, 'negative', triton.language.float32]"
        }

    def test_a_tuple_of_tensors(self, log: Any, records: Any) -> None:
        @triton.jit
        def kernel(dst, pair, n, BLOCK: tl.constexpr):
            offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            left = tl.load(pair[0] + offset, mask=offset < n)
            tl.store(dst + offset, left + tl.load(pair[1] + offset, mask=offset < n), offset < n)

        pair, dst = (torch.randn(N), torch.randn(N + 1)[1:]), torch.zeros(N)
        write = log.writer()

        def hook(arguments: dict[str, Any]) -> None:
            write(json.dumps([facts(tensor) for tensor in arguments["pair"]]))

        safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(kernel)[grid](dst, pair, N)
        assert torch.equal(dst, pair[0] + pair[1])
        assert records.labels() == {16: "ok", 32: "ok"}
        assert {text for _, text in log.lines()} == {json.dumps([facts(each) for each in pair])}

    def test_a_descriptor_whose_block_a_hook_sets(self, log: Any, records: Any) -> None:
        write = log.writer()

        def set_block(arguments: dict[str, Any]) -> None:
            shape = [arguments["BLOCK"], 16]
            for name in ("x", "out"):
                arguments[name].block_shape = shape
            write([facts(arguments["x"].base)[:3], arguments["x"].block_shape])

        x = torch.randn(64, 16)
        out = torch.zeros_like(x)
        kernel = safetune(configs=blocks(16, 32, pre_hook=set_block), key=["n"])(descriptor_kernel)
        kernel[grid](*descriptors(x, out), 64)
        assert torch.equal(out, x + 1)
        assert records.labels() == {16: "ok", 32: "ok"}
        expected = {f"[{facts(x)[:3]}, [{block}, 16]]" for block in (16, 32)}
        assert {text for pid, text in log.lines() if pid != os.getpid()} == expected

    def test_functions_of_another_module(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: Any
    ) -> None:
        """The kernel's module is not imported again, and the other one is found here or not."""
        (tmp_path / "library_of_functions.py").write_text(LIBRARY)
        (tmp_path / "module_with_kernel.py").write_text(MODULE)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path))
            import module_with_kernel  # type: ignore[import-not-found]
        src, dst = torch.randn(N), torch.zeros(N)
        try:
            safetune(configs=blocks(16, 32), key=["n"])(module_with_kernel.kernel)[grid](
                dst, src, N
            )
        finally:
            del sys.modules["library_of_functions"], sys.modules["module_with_kernel"]
        assert torch.equal(dst, src * 3)
        assert records.labels() == {16: "ok", 32: "ok"}


LIBRARY = """
import triton
import triton.language as tl

@triton.jit
def thrice(value):
    return value * 3
"""

MODULE = """
import triton
import triton.language as tl
from library_of_functions import thrice

@triton.jit
def kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, thrice(tl.load(src + offset, mask=offset < n)), mask=offset < n)
"""


@triton.jit
def descriptor_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    out.store([row, 0], x.load([row, 0]) + 1)


def descriptors(*tensors: torch.Tensor) -> list[TensorDescriptor]:
    return [TensorDescriptor.from_tensor(tensor, [1, 16]) for tensor in tensors]


class TestOverTheLimit:
    @pytest.fixture(autouse=True)
    def _limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAFETUNE_COPY_LIMIT", "64K")

    def test_the_largest_float_tensors_are_drawn(
        self, log: Any, records: Any, marks: Callable[[], list[list[str]]]
    ) -> None:
        """Until the rest is below the limit; alike in every child, and never integers."""
        n = 1 << 15
        src, dst = torch.rand(n) + 3.0, torch.zeros(n)
        beside = torch.arange(1 << 13)
        hook = teller(log, "src", "dst", "beside", also=_moments)
        kernel = safetune(
            configs=blocks(1 << 14, 1 << 15, pre_hook=hook), key=["n"], isolation="config"
        )(copy_beside_kernel)
        before = [facts(tensor) for tensor in (src, dst, beside)]
        kernel[grid](dst, src, n, beside)
        assert torch.equal(dst, src)
        assert [facts(tensor) for tensor in (src, beside)] == [before[0], before[2]]
        assert records.labels() == {1 << 14: "ok", 1 << 15: "ok"}
        assert marks() == [["regenerated: dst, src", "first"], ["regenerated: dst, src"]]

        told = told_by_children(log)
        assert len({pid for pid, _ in log.lines()}) >= 3
        assert {tensors[0][4] for tensors, _ in told} != {before[0][4]}
        assert len({tensors[0][4] for tensors, _ in told}) == 1, "the same bits for everybody"
        assert {json.dumps(tensors[2]) for tensors, _ in told} == {json.dumps(before[2])}
        for tensors, (mean, std, low, high) in told:
            assert tensors[0][:4] == before[0][:4]
            assert mean == pytest.approx(3.5, abs=0.02)
            assert std == pytest.approx(0.27, abs=0.05)
            assert 3.0 <= low < high <= 4.0

    def test_the_rest_is_copied(
        self, log: Any, records: Any, marks: Callable[[], list[list[str]]]
    ) -> None:
        src, dst, beside = torch.randn(N), torch.zeros(N), torch.randn(1 << 15)
        hook = teller(log, "src", "beside")
        kernel = safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(copy_beside_kernel)
        kernel[grid](dst, src, N, beside)
        assert marks() == [["regenerated: beside", "first"], ["regenerated: beside"]]
        assert {tensors[0][4] for tensors, _ in told_by_children(log)} == {bits(src)}
        assert bits(beside) not in {tensors[1][4] for tensors, _ in told_by_children(log)}

    @pytest.mark.parametrize(
        ("kind", "drawn"),
        [
            ("int64", ["regenerated: dst, src"]),
            ("view as int32", ["regenerated: dst, src"]),
            ("below", []),
        ],
    )
    def test_integers_and_what_fits_are_copied(
        self, kind: str, drawn: list[str], log: Any, marks: Callable[[], list[list[str]]]
    ) -> None:
        src, dst = torch.randn(N), torch.zeros(N)
        beside: Any = torch.arange(1 << 14)
        if kind == "view as int32":
            floats = torch.randn(1 << 15)
            beside = (floats, floats.view(torch.int32))
        elif kind == "below":
            beside = torch.randn(1 << 13)
        write = log.writer()

        def hook(arguments: dict[str, Any]) -> None:
            write([bits(tensor) for tensor in _each(arguments["beside"])])

        kernel = safetune(configs=blocks(16, 32, pre_hook=hook), key=["n"])(copy_beside_kernel)
        kernel[grid](dst, src, N, beside)
        assert torch.equal(dst, src)
        assert {text for _, text in log.lines()} == {str([bits(each) for each in _each(beside)])}
        assert marks() == [[*drawn, "first"], drawn]

    @pytest.mark.parametrize("value", ["2 apples", "-1", "1TiB", "0.5GiB", "GiB"])
    def test_a_limit_that_is_not_a_size_is_an_error(
        self, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_COPY_LIMIT", value)
        with pytest.raises(InvalidSetting, match=r"SAFETUNE_COPY_LIMIT=.*KiB, MiB or GiB"):
            safetune(configs=blocks(16, 32), key=["n"])(copy_kernel)


def _moments(arguments: dict[str, Any]) -> list[float]:
    src = arguments["src"]
    return [float(value) for value in (src.mean(), src.std(), src.min(), src.max())]


def _each(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.fixture
def marks(records: Any) -> Callable[[], list[list[str]]]:
    """A function that returns the marks of every trial."""
    return lambda: [json.loads(row[0]) for row in records._query("SELECT marks FROM trial")]


class TestAddresses:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
    def test_a_table_of_addresses_is_not_tuned(
        self, dtype: torch.dtype, processes: Any, cache_dir: Path
    ) -> None:
        rows = [torch.randn(N) for _ in range(3)]
        table = torch.tensor([row.data_ptr() for row in rows]).view(dtype)
        dst = torch.zeros(3, N)
        kernel = safetune(configs=blocks(16, 32), key=["n"])(gather_kernel)
        with pytest.warns(UserWarning, match="gather_kernel is not tuned.*table holds") as caught:
            kernel[(3,)](dst, table, N)
        assert torch.equal(dst, torch.stack(rows))
        text = str(caught[0].message)
        assert "`inputs=`" in text
        assert "first config" in text
        assert hex(min(row.data_ptr() for row in rows)) in text
        kernel[(3,)](dst, table, N)
        assert len([each for each in caught if issubclass(each.category, UserWarning)]) == 1

    def test_a_table_with_one_address_among_numbers_is_not_tuned(self) -> None:
        """One is enough."""
        row = torch.randn(N)
        table = torch.arange(1000)
        table[0] = row.data_ptr() + 4
        dst = torch.zeros(N)
        kernel = safetune(configs=blocks(16, 32), key=["n"])(gather_kernel)
        with pytest.warns(UserWarning, match="table holds an address of this process"):
            kernel[(1,)](dst, table, N - 1)
        assert torch.equal(dst[: N - 1], row[1:])

    def test_an_address_as_an_integer_is_not_tuned(self) -> None:
        src, dst = torch.randn(N), torch.zeros(N)
        kernel = safetune(configs=blocks(16, 32), key=["n"])(address_kernel)
        with pytest.warns(UserWarning, match="not tuned.*address holds an address of this"):
            kernel[grid](dst, src.data_ptr(), N)
        assert torch.equal(dst, src)

    def test_no_child_is_asked(self, processes: Any) -> None:
        """It is found before: the servers, which start meanwhile, have no children."""
        stop_servers()
        kernel = safetune(configs=blocks(16, 32), key=["n"])(address_kernel)
        src, dst = torch.randn(N), torch.zeros(N)
        with pytest.warns(UserWarning, match="not tuned"):
            kernel[grid](dst, src.data_ptr(), N)
        assert [processes.children(server) for server in processes.servers()] in ([], [[]])

    @pytest.mark.parametrize("kind", ["indices", "hashes", "times", "negative", "read-only"])
    def test_numbers_that_only_look_like_addresses_are_passed_on(
        self, kind: str, records: Any
    ) -> None:
        torch.manual_seed(3)
        numbers = {
            "indices": torch.arange(1 << 16),
            "hashes": torch.randint(-(1 << 63), (1 << 63) - 1, (1 << 12,)),
            "times": 1_700_000_000_000_000_000 + torch.arange(1000),
            "negative": -torch.arange(1000) - (1 << 40),
            # Code is not a tensor's memory.
            "read-only": torch.tensor([_start_of_code()]),
        }[kind]
        src, dst = torch.randn(N), torch.zeros(N)
        kernel = safetune(configs=blocks(16, 32), key=["n"])(copy_beside_kernel)
        kernel[grid](dst, src, N, numbers)
        assert records.labels() == {16: "ok", 32: "ok"}


def _start_of_code() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(int(line.split("-")[0], 16) for line in lines if line.split()[1] == "r-xp")


TOO_LARGE = """
import resource, sys, warnings
import torch, triton, triton.language as tl
from safetune import safetune

@triton.jit
def kernel(dst, src, weights, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

kernel = safetune(configs=[triton.Config({"BLOCK": b}) for b in (64, 128)], key=["n"])(kernel)
src, dst, weights = torch.randn(1000), torch.zeros(1000), torch.zeros(25 << 20)
limit = getattr(resource, sys.argv[1])
size = 64 << 20
if sys.argv[1] == "RLIMIT_AS":
    size += int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(limit, (size, resource.RLIM_INFINITY))
grid = lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kernel[grid](dst, src, weights, 1000)
resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert torch.equal(dst, src)
(warning,) = caught
print(warning.message)
"""


class TestTooLarge:
    @pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
    def test_tensors_too_large_for_the_host_are_not_copied(
        self, limit: str, fresh_process: Any, cache_dir: Path
    ) -> None:
        result = fresh_process(TOO_LARGE, limit, warm=True)
        text = result.stdout
        assert "kernel is not tuned" in text
        assert "needs 0.195 GiB of host memory" in text
        assert "weights (0.0977 GiB), " in text
        assert "`inputs=`" in text
        assert "first config" in text


SMALL_SHM = """
mount -t tmpfs -o size=64m tmpfs /dev/shm &&
test "$(df --output=size -k /dev/shm | tail -1)" -eq 65536 &&
exec "$@"
"""

LARGE_CALL = """
import os, sys
import torch, triton, triton.language as tl
from safetune import safetune

@triton.jit
def kernel(dst, src, weights, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(src + offset, mask=offset < n) + tl.load(weights + offset * 1000, offset < n)
    tl.store(dst + offset, value, mask=offset < n)

src, dst, weights = torch.randn(1000), torch.zeros(1000), torch.randn(25 << 20)
kernel = safetune(configs=[triton.Config({"BLOCK": b}) for b in (64, 128)], key=["n"])(kernel)
kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](dst, src, weights, 1000)
assert torch.equal(dst, src + weights[: 1000 * 1000 : 1000])
print(kernel.configs_timings and "tuned", os.listdir("/dev/shm"))
"""


@pytest.mark.fault("small-dev-shm")
def test_a_small_dev_shm_is_enough(records: Any, tmp_path: Path) -> None:
    """The tensors of 100 MB travel in a memory file, which is in no mounted file system."""
    unshare = shutil.which("unshare")
    namespace = [unshare or "unshare", "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*namespace, "true"], check=False).returncode != 0:
        pytest.skip("no user and mount namespaces may be made here")
    script = tmp_path / "large_call.py"
    script.write_text(LARGE_CALL)
    result = subprocess.run(
        [*namespace, "sh", "-c", SMALL_SHM, "sh", sys.executable, str(script)],
        # Without its log, which says what takes longer than 10 s.
        env={**os.environ, "PYTHONPATH": str(ROOT), "SAFETUNE_LOG": "quiet"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "tuned []\n"
    assert [trial.label for trial in records.trials()] == ["ok", "ok"]


def ones(arguments: dict[str, Any]) -> dict[str, Any]:
    """A factory for `copy_kernel`, from what it is told of the caller's tensors."""
    src = arguments["src"]
    assert src.is_meta
    made = torch.ones(src.shape, dtype=src.dtype)
    return {"dst": torch.zeros(arguments["n"]), "src": made}


class TestFactory:
    def tune(self, inputs: Any, *arguments: Any, kernel: Any = copy_kernel, **options: Any) -> Any:
        tuned = safetune(configs=blocks(16, 32, **options), key=["n"], inputs=inputs)(kernel)
        tuned[grid](*arguments)
        return tuned

    def test_makes_what_candidates_run_on(
        self, log: Any, records: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_COPY_LIMIT", "16")
        src, dst = torch.randn(2 * N)[::2], torch.zeros(N)
        describe = log.writer()

        def factory(arguments: dict[str, Any]) -> dict[str, Any]:
            told = arguments["src"]
            describe([tuple(told.shape), told.stride(), told.dtype, told.device, arguments["n"]])
            return {"dst": torch.zeros(N), "src": torch.rand(N).mul(8).as_strided((N,), (1,))}

        write = log.writer()

        def hook(arguments: dict[str, Any]) -> None:
            write([bits(arguments["src"]), arguments["n"]])

        @triton.jit
        def kernel(dst, src, n, BLOCK: tl.constexpr):
            offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(src + offset * 2, mask=offset < n // 2)
            tl.store(dst + offset, value, mask=offset < n // 2)

        self.tune(factory, dst, src, N, kernel=kernel, pre_hook=hook)
        assert torch.equal(dst[: N // 2], src[: N // 2])
        assert records.labels() == {16: "ok", 32: "ok"}
        mine = {text for pid, text in log.lines() if pid == os.getpid()}
        theirs = {text for pid, text in log.lines() if pid != os.getpid()}
        torch.manual_seed(0)
        torch.zeros(N)
        assert mine == {str([bits(src), N])}
        assert theirs == {
            str([bits(torch.rand(N).mul(8)), N]),
            f"[({N},), (2,), torch.float32, device(type='meta'), {N}]",
        }

    def test_each_config_starts_from_what_it_made(self, log: Any, records: Any) -> None:
        @triton.jit
        def kernel(x, n, BLOCK: tl.constexpr):
            offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + offset, mask=offset < n)
            tl.store(x + offset, value + 1, mask=offset < n)

        write = log.writer()

        def hook(arguments: dict[str, Any]) -> None:
            write([arguments["BLOCK"], arguments["x"][0].item()])

        x = torch.zeros(N)
        self.tune(lambda named: {"x": torch.full((N,), 50.0)}, x, N, kernel=kernel, pre_hook=hook)
        assert torch.equal(x, torch.ones(N))
        assert records.labels() == {16: "ok", 32: "ok"}
        texts = [text for pid, text in log.lines() if pid != os.getpid()]
        assert {"[16, 50.0]", "[32, 50.0]"} <= set(texts)

    def test_may_replace_other_arguments(self, log: Any, records: Any) -> None:
        write = log.writer()

        def factory(arguments: dict[str, Any]) -> dict[str, Any]:
            return {**ones(arguments), "n": 10}

        def hook(arguments: dict[str, Any]) -> None:
            write([arguments["n"], arguments["src"].sum().item() == N])

        src, dst = torch.zeros(N), torch.ones(N)
        self.tune(factory, dst, src, N, pre_hook=hook)
        assert torch.equal(dst, src)
        assert {text for pid, text in log.lines() if pid != os.getpid()} == {"[10, True]"}

    def test_replaces_whole_tuples_and_descriptors(self, log: Any, records: Any) -> None:
        write = log.writer()

        def factory(arguments: dict[str, Any]) -> dict[str, Any]:
            assert arguments["x"].base.is_meta
            assert arguments["x"].shape == [64, 16]
            x, out = torch.full((64, 16), 5.0), torch.zeros(64, 16)
            return dict(zip(("x", "out"), descriptors(x, out), strict=True))

        def set_block(arguments: dict[str, Any]) -> None:
            for name in ("x", "out"):
                arguments[name].block_shape = [arguments["BLOCK"], 16]
            write(arguments["x"].base.mean().item() == 5.0)

        x, out = torch.randn(64, 16), torch.zeros(64, 16)
        pair = [TensorDescriptor.from_tensor(each, [1, 16]) for each in (x, out)]
        for each in pair:
            each.shape = list(each.shape)
        self.tune(factory, *pair, 64, kernel=descriptor_kernel, pre_hook=set_block)
        assert torch.equal(out, x + 1)
        assert records.labels() == {16: "ok", 32: "ok"}
        assert {text for pid, text in log.lines() if pid != os.getpid()} == {"True"}

    def test_makes_a_table_of_addresses(self, log: Any, records: Any) -> None:
        """What they point to lives as long as the factory, or what it made, holds it."""
        write = log.writer()
        held: list[torch.Tensor] = []

        def factory(arguments: dict[str, Any]) -> dict[str, Any]:
            held.extend(torch.full((N,), float(row)) for row in range(3))
            table = torch.tensor([row.data_ptr() for row in held])
            return {"dst": torch.zeros(3, N), "table": table}

        def after(arguments: dict[str, Any], exception: Any) -> None:
            if exception is None:
                write(arguments["dst"].sum(1).tolist())

        rows = [torch.randn(N) for _ in range(3)]
        dst = torch.zeros(3, N)
        kernel = safetune(configs=blocks(16, 32), key=["n"], inputs=factory, post_hook=after)(
            gather_kernel
        )
        kernel[(3,)](dst, torch.tensor([row.data_ptr() for row in rows]), N)
        assert torch.equal(dst, torch.stack(rows))
        assert records.labels() == {16: "ok", 32: "ok"}
        assert {text for _, text in log.lines()} == {f"[0.0, {1.0 * N}, {2.0 * N}]"}
        assert held == []

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (lambda named: {}, "returned no value for dst, src"),
            (lambda named: {**ones(named), "src": named["src"]}, "returned no value for src"),
            (
                lambda named: {**ones(named), "scr": 1},
                "returned a value for 'scr' .*, which the call",
            ),
            (lambda named: [1, 2], r"returned \[1, 2\]; it must return a dict"),
            (lambda named: 1 / 0, "raised ZeroDivisionError: division by zero"),
            (lambda named: sys.exit(3), "raised SystemExit: 3"),
            (
                lambda named: {**ones(named), "src": torch.ones(N, dtype=torch.int8)},
                "returned a torch.int8 tensor on cpu for src, not a torch.float32 tensor",
            ),
            (lambda named: {**ones(named), "src": 3.0}, "returned a float for src, not a"),
        ],
    )
    def test_a_factory_that_makes_something_else_is_an_error(
        self, returned: Any, message: str, records: Any
    ) -> None:
        src, dst = torch.randn(N), torch.zeros(N)
        with pytest.raises(InvalidSetting, match=f"^inputs= of copy_kernel {message}"):
            self.tune(returned, dst, src, N)
        assert records.trials() == []

    def test_a_factory_that_lacks_memory_is_tried_again(self, records: Any) -> None:
        """That is not a mistake in the program, and may pass."""

        def factory(named: dict[str, Any]) -> dict[str, Any]:
            raise torch.OutOfMemoryError("out of memory")

        src, dst = torch.randn(N), torch.zeros(N)
        with pytest.warns(UserWarning, match="copy_kernel is not tuned.*tried again later"):
            self.tune(factory, dst, src, N)
        assert torch.equal(dst, src)
