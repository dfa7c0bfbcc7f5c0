"""Which devices a child sees, and when it must not use one. A stub answers for the CUDA driver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.both import cuda
from safetune.both.cuda_driver import Driver
from safetune.errors import BackendError, DeviceUnavailable, WorkerUnavailable
from safetune.isolation import child_handle
from tests.backends import launching_on

FIRST = "3f0c1f2a-8f6e-4a0e-9a51-0d5b8f1f6c11"
SECOND = "b7d0a6de-0c39-4c38-8a2a-5f7f3d2c9e22"
BOTH = f"GPU-{FIRST},GPU-{SECOND}"
PARTITION = "MIG-0f7c4a1e-3b57-5c1d-9d2e-7a8b9c0d1e2f"
OLD_PARTITION = f"MIG-GPU-{FIRST}/1/0"


class TestVisibleDevices:
    @pytest.mark.parametrize(
        "variable",
        [
            pytest.param("0,1", marks=pytest.mark.fault("visible-by-index")),
            pytest.param("1,0", marks=pytest.mark.fault("visible-by-index")),
            pytest.param(BOTH, marks=pytest.mark.fault("visible-by-uuid")),
            pytest.param("GPU-3f0c,GPU-b7d0", marks=pytest.mark.fault("visible-by-uuid")),
            pytest.param("7", id="changed since"),
            pytest.param("", id="emptied since"),
            pytest.param(None, id="unset"),
        ],
    )
    def test_a_child_gets_the_uuids_of_this_processs_devices(self, variable: str | None) -> None:
        assert cuda.visible_devices(variable, (FIRST, SECOND)) == BOTH

    def test_in_this_process_s_order(self) -> None:
        told = cuda.visible_devices("0,1", (SECOND, FIRST))
        assert told == f"GPU-{SECOND},GPU-{FIRST}"

    @pytest.mark.parametrize("variable", ["0,1", "GPU-3f0c", "", None, PARTITION])
    def test_a_process_that_has_listed_none_hands_on_what_is_set(
        self, variable: str | None
    ) -> None:
        assert cuda.visible_devices(variable, ()) == variable

    @pytest.mark.fault("visible-mig")
    @pytest.mark.parametrize("variable", [PARTITION, OLD_PARTITION, f"{PARTITION},{PARTITION}"])
    def test_a_partition_stays_the_partition_and_not_its_whole_card(self, variable: str) -> None:
        assert cuda.visible_devices(variable, (FIRST,)) == variable

    def test_a_child_without_a_gpu_sees_no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", BOTH)
        assert child_handle.start_job(gpu_blind=True).environment["CUDA_VISIBLE_DEVICES"] == ""

    def test_before_cuda_is_initialised_the_variable_is_handed_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        seen = child_handle.start_job(gpu_blind=False).environment["CUDA_VISIBLE_DEVICES"]
        assert seen == "1,0"
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert "CUDA_VISIBLE_DEVICES" not in child_handle.start_job(gpu_blind=False).environment


@pytest.fixture(autouse=True)
def _no_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))


class Library:
    """Stands for libcuda: every device has these attributes, and 0 for each other one."""

    def __init__(self, attributes: dict[int, int] | None = None, error: int = 0) -> None:
        self._attributes = attributes or {}
        self._error = error

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:
        value._obj.value = self._attributes.get(attribute.value, 0)
        return self._error

    def cuGetErrorName(self, error: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_UNKNOWN"
        return 0


@pytest.fixture
def driver() -> Iterator[Callable[..., None]]:
    """A function that has the CUDA driver answer as `Library` does from here on."""
    with contextlib.ExitStack() as stack:

        def answer(library: Library, **options: Any) -> None:
            stack.enter_context(launching_on(cuda.Cuda(Driver(library), **options), "cuda"))

        answer(Library())
        yield answer


@pytest.mark.usefixtures("driver")
class TestCheck:
    def test_nothing_is_wrong_with_a_device_in_its_default_mode(self) -> None:
        child_handle.check_device(0)

    def test_a_driver_that_does_not_answer_is_an_error(self, driver: Callable[..., None]) -> None:
        """An unknown mode was taken for the default one, in which a child may use the device."""
        driver(Library(error=999))
        with pytest.raises(
            BackendError, match="cuDeviceGetAttribute returned CUDA_ERROR_UNKNOWN"
        ) as caught:
            child_handle.check_device(0)
        assert isinstance(caught.value, WorkerUnavailable), "which a miss turns into a warning"

    def test_a_driver_too_old_for_an_attribute_has_it_not(
        self, driver: Callable[..., None]
    ) -> None:
        driver(Library(error=1))
        child_handle.check_device(0)

    @pytest.mark.fault("exclusive-process")
    @pytest.mark.parametrize(("value", "name"), [(2, "PROHIBITED"), (3, "EXCLUSIVE_PROCESS")])
    def test_a_compute_mode_that_forbids_a_second_context_is_an_error(
        self, driver: Callable[..., None], value: int, name: str
    ) -> None:
        driver(Library({cuda.COMPUTE_MODE: value}))
        with pytest.raises(DeviceUnavailable) as caught:
            child_handle.check_device(1)
        text = str(caught.value)
        assert f"device 1 is in compute mode {name}" in text
        assert "--compute-mode=DEFAULT" in text
        assert isinstance(caught.value, WorkerUnavailable), "which a miss turns into a warning"

    def test_the_interpreter_has_no_mode(self, driver: Callable[..., None]) -> None:
        driver(Library({cuda.COMPUTE_MODE: 3}))
        child_handle.check_device(-1)

    @pytest.mark.fault("mps")
    @pytest.mark.parametrize("place", ["in the environment", "by default"])
    def test_a_control_pipe_of_mps(
        self,
        monkeypatch: pytest.MonkeyPatch,
        driver: Callable[..., None],
        tmp_path: Path,
        place: str,
    ) -> None:
        directory = tmp_path / "mps"
        directory.mkdir()
        os.mkfifo(directory / "control")
        daemon = os.open(directory / "control", os.O_RDONLY | os.O_NONBLOCK)
        if place == "by default":
            monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
            driver(Library(), mps_directory=str(directory))
        else:
            monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(directory))
        with pytest.raises(DeviceUnavailable) as caught:
            child_handle.check_device(0)
        assert f"its control pipe is {directory}/control" in str(caught.value)
        assert "every client" in str(caught.value)
        child_handle.check_device(-1)
        os.close(daemon)
        child_handle.check_device(0)

    @pytest.mark.fault("mps")
    def test_a_driver_that_says_so(self, driver: Callable[..., None]) -> None:
        driver(Library({cuda.MPS_ENABLED: 1}))
        with pytest.raises(
            DeviceUnavailable, match=r"shared through MPS \(the driver reports it\)"
        ):
            child_handle.check_device(0)

    @pytest.mark.parametrize("left", ["nothing", "a plain file", "an empty directory"])
    def test_a_path_that_is_not_a_control_pipe_does_not_count_as_mps(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: str
    ) -> None:
        directory = tmp_path / "mps"
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(directory))
        if left != "nothing":
            directory.mkdir()
        if left == "a plain file":
            (directory / "control").touch()
        child_handle.check_device(0)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


class TestPointers:
    """Whether an address is a device's: a wrong no sends it to a process where it means nothing."""

    class Answers(cuda.Cuda):
        """Gets these errors in turn, and notes when a context is bound."""

        def __init__(self, *errors: int) -> None:
            super().__init__(Driver(self))
            self._errors = list(errors)
            self.bound = 0

        def cuPointerGetAttribute(self, *_: Any) -> int:
            return self._errors.pop(0)

        def cuGetErrorName(self, error: int, text: Any) -> int:
            return 1

        def _bind_context(self) -> None:
            self.bound += 1

    def test_known_and_unknown_addresses(self) -> None:
        assert self.Answers(0).is_known_pointer(1 << 40)
        assert not self.Answers(1).is_known_pointer(1 << 40)
        assert not self.Answers(3).is_known_pointer(1 << 40), "no driver call was made before"

    def test_a_thread_without_a_context_asks_again_with_one(self) -> None:
        answers = self.Answers(201, 0)
        assert answers.is_known_pointer(1 << 40)
        assert answers.bound == 1

    @pytest.mark.parametrize("errors", [(700,), (201, 201)])
    def test_another_error_is_not_a_no(self, errors: tuple[int, ...]) -> None:
        with pytest.raises(BackendError, match=f"cuPointerGetAttribute returned error {errors[0]}"):
            self.Answers(*errors).is_known_pointer(1 << 40)


@pytest.mark.usefixtures("driver")
class TestAChildThatDoesNotEnd:
    def test_takes_its_device_out_of_use_until_it_has_ended(
        self, sleeper: subprocess.Popen[bytes]
    ) -> None:
        child_handle._note_stuck(1, sleeper.pid)
        with pytest.raises(DeviceUnavailable, match="on device 1 was killed but has not exited"):
            child_handle.check_device(1)
        child_handle.check_device(0)
        child_handle._note_stuck(1, sleeper.pid)  # again: no descriptor is lost
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()
        child_handle.check_device(1)
        assert child_handle._stuck == {}

    def test_a_stuck_child_that_has_ended_frees_its_device(
        self, sleeper: subprocess.Popen[bytes]
    ) -> None:
        sleeper.kill()
        sleeper.wait()
        child_handle._note_stuck(1, sleeper.pid)
        child_handle.check_device(1)
