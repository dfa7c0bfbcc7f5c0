"""Times of launches on a device, while something holds the host up.

The stub's clock stands still but where a test moves it, and its device works beside the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import pytest

from safetune.both.cuda_driver import Driver
from safetune.both.device_bytes import DeviceBytes, Run
from safetune.both.protocol import Budget
from safetune.both.timing import Sample, measure
from safetune.child.device import DeviceTimer
from safetune.outcome import Timing
from tests.libcuda import stub
from tests.libcuda.stub import driver as driver  # a fixture

KERNEL_MS = 0.02


class Host:
    """A host and a kernel, which it takes as long to launch as a test says."""

    def __init__(self, library: ctypes.CDLL, launches_ms: Callable[[int], float]) -> None:
        self._later, self._queue = library.stub_clock, library.stub_queue
        self._later.restype = ctypes.c_double
        self.flush = library.stub_flush
        for function in (self._later, self._queue, self.flush):
            function.argtypes = [ctypes.c_double]
        self._launches_ms = launches_ms
        self.launched = 0
        self.timer = DeviceTimer(
            DeviceBytes(Driver(library), 0, "cuda:0"), self._clock(self._later)
        )

    @staticmethod
    def _clock(later: Callable[[float], float]) -> Callable[[], float]:
        """A clock without the host: its memory is free as soon as the test is done with it."""
        return lambda: later(0.0) / 1e3

    def launch(self) -> None:
        self._later(self._launches_ms(self.launched))
        self._queue(KERNEL_MS)
        self.launched += 1

    def samples(self, count: int) -> list[Sample]:
        return self.timer.samples(self.launch, lambda: None, lambda: None, count)

    def time_of(self, count: int) -> float:
        """Return the milliseconds until some launches are over."""
        began = self._later(0.0)
        self.samples(count)
        return float(self._later(0.0)) - began

    def measured(self, budget: Budget) -> Timing:
        return measure(self.launch, lambda: None, lambda: None, self.timer, budget)


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    """Makes hosts in a process whose thread has the device's context."""
    library = stub.library()
    with Driver(library).on(0):
        yield lambda launches_ms: Host(library, launches_ms)
    library.stub_real_clock()


@pytest.mark.parametrize(
    ("cache", "flushed"), [(6, 64), (50, 100), (126, 252), (200, 256), (0, 256)]
)
def test_twice_the_cache_is_overwritten(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, cache: int, flushed: int
) -> None:
    """In MiB. To overwrite more would be most of what a small kernel's tuning takes."""
    monkeypatch.setattr(driver, "l2_bytes", lambda index: cache << 20)
    before = driver.memory()[0]
    timer = DeviceTimer(DeviceBytes(driver, 0, "cuda:0"))
    assert before - driver.memory()[0] == flushed << 20
    del timer


def test_other_work_runs_beside_a_launch_on_a_stream_of_its_own(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer, streams = DeviceTimer(DeviceBytes(driver, 0, "cuda:0")), []
    fill = driver.fill

    def noted(address: int, value: int, count: int, width: int = 1, stream: int = 0) -> None:
        streams.append(stream)
        fill(address, value, count, width, stream)

    monkeypatch.setattr(driver, "fill", noted)
    timer.disturb()
    timer.disturb()
    assert streams
    assert len({*streams} - {0}) == 1


def test_the_driver_tells_the_size_of_the_cache(driver: Driver) -> None:
    assert driver.l2_bytes(0) == 50 << 20


def test_what_the_host_does_in_time_is_not_in_the_span(host: Callable[..., Host]) -> None:
    for sample in host(lambda number: 0.01).samples(5):
        assert sample.ms == pytest.approx(KERNEL_MS)
        assert sample.waited_ms == 0.0


def test_a_launch_that_comes_too_late_says_how_long_the_device_waited(
    host: Callable[..., Host],
) -> None:
    first, second = host(lambda number: 5.0 if number == 0 else 0.01).samples(2)
    assert first.ms > 4
    assert first.waited_ms == pytest.approx(5.0)
    assert first.ms - first.waited_ms < KERNEL_MS
    assert second == (pytest.approx(KERNEL_MS), 0.0)


def test_a_stall_gives_no_config_up(host: Callable[..., Host]) -> None:
    """Both first launches took 36 times as long as the others, and more would not be made."""
    stalled = host(lambda number: 0.8 if number < 2 else 0.01)
    found = stalled.measured(Budget(best_ms=KERNEL_MS, time_ms=0.0))
    assert found.median_ms == pytest.approx(KERNEL_MS)
    assert found.p80_ms == pytest.approx(KERNEL_MS)
    assert stalled.launched == 5


def test_a_host_that_is_always_slow_gets_more_time(host: Callable[..., Host]) -> None:
    """Else each launch of a small kernel took as long as Python takes for it."""
    slow = host(lambda number: 0.3)
    assert [sample.waited_ms > 0 for sample in slow.samples(6)] == [True] * 4 + [False] * 2
    in_time = slow.samples(14)
    assert in_time == [(pytest.approx(KERNEL_MS), 0.0)] * 14, "the next config's, too"
    assert [sample.waited_ms > 0 for sample in slow.samples(4)] == [True, True, False, False]


def test_a_late_launch_alone_does_not_make_the_others_longer(host: Callable[..., Host]) -> None:
    """The first one after a pause is slow to launch on many hosts."""
    in_time = host(lambda number: 0.01).time_of(20)
    paused = host(lambda number: 0.15 if number % 20 == 0 else 0.01)
    for _ in range(3):
        assert paused.time_of(20) == pytest.approx(in_time + 0.05, abs=0.01)


def test_a_stall_does_not_make_the_next_launches_longer(host: Callable[..., Host]) -> None:
    """Beside compilers on all cores, each launch would wait for eight flushes."""
    stalled = host(lambda number: 5.0 if number == 0 else 0.15)
    assert [sample.waited_ms > 0 for sample in stalled.samples(4)] == [True, True, True, False]


def test_a_host_that_no_flush_gives_enough_time_gets_eight(host: Callable[..., Host]) -> None:
    """More would only make each launch longer."""
    slow = host(lambda number: 0.4 if number < 8 else 0.0)
    slow.flush(0.01)
    assert all(sample.waited_ms > 0 for sample in slow.samples(8))
    assert slow.time_of(1) == pytest.approx(8 * 0.01 + KERNEL_MS)


def test_what_was_in_time_before_a_late_launch_does_not_count(host: Callable[..., Host]) -> None:
    """Else a slow host got less time again before it had been in time for 16 launches in a row."""
    slower = host(lambda number: 0.05 if number < 10 else 0.15)
    late = [number for number in range(40) if slower.samples(1)[0].waited_ms > 0]
    assert late == [10, 11, 28, 29]


class Walks(DeviceBytes):
    """A device on which one program takes as long as a test says, as does its launch."""

    def __init__(
        self, library: ctypes.CDLL, walks_ms: Sequence[float], launches_ms: Sequence[float] = ()
    ) -> None:
        super().__init__(Driver(library), 0, "cuda:0")
        self._library = library
        self._walks_ms, self._launches_ms = iter(walks_ms), iter(launches_ms)

    def walk(self, run: Run) -> None:
        self._library.stub_clock(ctypes.c_double(next(self._launches_ms, 0.01)))
        self._library.stub_queue(ctypes.c_double(next(self._walks_ms)))


CALM = [0.2] * 25


@pytest.mark.parametrize(
    ("walks_ms", "launches_ms", "is_busy"),
    [
        (CALM, [], False),
        ([0.25, *CALM[1:12], *[0.3] * 13], [], False),  # the clock has fallen
        ([*CALM[:6], 2.2, *CALM[7:]], [], True),  # another process had its turn
        ([2.2, *CALM[1:]], [], False),  # before the first one that counts
        (CALM, [0.01] * 6 + [5.0], False),  # the host was held up
    ],
)
def test_other_work_on_the_device_shows_in_launches_that_take_longer(
    host: Callable[..., Host],
    walks_ms: list[float],
    launches_ms: list[float],
    is_busy: bool,
) -> None:
    host(lambda number: 0.01)  # whose clock the library has from here on
    timer = DeviceTimer(Walks(stub.library(), walks_ms, launches_ms))
    assert timer.is_busy() is is_busy


def test_one_program_walks_over_all_bytes(driver: Driver) -> None:
    where = DeviceBytes(driver, 0, "cuda:0")
    memory = where.allocate(1 << 20)
    run = Run(memory.address, 1 << 20)
    where.set_bytes(run, 3)
    (expected,) = where.checksums([run])
    where.set_bytes(Run(where._slots.address, 8), 0)
    where.walk(run)
    assert where.read(where._slots.address, 8) == expected.to_bytes(8, "little")


def test_replays_follow_each_other_and_count_their_launches(host: Callable[..., Host]) -> None:
    replays = host(lambda number: 0.001)
    found = replays.timer.replays(replays.launch, 20, 3)
    assert found == [(pytest.approx(KERNEL_MS / 20), 0.0)] * 3
    assert replays.launched == 6, "one before each that is timed"
    late = host(lambda number: 0.001 if number % 2 == 0 else 5.0)
    assert all(sample.waited_ms > 0 for sample in late.timer.replays(late.launch, 20, 3))
