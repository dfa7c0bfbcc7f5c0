"""Real compile children for sm_90: they fill the disk cache; a bad config costs itself alone."""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.language.target_info import cuda_capability_geq, is_cuda
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

from safetune import triton_compile, triton_internals
from safetune.both.protocol import IDLE_EXIT_S
from safetune.inputs import kernel_pickle
from safetune.inputs.compile_spec import pack_for_compiler
from safetune.isolation import child_handle
from safetune.isolation.compile_pool import Compiled, CompilePool
from safetune.isolation.fork_server import plain_server, server
from safetune.outcome import Outcome, Verdict
from tests.conftest import ended

pytestmark = pytest.mark.internals

TARGET = GPUTarget("cuda", 90, 32)
#: Enough for a small kernel on a machine that does other things, too.
TIMEOUT_S = 30.0


@triton.constexpr_function
def at_compile_time(kind, number):
    """Notes who compiles which config, and misbehaves. (Triton forbids globals that are called.)"""
    os = __import__("os")
    seen = [os.getpid(), number, os.environ.get("CUDA_VISIBLE_DEVICES")]
    with open(os.environ["POOL_LOG"], "a") as file:
        file.write(f"{seen!r}\n")
    if kind == "abort":
        os.abort()
    if kind == "exit":
        os._exit(1)
    if kind == "killed" or (kind == "killed once" and not os.path.exists("killed")):
        if kind == "killed once":
            open("killed", "w").close()
        os.kill(os.getpid(), 9)
    if kind == "segfault":
        __import__("ctypes").string_at(0)
    if kind == "eats":
        held = []
        while True:
            held.append(bytearray(1 << 24))
    if kind == "torch?":
        kind = "torch" if "torch" in __import__("sys").modules else "no torch"
        with open(os.environ["POOL_LOG"] + ".torch", "w") as file:
            file.write(kind)
    if kind == "raise":
        raise ZeroDivisionError("no such tile")
    if kind == "grandchild":
        grandchild = __import__("subprocess").Popen(["sleep", "1000"])
        with open(os.environ["POOL_LOG"] + ".grandchild", "w") as file:
            file.write(str(grandchild.pid))
    if kind in ("hang", "grandchild"):
        while True:
            pass
    return number


DEFAULT_BLOCK = tl.constexpr(64)  # named in the signature only, which Triton evaluates again


def kernel(x, n, KIND: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr = DEFAULT_BLOCK):
    SHIFT: tl.constexpr = at_compile_time(KIND, NUMBER)
    if KIND == "target":
        tl.static_assert(is_cuda() and cuda_capability_geq(9, 0), "the target is not known")
    tl.static_assert(KIND != "assert", "a config that asserts")
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if KIND == "type":
        offset = offset + tl.full((3,), 1, tl.int32)
    if KIND == "llvm":
        offset = tl.inline_asm_elementwise(
            "mov.b32 $9, $1;", "=r,r", [offset], dtype=tl.int32, is_pure=True, pack=1
        )
    tl.store(x + offset, offset + SHIFT, mask=offset < n)


JIT = JITFunction(kernel)


def source(kind: str, number: int) -> tuple[ASTSource, dict[str, Any]]:
    signature = {"x": "*i32", "n": "i32", **dict.fromkeys(("KIND", "NUMBER", "BLOCK"), "constexpr")}
    constexprs = {(2,): kind, (3,): number, (4,): 64}
    attrs = {(0,): [["tt.divisibility", 16]]}
    options = make_backend(TARGET).parse_options({"num_warps": 2}).__dict__
    return ASTSource(JIT, signature, constexprs, attrs), options


def spec(kind: str, number: int) -> bytes:
    """Return what `capture_spec` would."""
    made, options = source(kind, number)
    parts = (made.signature, made.constants, made.attrs, dict(options), TARGET)
    return kernel_pickle.pack(parts, "the constants of kernel")


class Pool:
    """Compile pools, and what their children say of themselves."""

    def __init__(self, log: Path, cache: Path) -> None:
        self._log = log
        self.cache = cache
        self.kernel = pack_for_compiler(JIT)

    def start(self, kinds: Mapping[int, str], **options: Any) -> Iterator[Compiled]:
        options = {"timeout_s": TIMEOUT_S, "size": 2, **options}
        specs = {number: spec(kind, number) for number, kind in kinds.items()}
        with CompilePool(lambda: self.kernel, **options) as pool:
            for number, packed in specs.items():
                pool.add(number, packed)
            yield from pool.results()

    def run(self, kinds: Mapping[int, str], **options: Any) -> dict[int, Compiled]:
        """Compile all; fail if a config is answered for twice."""
        results = list(self.start(kinds, **options))
        assert sorted(result.config for result in results) == sorted(kinds)
        return {result.config: result for result in results}

    def seen(self) -> list[tuple[int, int, str | None]]:
        """Return (pid, config, CUDA_VISIBLE_DEVICES) of every compilation begun."""
        if not self._log.exists():
            return []
        return [tuple(eval(line)) for line in self._log.read_text().splitlines()]

    def pids(self) -> set[int]:
        return {pid for pid, _, _ in self.seen()}

    def files(self) -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in self.cache.rglob("*") if p.is_file()}

    @property
    def grandchild(self) -> int:
        return int(Path(f"{self._log}.grandchild").read_text())


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    # Triton's own library is interpreted or compiled as this says when it is imported.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("POOL_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    yield Pool(tmp_path / "log", tmp_path / "cache")
    child_handle.idle.drop()  # the next test starts its own


def test_the_caller_finds_what_the_children_compiled(pool: Pool) -> None:
    kinds = dict.fromkeys(range(6), "ok")
    results = pool.run(kinds)

    assert all(result.outcome == Outcome(Verdict.OK) for result in results.values())
    assert sorted(number for _, number, _ in pool.seen()) == [0, 1, 2, 3, 4, 5], "each once"
    assert len(pool.pids()) == 2
    assert os.getpid() not in pool.pids()
    before = pool.files()
    assert sum(name.endswith(".cubin") for name in before) == 6
    compilations = pool.seen()
    for number in kinds:
        made, options = source("ok", number)
        compiled = triton.compile(made, target=TARGET, options=options)
        assert results[number].binary.shared_bytes == compiled.metadata.shared
    assert pool.files() == before, "not one file is new, or written again"
    assert pool.seen() == compilations


def test_a_measuring_process_reads_the_code_of_a_kernel_and_none_of_its_texts(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool.run({0: "ok"})[0].outcome.ok
    made, options = source("ok", 0)
    whole = triton.compile(made, target=TARGET, options=options)
    monkeypatch.setattr(FileCacheManager, "get_group", FileCacheManager.get_group)
    triton_compile.load_code_alone.__wrapped__()
    code = triton.compile(made, target=TARGET, options=options)
    assert {"ptx", "cubin"} < set(whole.asm)
    assert set(code.asm) == {"cubin"}
    assert (code.kernel, code.metadata) == (whole.kernel, whole.metadata)
    assert len(pool.seen()) == 1, "not compiled again"


def test_the_caller_finds_it_though_the_assembler_was_changed_since_it_was_asked(
    pool: Pool, ptxas: Callable[[str], None]
) -> None:
    """torch.compile sets TRITON_PTXAS_PATH; Triton keeps the version that it asked for before."""
    before = triton_internals.backend_hash(TARGET)
    assembler = knobs.nvidia.ptxas.path
    ptxas(f"os.execv({assembler!r}, [{assembler!r}, *sys.argv[1:]])")
    assert make_backend(TARGET).hash() == before
    assert pool.run({0: "ok"})[0].outcome == Outcome(Verdict.OK)
    compiled = pool.files()
    made, options = source("ok", 0)
    triton.compile(made, target=TARGET, options=options)
    assert pool.files() == compiled, "not compiled again"


@pytest.mark.fault("compile-exception")
@pytest.mark.fault("static-assert")
@pytest.mark.fault("compiler-abort")
@pytest.mark.fault("compiler-exit")
@pytest.mark.fault("compiler-segfault")
def test_bad_configs_cost_themselves_alone(pool: Pool) -> None:
    kinds = {
        0: "ok",
        1: "assert",
        2: "abort",
        3: "ok",
        4: "exit",
        5: "type",
        6: "raise",
        7: "ok",
        8: "abort",
        9: "ok",
        10: "segfault",
        11: "llvm",
    }
    results = pool.run(kinds)

    verdicts = {
        "ok": "ok",
        "assert": "compile_error",
        "type": "compile_error",
        "raise": "compile_error",
        "abort": "compile_crash",
        "exit": "compile_crash",
        "segfault": "compile_crash",
        "llvm": "compile_crash",
    }
    assert {n: r.outcome.verdict.value for n, r in results.items()} == {
        n: verdicts[kind] for n, kind in kinds.items()
    }
    messages = {n: r.outcome.message for n, r in results.items()}
    assert "a config that asserts" in messages[1]
    assert "SIGABRT" in messages[2]
    assert results[2].outcome.detail == "SIGABRT"
    assert "exit code 1" in messages[4]
    assert results[10].outcome.detail == "SIGSEGV"
    assert results[11].outcome.detail == "SIGABRT"
    assert "LLVM ERROR" in results[11].outcome.stderr
    assert messages[5]
    assert "no such tile" in messages[6]
    by_signal = [number for number, kind in kinds.items() if kind in ("abort", "segfault", "llvm")]
    begun = sorted(number for _, number, _ in pool.seen())
    assert begun == sorted([*kinds, *by_signal]), "twice where a signal ended it"
    assert ended(*pool.pids())
    assert sum(name.endswith(".cubin") for name in pool.files()) == 4


def test_the_job_that_waited_behind_a_crash_is_not_lost(pool: Pool) -> None:
    results = pool.run({0: "abort", 1: "ok", 2: "exit", 3: "ok"}, size=1)
    assert [results[n].outcome.verdict.value for n in range(4)] == [
        "compile_crash",
        "ok",
        "compile_crash",
        "ok",
    ]
    assert [number for _, number, _ in pool.seen()] == [0, 1, 2, 3, 0], "the crash is tried again"
    assert len(pool.pids()) == 3


@pytest.mark.fault("compile-hang")
@pytest.mark.fault("outside-kill")
def test_a_child_that_is_killed_once_costs_no_config(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does for want of memory: the config is compiled again, after the others."""
    monkeypatch.chdir(tmp_path)
    done = pool.run({0: "killed once", 1: "ok", 2: "ok"}, size=1)
    assert {config: found.outcome.verdict.value for config, found in done.items()} == {
        0: "ok",
        1: "ok",
        2: "ok",
    }
    assert list(done)[-1] == 0
    (killed,) = pool.run({0: "killed"}).values()
    assert (killed.outcome.verdict.value, killed.outcome.detail) == ("compile_crash", "SIGKILL")


def test_a_compiler_that_never_ends(pool: Pool) -> None:
    """Killed with what it has started; the job that waited behind it goes to another child."""
    results = pool.run({0: "hang", 1: "grandchild", 2: "ok", 3: "ok"}, timeout_s=5.0)

    assert {n: r.outcome.verdict.value for n, r in results.items()} == {
        0: "compile_timeout",
        1: "compile_timeout",
        2: "ok",
        3: "ok",
    }
    assert results[0].outcome.message == "not compiled within 5 s"
    assert ended(*pool.pids(), pool.grandchild)


class TestGivingUp:
    """A compile that takes far longer than most ends without a result, where the caller says so."""

    @staticmethod
    def options(*configs: int, **others: Any) -> dict[str, Any]:
        return {"may_give_up": set(configs).__contains__, "least_s": 0.0, **others}

    def test_it_is_begun_once_and_the_job_behind_it_is_done(self, pool: Pool) -> None:
        kinds = {0: "ok", 1: "ok", 2: "hang", 3: "ok"}
        found = list(pool.start(kinds, size=1, **self.options(2)))
        assert [(each.config, each.outcome.label) for each in found] == [
            *((0, "ok"), (1, "ok"), (3, "ok")),
        ]
        begun = [number for _, number, _ in pool.seen() if number != 2]
        assert begun == [0, 1, 3]
        assert len(pool.seen()) <= 4, "not tried again"
        assert ended(*pool.pids())

    @pytest.mark.parametrize(
        ("hanging", "others"),
        [
            pytest.param((1, 2), {}, id="most are still compiling"),
            pytest.param((2,), {"may_give_up": lambda config: False}, id="forbidden"),
            pytest.param((2,), {"least_s": 1000.0}, id="the timeout is shorter"),
        ],
    )
    def test_it_has_its_whole_time(
        self, pool: Pool, hanging: Sequence[int], others: dict[str, Any]
    ) -> None:
        kinds = {n: "hang" if n in hanging else "ok" for n in range(3)}
        options = self.options(hanging[0], timeout_s=5.0, **others)
        results = {n: each.outcome.label for n, each in pool.run(kinds, **options).items()}
        assert results == {n: "compile_timeout" if n in hanging else "ok" for n in range(3)}

    def test_what_fails_or_is_in_the_disk_cache_is_no_measure(self, pool: Pool) -> None:
        pool.run(dict.fromkeys((0, 2), "ok"))
        kinds = {0: "ok", 1: "raise", 2: "ok", 3: "hang"}
        results = pool.run(kinds, timeout_s=5.0, **self.options(3))
        assert results[3].outcome.label == "compile_timeout"


def test_children_see_no_gpu(pool: Pool) -> None:
    pool.run({0: "ok"})
    assert [visible for _, _, visible in pool.seen()] == [""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_one_child_compiles_many(pool: Pool) -> None:
    pool.run(dict.fromkeys(range(4), "ok"), size=1)
    assert len(pool.pids()) == 1
    assert [number for _, number, _ in pool.seen()] == [0, 1, 2, 3]


def test_no_more_children_than_configs(pool: Pool) -> None:
    pool.run(dict.fromkeys(range(3), "ok"), size=8)
    assert len(pool.pids()) == 3
    assert ended(*pool.pids())


def test_the_default_is_one_child_for_each_usable_cpu(pool: Pool) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:1])
    try:
        pool.run(dict.fromkeys(range(3), "ok"), size=None)
    finally:
        os.sched_setaffinity(0, cpus)
    assert len(pool.pids()) == 1


def test_children_end_with_the_one_who_asked(pool: Pool) -> None:
    """A tuning that is interrupted drops the iterator."""
    results: Any = pool.start({0: "ok", 1: "hang", 2: "hang"}, size=2)
    assert next(results).config == 0
    results.close()
    assert ended(*pool.pids())


def test_kernels_that_cannot_be_rebuilt_are_compile_errors(pool: Pool) -> None:
    pool.kernel = b"no pickle"
    results = pool.run({0: "ok", 1: "ok"})
    for result in results.values():
        assert result.outcome.verdict is Verdict.COMPILE_ERROR
        assert result.outcome.detail == "UnpicklingError"


def test_children_have_no_torch(pool: Pool, tmp_path: Path) -> None:
    """Importing it takes seconds; the server of the measuring children is not even started."""
    server.stop()
    assert pool.run({0: "torch?"})[0].outcome.ok
    assert (tmp_path / "log.torch").read_text() == "no torch"
    assert server._process is None


def test_kernels_may_ask_for_their_target(pool: Pool) -> None:
    """Without a driver, Triton would tell them that there is none, and cache what comes of it."""
    assert pool.run({0: "target"})[0].outcome == Outcome(Verdict.OK)


@pytest.mark.fault("compile-memory")
class TestMemory:
    def test_a_compiler_that_eats_it_costs_its_config(self, pool: Pool) -> None:
        kinds = {0: "ok", 1: "eats", 2: "ok", 3: "ok"}
        results = pool.run(kinds, size=1, memory_bytes=1 << 30)
        assert [results[n].outcome.label for n in kinds] == ["ok", "compile_error", "ok", "ok"]
        outcome = results[1].outcome
        assert outcome.detail == "memory"
        assert outcome.message.endswith("a compile process may allocate at most 1 GiB")
        begun = [number for _, number, _ in pool.seen()]
        assert sorted(set(begun)) == [0, 1, 2, 3]
        assert begun.count(1) == 1, "the next lay in the same child's pipe, which may have begun it"
        assert len(pool.pids()) == 2, "the one that ate is replaced"

    def test_the_limit_holds_for_what_a_compiler_starts(
        self, pool: Pool, ptxas: Callable[[str], None]
    ) -> None:
        ptxas("x = bytearray(3 << 30)")
        outcome = pool.run({0: "ok"}, memory_bytes=2 << 30)[0].outcome
        assert outcome.label == "compile_error"
        assert outcome.detail == "memory"
        assert "MemoryError" in outcome.message

    def test_a_child_that_is_used_again_has_the_new_limit(self, pool: Pool) -> None:
        pool.run({0: "ok"}, memory_bytes=1 << 30)
        (pid,) = pool.pids()
        assert soft_limit(pid) == 1 << 30
        pool.run({1: "ok"})
        assert pool.pids() == {pid}
        assert soft_limit(pid) == resource.getrlimit(resource.RLIMIT_DATA)[0]


def soft_limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_DATA)[0]


@pytest.fixture
def ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that has Triton assemble with a program that does this, and tells its pid."""

    def use(code: str) -> None:
        script = tmp_path / "ptxas"
        script.write_text(
            f"#!{sys.executable} -IS\n"
            "import os, signal, sys\n"
            "if '--version' in sys.argv:\n"
            "    sys.exit(print('Cuda compilation tools, release 12.8, V12.8.93'))\n"
            f"open({str(tmp_path / 'log.grandchild')!r}, 'w').write(str(os.getpid()))\n"
            f"{code}\n"
        )
        script.chmod(0o755)
        for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
            monkeypatch.setenv(name, str(script))

    return use


class TestAnAssembler:
    @pytest.mark.fault("ptxas-failure")
    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("sys.exit('ptxas fatal: this is not PTX')", "ptxas fatal: this is not PTX"),
            ("os.kill(os.getpid(), signal.SIGSEGV)", "repro command"),
        ],
    )
    def test_a_failing_assembler_costs_the_config(
        self, pool: Pool, ptxas: Callable[[str], None], code: str, said: str
    ) -> None:
        ptxas(code)
        outcome = pool.run({0: "ok"})[0].outcome
        assert outcome.label == "compile_error"
        assert outcome.detail == "PTXASError"
        assert said.lower() in outcome.message.lower()
        assert len(pool.pids()) == 1, "the compiler itself is well"

    @pytest.mark.fault("compile-hang")
    def test_an_endless_assembler_leaves_no_orphan(
        self, pool: Pool, ptxas: Callable[[str], None]
    ) -> None:
        ptxas("signal.pause()")
        outcome = pool.run({0: "ok"}, timeout_s=5.0)[0].outcome
        assert outcome.label == "compile_timeout"
        assert ended(*pool.pids(), pool.grandchild)


class TestIdleChildren:
    def test_compile_for_the_next_tuning(
        self, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the surroundings of then: the log and the compile cache are other ones."""
        pool.run(dict.fromkeys(range(4), "ok"))
        first = pool.pids()
        monkeypatch.setenv("POOL_LOG", str(tmp_path / "second"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
        second = Pool(tmp_path / "second", tmp_path / "other")
        second.run(dict.fromkeys(range(4), "ok"))
        assert second.pids() == first
        assert sum(name.endswith(".cubin") for name in second.files()) == 4

    def test_do_not_make_more_of_them(self, pool: Pool) -> None:
        """A tuning of fewer configs than there are idle children takes as many as it needs."""
        pool.run(dict.fromkeys(range(2), "ok"))
        for number in range(2, 6):
            pool.run({number: "ok"})
        assert len(pool.pids()) == 2

    def test_idle_children_that_died_are_replaced(self, pool: Pool) -> None:
        pool.run({0: "ok"})
        (pid,) = pool.pids()
        os.kill(pid, signal.SIGKILL)
        assert ended(pid)
        assert pool.run({1: "ok"})[1].outcome.ok
        assert len(pool.pids()) == 2

    def test_idle_children_that_are_about_to_end_are_replaced(
        self, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that ends between its next job and the answer would count as a crash."""
        monkeypatch.setattr(child_handle.idle, "kept_s", 0.0)
        pool.run({0: "ok"})
        pool.run({1: "ok"})
        assert len(pool.pids()) == 2

    def test_idle_children_end_after_a_while(self, pool: Pool) -> None:
        pool.run({0: "ok"})
        assert not ended(*pool.pids(), within_s=0)
        assert ended(*pool.pids(), within_s=IDLE_EXIT_S + 10)

    def test_die_with_their_server(self, pool: Pool) -> None:
        pool.run({0: "ok"})
        plain_server.stop()
        assert ended(*pool.pids())
        assert pool.run({1: "ok"})[1].outcome.ok


def test_a_kernel_larger_than_a_pipe(pool: Pool) -> None:
    """It travels once to each child, which has nothing else to do then."""
    big = JITFunction(kernel)
    big._repr = functools.partial(name_of, bytes(1 << 22))
    pool.kernel = pack_for_compiler(big)
    assert len(pool.kernel) > 1 << 22
    results = pool.run(dict.fromkeys(range(4), "ok"))
    assert all(result.outcome.ok for result in results.values())


def name_of(padding: bytes, specialization: Any) -> str:
    return "kernel"
