"""What launches do to the arguments is seen: beside them, around them, and in them."""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from safetune.child import memory, results
from safetune.child.arguments import Arguments
from safetune.child.output_check import OutOfBounds, OutputCheck, WrongResult
from safetune.child.results import MIN_KEPT
from safetune.inputs.snapshot import Snapshot
from safetune.isolation import protocol
from safetune.isolation.device_bytes import DeviceBytes
from safetune.outcome import Effects, Group, Outcome, OutputReport, Verdict
from safetune.tuning.judge import judge
from tests.backends import launching_on
from tests.libcuda import stub

N = 100
PLAIN = Effects()


class Trial:
    """A child's view of a call with `out`, `x` and `part`; its launches are plain functions."""

    device = "cpu"
    rooms: ClassVar[dict[str, int]] = {}

    def __init__(self, *tensors: torch.Tensor, effects: Effects = PLAIN, scratch=()) -> None:
        snapshot = Snapshot(tensors, rooms=self.rooms)
        blocks = [replace(block, device=self.device) for block in snapshot.layout.blocks]
        fds = tuple(map(os.dup, snapshot.shared_fds))
        layout = replace(snapshot.layout, blocks=tuple(blocks), fds=fds)
        self.arguments = Arguments(layout, os.dup(snapshot.fd))
        snapshot.close()
        self.file = os.memfd_create("results")
        self.names = ["out", "x", "part"][: len(tensors)]
        self.groups: list[Group] = []
        self.launches: dict[int, Callable[..., None]] = {}
        self.settings = (effects, scratch)
        self.kept_bytes = 1 << 20
        self.slow_s = 60.0
        self.count = 0
        self.fresh()

    def fresh(self) -> None:
        """Go on as another child would."""
        effects, scratch = self.settings
        given = (self.arguments, self.names, scratch, effects, os.dup(self.file))
        self.launched: list[int] = []
        self.check = OutputCheck(
            *given, kept_bytes=self.kept_bytes, slow_s=self.slow_s, relaunch=self.relaunch
        )

    def relaunch(self, config: int) -> None:
        self.launched.append(config)
        self.launches[config](*self.arguments.tensors)

    def run(self, launch: Callable[..., None]) -> OutputReport:
        run = functools.partial(launch, *self.arguments.tensors)
        self.launches[self.count] = launch
        report = self.check.examine(run, self.groups, self.count)
        self.count += 1
        if report.new_group is not None:
            self.groups.append(report.new_group)
        return report


@pytest.fixture(
    autouse=True, params=["host", "device", pytest.param("shared", marks=pytest.mark.full)]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The arguments are on the host, or on a device whose memory is that of the host; then they
    come through a file, or through memory of that device.
    """
    if request.param == "host":
        yield
        return

    monkeypatch.setattr(DeviceBytes, "tensor", stub.tensor)
    monkeypatch.setattr(Trial, "device", "cuda:0")
    shared = request.param == "shared"
    if shared:
        monkeypatch.setattr(Trial, "rooms", {"cuda:0": 1 << 30})
    with stub.holding_tensors() if shared else launching_on(stub.Cuda(), "cuda"):
        assert isinstance(memory.bytes_on("cuda:0"), DeviceBytes)
        yield
    memory.bytes_on.cache_clear()


@pytest.fixture
def trial() -> Trial:
    generator = torch.Generator().manual_seed(0)
    return Trial(torch.zeros(N), torch.randn(N, generator=generator))


def double(out: torch.Tensor, x: torch.Tensor, *_: torch.Tensor) -> None:
    out.copy_(2 * x)


class TestBounds:
    @pytest.mark.parametrize(
        ("offset", "side"), [(-4, "before"), (4 * N, "after"), (4 * N + 60_000, "after")]
    )
    def test_a_write_beside_a_storage(self, trial: Trial, offset: int, side: str) -> None:
        def wild(out: torch.Tensor, x: torch.Tensor) -> None:
            double(out, x)
            ctypes.memset(out.data_ptr() + offset, 0, 1)

        assert trial.run(double).group == 0
        with pytest.raises(OutOfBounds, match=f"{side} the storage of out"):
            trial.run(wild)

    def test_a_write_into_bytes_that_no_argument_has(self) -> None:
        packed = torch.zeros(N, 3)
        trial = Trial(packed[:, 0], torch.randn(N), packed[:, 2])

        def careless(out: torch.Tensor, x: torch.Tensor, part: torch.Tensor) -> None:
            double(out, x)
            whole = out.as_strided((N, 3), (3, 1), out.storage_offset())
            whole[N - 1, 1] = 1.0

        assert trial.run(double).unowned == ()
        assert trial.run(careless).unowned == ("out/part",)

    def test_views_that_cover_a_storage_together(self) -> None:
        packed = torch.zeros(N, 3)
        trial = Trial(packed[:, 0], packed[:, 1], packed[:, 2])
        assert trial.run(lambda a, b, c: [t.fill_(2.0) for t in (a, b, c)]).unowned == ()


class TestStart:
    def test_every_launch_finds_the_callers_bits(self, trial: Trial) -> None:
        found = []

        def in_place(out: torch.Tensor, x: torch.Tensor) -> None:
            found.append((out.sum().item(), x.sum().item()))
            x += 1

        before = [tensor.clone() for tensor in trial.arguments.tensors]
        trial.run(in_place)
        trial.run(in_place)
        assert found[0] == found[2], "x is overwritten for the second launch of each"
        trial.arguments.restore()
        for tensor, old in zip(trial.arguments.tensors, before, strict=True):
            assert torch.equal(tensor, old)


class TestResults:
    def test_those_that_agree_are_one_group(self, trial: Trial) -> None:
        first = trial.run(double)
        assert first.new_group is not None
        second = trial.run(lambda out, x: out.copy_(x + x))
        assert (second.group, second.new_group, second.difference) == (0, None, "")

    def test_another_child_compares_with_what_the_first_has_left(self, trial: Trial) -> None:
        trial.run(double)
        trial.fresh()
        assert trial.run(double).group == 0
        other = trial.run(lambda out, x: out.copy_(2 * x + 1))
        assert other.group == 2
        assert other.difference == "out differs by up to 1"
        trial.fresh()
        assert trial.run(lambda out, x: out.copy_(2 * x + 1)).group == 2

    def test_results_too_large_for_the_file_are_made_again_by_another_child(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only where they differ: the same bits are known by their checksum."""
        monkeypatch.setattr(results, "_IN_FILE_BYTES", 0)
        trial = Trial(torch.zeros(N), torch.randn(N))
        kept = Trial.device == "cpu"  # there the file is as good

        def near(out: torch.Tensor, x: torch.Tensor) -> None:
            out.copy_(2 * x + 1e-6)

        def more(out: torch.Tensor, x: torch.Tensor) -> None:
            out.copy_(2 * x + 1)

        assert trial.run(double).group == 0
        assert trial.run(near).group == 0
        assert trial.run(more).group == 2
        assert trial.launched == []
        trial.fresh()
        assert trial.run(double).group == 0
        assert trial.launched == []
        assert trial.run(near).group == 0
        assert trial.launched == ([] if kept else [0])
        assert trial.run(more).group == 2
        report = trial.run(lambda out, x: out.copy_(2 * x + 9))
        assert [d.elements for d in report.differences] == [(N, 0), (N, 0)]
        assert trial.launched == ([] if kept else [0, 2])
        assert trial.run(double).group == 0
        trial.arguments.restore()
        assert not trial.arguments.tensors[0].any()

    def test_a_launch_that_writes_nothing_has_another_result(self, trial: Trial) -> None:
        trial.run(double)
        assert trial.run(lambda out, x: None).group == 1

    def test_a_launch_that_writes_more_has_another_result(self, trial: Trial) -> None:
        trial.run(double)

        def more(out: torch.Tensor, x: torch.Tensor) -> None:
            double(out, x)
            x[3] += 5.0

        assert trial.run(more).group == 1

    def test_scratch_is_not_compared(self) -> None:
        tensors = (torch.zeros(N), torch.randn(N), torch.zeros(8))

        def partial(value: float) -> Callable[..., None]:
            def launch(out: torch.Tensor, x: torch.Tensor, part: torch.Tensor) -> None:
                double(out, x)
                part[: int(value)] = value

            return launch

        compared, ignored = Trial(*tensors), Trial(*tensors, scratch=("part",))
        assert [compared.run(partial(value)).group for value in (2.0, 4.0)] == [0, 1]
        assert [ignored.run(partial(value)).group for value in (2.0, 4.0)] == [0, 0]

    def test_a_group_makes_room_for_another(self, trial: Trial) -> None:
        """Where the results are large, few are kept; the tuner says which."""
        trial.kept_bytes = 0
        trial.fresh()
        found = [trial.run(lambda out, x, by=by: out.fill_(by)).group for by in range(MIN_KEPT + 2)]
        assert found == [*range(MIN_KEPT), None, None]
        last = [trial.groups.pop() for _ in range(2)]
        report = trial.run(lambda out, x: out.fill_(99.0))
        assert report.new_group is not None
        assert report.new_group.slot in {group.slot for group in last}
        assert trial.run(lambda out, x: out.fill_(99.0)).group == report.group
        assert trial.run(lambda out, x: out.fill_(0.0)).group == 0

    def test_how_a_result_differs_from_each_other_one_is_counted(self, trial: Trial) -> None:
        def some(count: int, by: float) -> Callable[..., None]:
            def launch(out: torch.Tensor, x: torch.Tensor) -> None:
                double(out, x)
                out[:count] += by

            return launch

        trial.run(double)
        trial.run(some(3, 9.0))
        report = trial.run(some(5, 9.0))
        assert [(d.group, d.elements) for d in report.differences] == [(0, (5, 0)), (1, (2, 0))]
        assert trial.run(double).differences == ()

    def test_with_atomics_a_second_run_shows_how_a_result_varies(self) -> None:
        trial = Trial(torch.zeros(N), torch.randn(N), effects=Effects(atomics=True))
        runs = iter(range(100))

        def unsteady(out: torch.Tensor, x: torch.Tensor) -> None:
            out.copy_(2 * x + 2.0 * (next(runs) % 2))

        assert trial.run(double).spread == (0.0, 0.0)
        assert trial.run(unsteady).spread[0] > 0.5
        assert trial.run(unsteady).spread[0] > 0.5, "it agreed with the first, by its first run"

    def test_another_order_counts_only_where_slots_are_handed_out(self) -> None:
        for effects, group in ((Effects(True), 1), (Effects(True, any_order=True), 0)):
            trial = Trial(torch.zeros(N), torch.randn(N), effects=effects)
            trial.run(double)
            assert trial.run(lambda out, x: out.copy_(2 * x.flip(0))).group == group

    def test_a_full_disk_is_not_held_against_a_config(
        self, trial: Trial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(fd: int, offset: int, size: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(results.os, "posix_fallocate", full)
        assert trial.run(double) == OutputReport(group=None)


class TestStale:
    def test_a_part_that_is_not_written_is_noticed_though_it_was_right(self) -> None:
        x = torch.randn(N)
        trial = Trial(2 * x, x)

        def half(out: torch.Tensor, x: torch.Tensor) -> None:
            out[: N // 2] = 2 * x[: N // 2]

        def nothing(out: torch.Tensor, x: torch.Tensor) -> None:
            pass

        assert not any(trial.run(double).stale)
        assert [(trial.run(bad).group, any(trial.run(bad).stale)) for bad in (half, nothing)] == [
            (0, True),
            (0, True),
        ]

    def test_the_number_of_elements_written_is_known(self) -> None:
        """Whatever is written there, and whatever else has been written by another config."""
        trial = Trial(torch.zeros(N, 3)[:, 1], torch.randn(N))

        def half(out: torch.Tensor, x: torch.Tensor) -> None:
            out[: N // 2] = 2 * x[: N // 2]

        def both(out: torch.Tensor, x: torch.Tensor) -> None:
            double(out, x)
            x.zero_()

        found = [trial.run(launch).written for launch in (double, half, both)]
        assert found == [(N, 0), (N // 2, 0), (N, N)]

    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
    @pytest.mark.parametrize("atomics", [False, True])
    def test_an_integer_that_is_only_stored_is_overwritten_too(
        self, dtype: torch.dtype, atomics: bool
    ) -> None:
        x = torch.randn(N)
        held = (x > 0).to(dtype)
        trial = Trial(held, x, effects=Effects(atomics, only_stored=("out",)))

        def mask(out: torch.Tensor, x: torch.Tensor) -> None:
            out.copy_(x > 0)

        def half(out: torch.Tensor, x: torch.Tensor) -> None:
            out[: N // 2] = x[: N // 2] > 0

        report = trial.run(mask)
        assert (any(report.stale), report.written) == (False, (N, 0))
        report = trial.run(half)
        assert (any(report.stale), report.written) == (True, (N // 2, 0))
        assert any(trial.run(lambda out, x: None).stale)

    def test_an_integer_that_may_be_read_keeps_the_callers_value(self) -> None:
        """It may be an index: another value could lead out of the tensors."""
        seen = []
        for only_stored in ((), ("out",)):
            trial = Trial(torch.arange(N), torch.randn(N), effects=Effects(only_stored=only_stored))

            def count(out: torch.Tensor, x: torch.Tensor) -> None:
                seen.append(int(out.max()) < N)
                out.copy_(torch.arange(N).flip(0))

            trial.run(count)
        assert seen == [True, True, False]

    def test_probes_leave_no_trace(self) -> None:
        packed = torch.randn(N, 3)
        trial = Trial(packed[:, 0], torch.randn(1).expand(N), packed[::2, 2])
        before = [tensor.clone() for tensor in trial.arguments.tensors]
        trial.run(lambda out, x, part: None)
        for tensor, old in zip(trial.arguments.tensors, before, strict=True):
            assert torch.equal(tensor, old)

    def test_with_atomics_zeroes_may_be_asked_for(self) -> None:
        trial = Trial(torch.zeros(N), torch.randn(N), effects=Effects(atomics=True))
        assert not any(trial.run(lambda out, x: out.add_(2 * x)).stale)

    def test_an_update_in_place_depends_on_prior_output(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trial = Trial(torch.zeros(N), torch.randn(N))
        assert any(trial.run(lambda out, x: x.add_(1)).stale)
        if Trial.device != "cpu":  # a sample of the result is enough, wherever that is

            def bits(self: results.Results, group: Group, number: int) -> None:
                raise AssertionError("the other result is looked at")

            monkeypatch.setattr(results.Results, "bits", bits)
        assert any(trial.run(lambda out, x: x.add_(1)).stale)

    def test_a_config_that_is_held_up_at_first_is_launched_once_and_agrees(self) -> None:
        trial = Trial(torch.zeros(N), torch.randn(N))
        launches = []

        def in_place(out: torch.Tensor, x: torch.Tensor) -> None:
            launches.append(x.clone())
            x += 1

        found = []
        for trial.slow_s in (0.0, 60.0):
            trial.fresh()
            found.append(trial.run(in_place))
        held_up, other = found
        assert (held_up.stale, held_up.written, any(other.stale)) == ((), (), True)
        assert len(launches) == 1 + 2, "x is overwritten for the second launch of the other"
        assert judge(dict(enumerate(found)), {0: (1,), 1: (1,)}).candidates == {0, 1}


class TestReference:
    def test_a_result_that_differs_from_the_reference_is_wrong(self, trial: Trial) -> None:
        trial.check.expect({"out": 2 * trial.arguments.tensors[1]}, "reference=")
        assert trial.run(double).group == 0
        with pytest.raises(WrongResult, match="out differs from the reference by up to 0"):
            trial.run(lambda out, x: out.copy_(2 * x + 0.5))

    @pytest.mark.parametrize(
        ("expected", "message"),
        [({"y": torch.zeros(N)}, "'y'"), ({"out": torch.zeros(3)}, r"shape \(3,\) for out")],
    )
    def test_a_reference_that_fits_nothing_is_an_error(
        self, trial: Trial, expected, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            trial.check.expect(expected, "reference=")


def test_a_report_survives_json(trial: Trial) -> None:
    report = replace(trial.run(double), unowned=("x",))
    answer = protocol.Answer(Outcome(Verdict.OK), report)
    header = json.loads(json.dumps(protocol.answer_header(answer, 1)))
    assert protocol.answer_of(header, 1) == answer
