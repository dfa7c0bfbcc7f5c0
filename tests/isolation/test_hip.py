"""AMD GPUs, on a machine without one: a library of C stands for HIP's, and Triton compiles.

Nothing here says that an AMD GPU does what the library does.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget

from safetune.errors import BackendError
from safetune.isolation import backend, hip
from safetune.isolation.device_bytes import Run
from tests import conftest
from tests.backends import compiled_in_a_child
from tests.conftest import ROOT, FreshProcess
from tests.isolation.conftest import Records

PROGRAM = ROOT / "benchmarks/rocm_isolation.py"
INCLUDED = Path(triton.__file__).parent / "backends/amd/include"
UUID = "GPU-0123456789abcdef"

IN_THE_PROCESS = """
import sys
sys.path.insert(0, ".")
import rocm_isolation as program

device = program.use_device()
kernel = program.tuner(2, 1, do_bench=lambda launch, quantiles: [launch() or 1.0] * 3)
for _ in range(2):
    right = program.is_right(kernel, device)
    print(kernel.best_config.num_warps, right)
"""

#: `benchmarks/rocm.py` on a card that the library stands for.
ROCM = """
import sys
sys.path.insert(0, ".")
import recording, rocm
sys.argv[0] = rocm.__file__
rocm.why_not_here = lambda: ""
recording.device_name = lambda: "AMD Instinct of the test"
CHANGES
rocm.main()
"""
ON_THE_CARD = """
import os, pytest
pytestmark = pytest.mark.gpu
def test_passes():
    assert os.environ["SAFETUNE_EXPERIMENTAL_HIP"] == "1"
def test_fails():
    raise AssertionError("as it should")
def test_skips():
    pytest.skip("no")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("stub") / "libamdhip64.so"
    source = ROOT / "tests/stub_libamdhip64.c"
    command = [compiler, "-shared", "-fPIC", f"-I{INCLUDED}", "-o", made, source]
    subprocess.run(command, check=True)
    return made


class TestTuning:
    """A program launches by Triton's own driver for HIP, on the library of C."""

    @pytest.fixture
    def environment(self, library: Path, tmp_path: Path) -> dict[str, str | None]:
        started = str(tmp_path / "started")
        found = {"TRITON_LIBHIP_PATH": str(library), "STUB_HIP_LOG": started}
        return {**found, "TRITON_INTERPRET": None, "SAFETUNE_LOG": "info"}

    def test_a_config_that_aborts_is_a_verdict_and_the_next_call_works(
        self,
        fresh_process: FreshProcess,
        environment: dict[str, str | None],
        records: Records,
        tmp_path: Path,
    ) -> None:
        environment["SAFETUNE_EXPERIMENTAL_HIP"] = "1"
        done = fresh_process(PROGRAM, "alone", env=environment, warm=True)
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)
        assert [row for row in rows if not row["ok"]] == []
        assert {"the next call is right", "a fault of the device ends a child only"} <= {
            row["check"] for row in rows
        }

        labels = {16: "died(SIGABRT)", 8: "wrong_result", 4: "ok", 2: "ok", 1: "ok"}
        assert records.labels("num_warps") == labels
        (aborted,) = (trial for trial in records.trials() if trial.verdict == "died")
        assert "HW Exception by GPU node-1" in aborted.stderr
        assert "coredump" not in aborted.stderr, "it would take minutes"
        times = [trial.median_ms for trial in records.trials() if trial.verdict == "ok"]
        assert sorted(filter(None, times)) == [1.0, 2.0, 4.0], "those of the library's events"
        (choice,) = records.choices()
        assert '"num_warps":1' in choice[1]
        seen = {line.split()[1] for line in (tmp_path / "started").read_text().splitlines()}
        assert seen == {"(null)"}, "no compile child, which is to see no device, has asked for one"

    def test_without_the_variable_it_is_tuned_in_the_process_with_one_warning(
        self, fresh_process: FreshProcess, environment: dict[str, str | None], cache_dir: Path
    ) -> None:
        done = fresh_process(IN_THE_PROCESS, env=environment, cwd=PROGRAM.parent, warm=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["2 True", "2 True"]
        told = re.findall("TuningWarning: (.*)", done.stderr)
        reason = "there is no isolation for the hip back end yet"
        assert told == [f"safetune: {reason}; kernels are tuned as triton.autotune does"]
        assert not cache_dir.exists(), "nothing is stored"

    @pytest.mark.full
    def test_the_script_for_a_card_writes_what_it_has_found(
        self, fresh_process: FreshProcess, environment: dict[str, str | None], tmp_path: Path
    ) -> None:
        (tmp_path / "test_card.py").write_text(ON_THE_CARD)
        files = [str(tmp_path / "test_card.py")]
        script = f"rocm.TESTS, rocm.BENCHMARKS = {files!r}, ['no_such_benchmark']"
        done = fresh_process(
            ROCM.replace("CHANGES", script), "--out", tmp_path, env=environment, cwd=PROGRAM.parent
        )
        assert done.returncode == 0, done.stderr
        *_, last = done.stdout.splitlines()
        (path,) = tmp_path.glob("*/rocm.json")
        assert f"attach {path}, and the files beside it, to an issue: https://" in last
        result = json.loads(path.read_text())
        assert result["device"] == "AMD_Instinct_of_the_test"
        found = result["figures"]
        assert found["checks_ok"] == found["checks"] == 9
        counts = [found[f"tests_{name}"] for name in ("passed", "failed", "skipped")]
        assert counts == [1, 1, 1]
        assert (found["files_without_a_report"], found["benchmarks_run"]) == (0, 0)
        (tests,) = (row for row in result["rows"] if row["kind"] == "tests")
        assert tests["failures"] == {"test_fails": "AssertionError: as it should"}

    def test_tests_that_need_a_gpu_run_where_the_script_has_named_the_library(
        self, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_LIBHIP_PATH", str(library))
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert conftest._why_no_gpu() == ""


class TestLibrary:
    """What is asked of HIP's library, in this process."""

    @pytest.fixture
    def found(self, library: Path) -> hip.Hip:
        return hip.Hip(ctypes.CDLL(str(library)))

    def test_devices_have_names_and_uuids(self, found: hip.Hip) -> None:
        assert found.device_name(0) == "Stub of an AMD GPU"
        assert found.device_uuids() == (UUID,)
        assert found.why_not_shared(0) == ""
        assert found.capture_id(0) == 0

    def test_once_torch_has_listed_devices_a_child_gets_their_uuids_and_writes_no_core_file(
        self, found: hip.Hip, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        no_core = {"HSA_DISABLE_COREDUMP_ON_EXCEPTION": "1"}
        assert found.visible_environment() == no_core
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        visible = {"ROCR_VISIBLE_DEVICES": UUID, **dict.fromkeys(VARIABLES[1:], "0")}
        assert found.visible_environment() == {**visible, **no_core}

    def test_an_error_names_hips_function_and_hips_error(self, found: hip.Hip) -> None:
        where = found.bytes_of(0)
        with pytest.raises(MemoryError, match="HIP failed: hipMalloc returned hipErrorOutOfMem"):
            where.allocate(1 << 50)
        with pytest.raises(BackendError, match="hipErrorInvalidDevice"):
            found.bytes_of(1).allocate(1)

    def test_memory_is_not_shared_and_no_ptx_is_loaded(self, found: hip.Hip) -> None:
        where = found.bytes_of(0)
        with pytest.raises(BackendError, match="no support of shared memory"):
            where.share(1)
        with pytest.raises(BackendError, match="PTX"):
            where.works()
        memory = where.allocate(3)
        where.set_bytes(Run(memory.address, 3), 7)
        assert where.read(memory.address, 3) == bytes([7, 7, 7])

    def test_the_size_of_its_caches_is_not_known(self, found: hip.Hip) -> None:
        """HIP numbers attributes otherwise than CUDA."""
        assert found.bytes_of(0).l2_bytes() == 0

    def test_every_function_has_a_namesake_in_hips_header(self) -> None:
        header = (INCLUDED / "hip/hip_runtime_api.h").read_text()
        folder = ROOT / "safetune/isolation"
        texts = [(folder / f"{name}.py").read_text() for name in ("cuda", "cuda_driver", "hip")]
        called = {name for text in texts for name in re.findall(r'"(cu[A-Z]\w+)"', text)}
        called |= {f"cuMemsetD{bits}Async" for bits in (8, 16, 32)}
        missing = [n for n in called if not re.search(rf"\bhipError_t {hip.named(n)}\(", header)]
        assert len(called) > 40
        assert missing == []


@pytest.mark.full
def test_the_script_for_a_card_says_what_is_missing_here(fresh_process: FreshProcess) -> None:
    done = fresh_process(ROOT / "benchmarks/rocm.py", warm=True)
    assert done.returncode == 1
    expected = f"this script is for an AMD GPU: torch {torch.__version__} is not built for ROCm"
    assert done.stderr.strip().splitlines()[-1] == expected


@pytest.mark.parametrize("architecture", ["gfx942", pytest.param("gfx950", marks=pytest.mark.full)])
def test_compile_children_compile_for_it(
    architecture: str, triton_cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compiled_in_a_child(GPUTarget("hip", architecture, 64))
    assert compiled.binary is not None
    assert compiled.binary.digest, "it is found in the disk cache"
    (code,) = tmp_path.rglob("*.hsaco")
    assert code.read_bytes()[:4] == b"\x7fELF"


VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def seen(environment: Mapping[str, str], machine: Sequence[str]) -> list[str]:
    """The devices that a process has: ROCm's own rules, from its two runtimes.

    RvdFilter in core/runtime/amd_filter_device.cpp of github.com/ROCm/ROCR-Runtime, and
    Device::init in rocclr/device/rocm/rocdevice.cpp of github.com/ROCm/clr.
    """
    devices = list(machine)
    if (variable := environment.get("ROCR_VISIBLE_DEVICES")) is not None:
        devices = []
        for token in map(str.strip, variable.split(",")[: len(machine)]):
            one = machine.index(token) if token in machine else _index(token)
            if not 0 <= one < len(machine) or machine[one] in devices:
                break
            devices.append(machine[one])
    left = list(devices)
    if chosen := environment.get("HIP_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES"):
        devices = []
        for token in chosen.split(","):
            if not 0 <= _index(token) < len(left):
                break
            if left[_index(token)] not in devices:
                devices.append(left[_index(token)])
    return devices


def _index(token: str) -> int:
    return int(token) if re.fullmatch(r"-?\d+", token) else -1


MACHINES = st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=8, unique=True).map(
    lambda numbers: [f"GPU-{number:016x}" for number in numbers]
)
LISTS = st.lists(st.sampled_from(["0", "1", "2", "3", "7", "-1", "x"]), max_size=5).map(",".join)
ENVIRONMENTS = st.dictionaries(st.sampled_from(VARIABLES), LISTS)


class TestVisibility:
    """Which devices a child sees, by the variables of its parent."""

    @given(MACHINES, ENVIRONMENTS, ENVIRONMENTS)
    def test_a_child_counts_as_its_parent_did_whatever_the_variables_say_now(
        self, machine: list[str], then: dict[str, str], now: dict[str, str]
    ) -> None:
        parents = seen(then, machine)
        given_to_child = hip.visible_devices(parents)
        if parents:
            assert seen({**now, **given_to_child}, machine) == parents
        else:
            assert given_to_child == {}

    @given(MACHINES, ENVIRONMENTS)
    def test_a_compile_child_sees_none(self, machine: list[str], now: dict[str, str]) -> None:
        assert seen({**now, **hip.Hip.hidden}, machine) == []
        assert seen({**now, **backend.hidden_environment()}, machine) == []

    @pytest.mark.parametrize("uuids", [(), (UUID, ""), (UUID, UUID)], ids=str)
    def test_devices_that_no_uuid_tells_apart_are_seen_by_the_parents_variables(
        self, uuids: tuple[str, ...]
    ) -> None:
        assert hip.visible_devices(uuids) == {}

    @given(MACHINES)
    def test_torch_counts_the_same_devices(self, machine: list[str]) -> None:
        """It reads the variables itself, and refuses some combinations."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.version, "hip", "6.3")
            for name, value in hip.visible_devices(machine).items():
                patch.setenv(name, value)
            assert torch.cuda._parse_visible_devices() == list(range(len(machine)))
