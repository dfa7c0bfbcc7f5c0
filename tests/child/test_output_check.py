"""What launches do to the arguments is seen: beside them, around them, and in them."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from safetune.both import protocol
from safetune.both.device_bytes import DeviceBytes
from safetune.child import memory, results
from safetune.child.arguments import Arguments
from safetune.child.output_check import Launch, OutOfBounds, OutputCheck, WrongResult
from safetune.inputs.snapshot import Snapshot
from safetune.outcome import Effects, Group, Outcome, OutputReport, Verdict
from safetune.tuning.judge import judge
from tests.backends import launching_on
from tests.libcuda import stub

N = 100
PLAIN = Effects(only_stored=("out",), repeats=True)


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
        self.names = ["out", "x", "part"][: len(tensors)]
        self.groups: list[Group] = []
        self.launches: list[Callable[..., None]] = []
        self.settings = (effects, scratch)
        self.fresh()

    def fresh(self, **options: float) -> None:
        """Go on as another child would."""
        effects, scratch = self.settings
        self.launched: list[int] = []
        self.check = OutputCheck(
            self.arguments, self.names, scratch, effects, self.launch_of, **options
        )

    def launch_of(self, config: int) -> Launch:
        def run(ready: Callable[[], object]) -> None:
            self.launched.append(config)
            ready()
            self.launches[config](*self.arguments.tensors)

        return run

    def run(self, launch: Callable[..., None]) -> OutputReport:
        self.launches.append(launch)
        self.launched.clear()
        report = self.check.examine(self.groups, len(self.launches) - 1)
        self.launched.remove(len(self.launches) - 1)
        if report.new_group is not None:
            self.groups.append(report.new_group)
        return report

    def repeated(self, launch: Callable[..., None], *, rounds: Sequence[int] = ()) -> set[str]:
        """Return the names of what launches leave other bits in: some rounds of several, and more
        of one.
        """
        self.run(launch)
        config = len(self.launches) - 1
        for count in rounds:
            self.check.restore()
            for _ in range(count):
                launch(*self.arguments.tensors)
            self.check.left = config, count
        if not rounds:
            self.check.repeat(config, 4, 0.0, lambda: None)
        self.check.restore()
        return {name for changed, _, name in self.check.varied if changed == config}


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
        assert found[0][1] == found[1][1]
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
        said = r"out differs by [\d.]+ times its typical size more than the tolerance"
        assert re.fullmatch(said, other.difference)
        trial.fresh()
        assert trial.run(lambda out, x: out.copy_(2 * x + 1)).group == 2

    def test_a_small_difference_is_told_of_the_tensor_that_has_it(self) -> None:
        trial = Trial(torch.zeros(N), torch.randn(N), torch.zeros(8))

        def fill(part: torch.Tensor, value: float, out: torch.Tensor, x: torch.Tensor) -> None:
            double(out, x)
            part.fill_(value)

        trial.run(lambda out, x, part: fill(part, 1.0, out, x))
        other = trial.run(lambda out, x, part: fill(part, 1.001, out, x))
        assert other.difference == (
            "part differs within the tolerance, but by more than a few units in the last place"
        )

    def test_another_child_makes_a_result_again_to_compare_with(self, trial: Trial) -> None:
        """Only where they differ: the same bits are known by their checksum."""

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
        assert trial.launched == [0]
        assert trial.run(more).group == 2
        assert trial.launched == []
        report = trial.run(lambda out, x: out.copy_(2 * x + 9))
        assert [[t.elements for t in d.tensors] for d in report.differences] == [[N, 0], [N, 0]]
        assert trial.launched == [2]
        assert trial.run(double).group == 0
        trial.arguments.restore()
        assert not trial.arguments.tensors[0].any()

    def test_of_many_large_results_the_first_are_held(
        self, trial: Trial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(results, "HELD_BYTES", 0)
        trial.fresh()
        count = results.LEAST_HELD + 2
        first = [
            trial.run(lambda out, x, value=value: out.fill_(value + 1)) for value in range(count)
        ]
        assert [report.group for report in first] == [*range(count)]
        for config, again in ((count - 1, [7, 8, 9]), (0, []), (count - 2, [7, 8])):
            report = trial.run(lambda out, x, value=config: out.fill_(value + 1.00001))
            assert (report.group, trial.launched) == (config, again)

    @pytest.mark.parametrize(("slow_s", "again"), [(60.0, [0]), (0.0, [])])
    def test_no_result_is_made_again_once_that_takes_long(
        self, trial: Trial, slow_s: float, again: list[int]
    ) -> None:
        trial.run(double)
        trial.fresh(slow_s=slow_s)
        report = trial.run(lambda out, x: out.fill_(1.0))
        assert trial.launched == again
        assert [each.group for each in report.differences] == again
        assert report.new_group is not None

    def test_without_room_for_it_a_result_is_made_again(
        self, trial: Trial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also that of a config whose earlier result was another one, and was held."""
        trial.run(lambda out, x: out.fill_(1.0))
        where = type(trial.arguments.blocks[0].bytes)
        monkeypatch.setattr(where, "has_room", lambda *size: False)
        trial.launches[0] = double
        report = trial.check.examine([], 0)
        assert report.new_group is not None
        trial.groups = [report.new_group]
        assert trial.run(lambda out, x: out.copy_(2 * x + 1e-6)).group == 0
        assert trial.launched == [0]

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

    def test_how_a_result_differs_from_each_other_one_is_counted(self, trial: Trial) -> None:
        def some(count: int, by: float) -> Callable[..., None]:
            def launch(out: torch.Tensor, x: torch.Tensor) -> None:
                double(out, x)
                out[:count] += by

            return launch

        trial.run(double)
        trial.run(some(3, 9.0))
        report = trial.run(some(5, 9.0))
        found = [(d.group, *(t.elements for t in d.tensors)) for d in report.differences]
        assert found == [(0, 5, 0), (1, 2, 0)]
        assert trial.run(double).differences == ()

    def test_with_atomics_a_second_run_shows_how_a_result_varies(self) -> None:
        trial = Trial(torch.zeros(N), torch.randn(N), effects=Effects(atomics=True))
        assert not trial.repeated(double)
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


class TestWritten:
    """Where the kernel only stores, a launch finds what no config leaves there."""

    def test_a_part_that_is_not_written_is_noticed_though_it_was_right(self) -> None:
        x = torch.randn(N)
        trial = Trial(2 * x, x)

        def half(out: torch.Tensor, x: torch.Tensor) -> None:
            out[: N // 2] = 2 * x[: N // 2]

        found = [trial.run(launch) for launch in (double, half, lambda out, x: None, double)]
        assert [report.group for report in found] == [0, 1, 2, 0]
        assert [report.written[0] for report in found] == [N, N // 2, 0, N]
        differences = [report.differences[0].tensors[0] for report in found[1:3]]
        assert [(d.elements, d.common) for d in differences] == [(N // 2, 0), (N, 0)]

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
    def test_integers_are_overwritten_too(self, dtype: torch.dtype, atomics: bool) -> None:
        x = torch.randn(N)
        held = (x > 0).to(dtype)
        trial = Trial(held, x, effects=Effects(atomics, only_stored=("out",)))

        def half(out: torch.Tensor, x: torch.Tensor) -> None:
            out[: N // 2] = x[: N // 2] > 0

        report = trial.run(lambda out, x: out.copy_(x > 0))
        assert (report.group, report.written) == (0, (N, 0))
        report = trial.run(half)
        assert (report.group, report.written) == (1, (N // 2, 0))
        assert trial.run(lambda out, x: None).group == 2

    @pytest.mark.parametrize(("only_stored", "kept"), [((), True), (("out",), False)])
    def test_what_may_be_read_keeps_the_callers_value(
        self, only_stored: tuple[str, ...], kept: bool
    ) -> None:
        """It may be an index: another value could lead out of the tensors."""
        seen = []
        trial = Trial(torch.arange(N), torch.randn(N), effects=Effects(only_stored=only_stored))

        def count(out: torch.Tensor, x: torch.Tensor) -> None:
            seen.append(int(out.max()) < N)
            out.copy_(torch.arange(N).flip(0))

        trial.run(count)
        assert seen == [kept]

    def test_a_launch_that_fails_leaves_no_trace(self) -> None:
        packed = torch.randn(N, 3)
        trial = Trial(packed[:, 0], torch.randn(1).expand(N), packed[::2, 2])
        before = [tensor.clone() for tensor in trial.arguments.tensors]
        trial.run(lambda out, x, part: None)
        trial.check.restore()
        for tensor, old in zip(trial.arguments.tensors, before, strict=True):
            assert torch.equal(tensor, old)

    def test_with_atomics_zeroes_may_be_asked_for(self) -> None:
        trial = Trial(torch.zeros(N), torch.randn(N), effects=Effects(atomics=True))
        trial.run(lambda out, x: out.add_(2 * x))
        assert trial.run(double).group == 0

    def test_a_config_that_is_held_up_is_launched_once(self) -> None:
        trial = Trial(torch.zeros(N), torch.randn(N), effects=Effects(atomics=True))
        found = []
        for slow_s in (0.0, 60.0):
            trial.fresh(slow_s=slow_s)
            found.append(trial.run(lambda out, x: out.add_(x)))
        assert [len(report.spread) for report in found] == [0, 2]
        assert judge(dict(enumerate(found)), [(1,), (1,)]).candidates == {0, 1}


class TestRepeats:
    """Launches of a config have to leave the same bits; nothing is compared but checksums."""

    @pytest.mark.parametrize("rounds", [(), (1, 1, 1), (2, 5)], ids=str)
    def test_other_bits_are_noticed_however_small_the_difference(
        self, trial: Trial, rounds: tuple[int, ...]
    ) -> None:
        runs = iter(range(100))

        def racy(out: torch.Tensor, x: torch.Tensor) -> None:
            double(out, x)
            out[next(runs) % N] *= 1.001

        assert trial.repeated(racy, rounds=rounds) == {"out"}
        assert trial.repeated(double, rounds=rounds) == set()

    def test_what_is_added_to_is_compared_after_as_many_launches(self, trial: Trial) -> None:
        def in_place(out: torch.Tensor, x: torch.Tensor) -> None:
            x += 1

        assert trial.repeated(in_place, rounds=(2, 5, 2, 5)) == set()
        assert trial.repeated(in_place) == set()
        runs = iter(range(100))
        racy = [lambda out, x: x.add_(next(runs) % 3)] * 2
        assert trial.repeated(racy[0], rounds=(2, 5)) == set()
        assert trial.repeated(racy[1], rounds=(2, 5, 2)) == {"x"}

    def test_scratch_may_hold_anything(self) -> None:
        trial = Trial(torch.zeros(N), torch.randn(N), torch.zeros(8), scratch=("part",))
        runs = iter(range(100))

        def launch(out: torch.Tensor, x: torch.Tensor, part: torch.Tensor) -> None:
            double(out, x)
            part.fill_(next(runs))

        assert trial.repeated(launch) == set()

    def test_every_second_launch_is_beside_other_work(self, trial: Trial) -> None:
        trial.run(double)
        trial.launched.clear()
        disturbed = []
        trial.check.repeat(0, 5, 0.0, lambda: disturbed.append(len(trial.launched)))
        assert (disturbed, len(trial.launched)) == ([1, 3], 5)


class TestReference:
    def test_a_result_that_differs_from_the_reference_is_wrong(self, trial: Trial) -> None:
        trial.check.expect({"out": 2 * trial.arguments.tensors[1]}, "reference=")
        assert trial.run(double).group == 0
        for wrong, how in (
            (
                lambda out, x: out.copy_(2 * x + 0.5),
                r"by 0\.\d+ times its typical size more than the tolerance",
            ),
            (lambda out, x: out.zero_(), r"beyond any tolerance \(zeros, NaN or infinities\)"),
        ):
            with pytest.raises(WrongResult, match=f"^out differs from the reference {how}$"):
                trial.run(wrong)

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
