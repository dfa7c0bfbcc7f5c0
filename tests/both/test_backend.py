"""Another kind of device is one file and one line: its back end, and its name in the registry."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safetune.both import backend
from safetune.errors import BackendError, DeviceUnavailable, NoMemory, NotReproducible
from safetune.inputs import memory_budget, pointers, spans
from safetune.isolation import child_handle
from safetune.keys import tuning_key
from safetune.miss.resolve import why_not_isolated
from tests.backends import FakeBackend, launching_on

#: A call on device 0, which is not interpreted.
CALL: Any = SimpleNamespace(interpreted=False, index=0)


class TestWithoutABackend:
    """A kind of device without a back end."""

    def test_nothing_is_tuned_in_a_child(self) -> None:
        with launching_on(None):
            reason = why_not_isolated(CALL)
        assert reason == "safetune cannot isolate configs on fake devices yet"

    def test_a_library_that_cannot_be_loaded_is_a_reason_too(self) -> None:
        with launching_on(None):
            backend.register("fake", BackendError("the fake library cannot be loaded"))
            assert why_not_isolated(CALL) == "the fake library cannot be loaded"
            assert backend.current() is None

    @pytest.mark.parametrize(
        "question",
        [
            pytest.param(lambda: child_handle.check_device(0), id="exclusive modes"),
            pytest.param(lambda: pointers.is_live(False), id="pointers"),
            pytest.param(lambda: memory_budget.device_free(0), id="memory"),
            pytest.param(lambda: spans.reading(torch.device("cuda", 0)).__enter__(), id="copies"),
        ],
    )
    def test_questions_that_tuning_depends_on_raise_instead_of_answering(
        self, question: Any
    ) -> None:
        """Each answered as if all was well: a pointer table went to a child without a word."""
        with launching_on(None), pytest.raises(BackendError, match="on fake devices"):
            question()

    def test_a_process_without_a_device_raises_too(self) -> None:
        with pytest.raises(BackendError, match="Triton finds no device in this process"):
            child_handle.check_device(0)


class TestWithABackend:
    """Nothing but the file `tests/backends.py` knows of this kind of device."""

    def test_the_gate_is_open(self) -> None:
        with launching_on(FakeBackend()):
            assert why_not_isolated(CALL) == ""

    def test_its_captures_are_seen(self) -> None:
        asked = []

        def capture_id(stream: int) -> int:
            asked.append(stream)
            return 42

        with launching_on(FakeBackend(capture_id=capture_id, launch_stream=lambda: 9)):
            assert backend.capture_under_way() == 42
        assert asked == [9]

    def test_its_addresses_are_refused(self) -> None:
        address = 0x7F00_0000_1000
        table = torch.tensor([address, 5])
        with launching_on(FakeBackend(is_known_pointer=address.__eq__)):
            (found,) = filter(pointers.is_live(False), pointers.plausible(table))
        assert found == address
        assert isinstance(pointers.not_reproducible("x", found), NotReproducible)

    def test_a_device_that_cannot_be_shared_is_not_used(self) -> None:
        reason = "device 1 belongs to one process. Set it free with `fakectl`"
        with (
            launching_on(FakeBackend(why_not_shared=lambda index: reason)),
            pytest.raises(DeviceUnavailable, match="Set it free with `fakectl`"),
        ):
            child_handle.check_device(1)

    def test_children_see_its_devices_or_none(self) -> None:
        with launching_on(FakeBackend()):
            sees = child_handle.start_job(gpu_blind=False).environment
            blind = child_handle.start_job(gpu_blind=True).environment
        assert sees["FAKE_VISIBLE_DEVICES"] == "1,0"
        assert blind["CUDA_VISIBLE_DEVICES"] == ""

    def test_its_name_is_in_the_key(self) -> None:
        properties = {"multiprocessor_count": 4, "max_shared_mem": 65536}
        target = SimpleNamespace(backend="fake", arch="f1", warp_size=32)
        active = SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_target=lambda: target,
            utils=SimpleNamespace(get_device_properties=lambda index: properties),
        )
        with launching_on(FakeBackend(), active=active):
            found = tuning_key._described(0)[1]
        assert found == tuning_key.Device("Fake 0", "f1", 4, 65536)

    def test_a_child_uses_the_back_end_that_its_parent_names(self) -> None:
        with launching_on(FakeBackend(works=lambda: False)):
            assert backend.named("fake").use(1) == "fake-1"
            assert not backend.all_work()
        assert backend.all_work()
        with pytest.raises(BackendError, match="safetune cannot isolate configs on other devices"):
            backend.named("other")

    def test_a_short_memory_is_released_and_then_refused(self) -> None:
        released = []
        short = backend.Memory(free=1 << 30, total=80 << 30, unused=1 << 20)
        found = FakeBackend(memory=lambda index: short, release_unused=released.append)
        with launching_on(found), pytest.raises(NoMemory, match="device 3"):
            memory_budget.check_device(3, 4 << 30, {"x": 4 << 30}, lambda index: None)
        assert released == [3]

    @pytest.mark.parametrize(
        ("size", "free", "room"),
        [
            (1 << 20, 20 << 30, 18 << 30),
            (1 << 20, 600 << 20, 0),
            (6 << 30, 10 << 30, 3 << 30),
            (6 << 30, 7 << 30, 0),
            (6 << 30, 40 << 30, 33 << 30),
        ],
    )
    def test_how_much_of_a_second_copy_has_room_on_the_device(
        self, size: int, free: int, room: int
    ) -> None:
        memory = backend.Memory(free=free, total=80 << 30, unused=0)
        with launching_on(FakeBackend(memory=lambda index: memory)):
            found = memory_budget.check_device(0, size, {"x": size}, lambda index: None)
        assert abs(found - room) <= 1 << 30
        assert found <= max(0, free - size)

    def test_every_thread_finds_it(self) -> None:
        """A tuning in the background runs in a thread of its own."""
        found = FakeBackend()
        seen: list[Any] = []
        with launching_on(found):
            thread = threading.Thread(target=lambda: seen.append(backend.required()))
            thread.start()
            thread.join()
        assert seen == [found]
