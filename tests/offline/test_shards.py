"""Who begins with which key, and what a launcher says of that."""

from __future__ import annotations

import pytest

from safetune.errors import TargetError
from safetune.offline import shards
from safetune.offline.shards import Shard, State, Turns, Whose


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (4, 1), (1, 3), (3, 2)])
def test_each_item_is_the_own_one_of_one_process_and_every_process_has_all(
    count: int, workers: int
) -> None:
    everyone = [Shard(i, count, w, workers) for i in range(count) for w in range(workers)]
    orders = [shard.order(range(20)) for shard in everyone]
    own = [turn.item for order in orders for turn in order if turn.whose is Whose.OWN]
    assert sorted(own) == [*range(20)]
    for order in orders:
        assert sorted(turn.item for turn in order) == [*range(20)]
        assert [turn.whose for turn in order] == sorted(
            (turn.whose for turn in order), key=[*Whose].index
        )
        of_shard = [turn.item for turn in order if turn.whose is not Whose.SHARDS]
        assert abs(len(of_shard) - 20 / count) < 1


def test_every_item_is_of_one_shard_though_nodes_have_different_numbers_of_workers() -> None:
    """Without leases no shard tunes what is not its own."""
    nodes = [Shard(0, 2, 0, workers=1), Shard(1, 2, 0, workers=2)]
    parts = [
        [turn.item for turn in shard.order(range(20)) if not turn.is_of_shards] for shard in nodes
    ]
    assert sorted(parts[0] + parts[1]) == [*range(20)]


def test_parts_of_a_list_from_small_to_large_are_of_one_size() -> None:
    parts = [Shard(worker=worker, workers=2).order(range(12)) for worker in (0, 1)]
    own = [[turn.item for turn in part if turn.is_own] for part in parts]
    assert own == [[0, 3, 4, 7, 8, 11], [1, 2, 5, 6, 9, 10]]
    assert sum(own[0]) == sum(own[1])


def test_processes_begin_with_the_parts_of_others_at_different_items() -> None:
    first = []
    for index in range(4):
        turns = [turn.item for turn in Shard(index, 4).order(range(20)) if turn.whose != Whose.OWN]
        first.append(turns[0])
    assert len(set(first)) == 4
    assert min(first) >= 16  # their owners begin at the front


class Pauses:
    """What a process sleeps, and the states of items that others tune."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == 5:
            self.states = dict.fromkeys(self.states, State.DONE)


def test_an_item_that_a_process_of_this_node_has_is_not_tried_until_it_is_free() -> None:
    """To try means to make its inputs."""
    pauses = Pauses()
    pauses.states[0] = State.LOCKED
    turns = Turns(Shard().order(range(2)), lambda turn: pauses.states[turn.item], pauses.sleep)
    tried = []
    for turn in turns:
        tried.append((turn.item, len(pauses.slept)))
        if turn.item == 0 and len(tried) == 1:
            turns.put_back(turn)
    assert tried == [(0, 0), (1, 0), (0, 5)]


def test_pauses_grow_while_other_nodes_have_all_that_is_left() -> None:
    pauses = Pauses()
    pauses.states = {0: State.FREE, 1: State.FREE}
    turns = Turns(Shard().order(range(2)), lambda turn: pauses.states[turn.item], pauses.sleep)
    tries = 0
    for turn in turns:
        tries += 1
        if pauses.states[turn.item] is not State.DONE:
            turns.put_back(turn)
    assert tries == 5 + 2  # one after each pause, and each of both when it is done
    assert pauses.slept[-1] > 4 * pauses.slept[0]


def test_many_processes_ask_one_store_seldom_and_end_when_all_is_done() -> None:
    class Ends(Pauses):
        def sleep(self, seconds: float) -> None:
            self.slept.append(seconds)
            if len(self.slept) == 40:
                self.states = dict.fromkeys(self.states, State.DONE)

    pauses, tries = Ends(), 0
    pauses.states = {0: State.FREE}
    turns = Turns(
        Shard(1, 512).order([0]), lambda turn: pauses.states[turn.item], pauses.sleep, processes=512
    )
    for turn in turns:
        tries += 1
        turns.put_back(turn)
    assert len(pauses.slept) == 40, "it does not sleep any more"
    assert max(pauses.slept) <= 5.0, "it looks in its own database meanwhile"
    assert sum(pauses.slept) / tries > 8.0


def test_a_process_with_nothing_else_to_try_helps_others_once() -> None:
    pauses = Pauses()
    pauses.states = {0: State.LOCKED, 1: State.LOCKED, 2: State.LOCKED}
    turns = Turns(
        Shard(worker=0, workers=2).order(range(3)),
        lambda turn: pauses.states[turn.item],
        pauses.sleep,
        helps=True,
    )
    tried = []
    for turn in turns:
        tried.append((turn.item, turn.helps))
        if pauses.states[turn.item] is State.LOCKED:
            turns.put_back(turn)
    assert [helps for _, helps in tried] == [False] * 3 + [True] * 3 + [False] * 3
    assert [sorted(item for item, _ in tried[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_what_others_have_done_is_not_yielded() -> None:
    """The items of other shards never, and where all is tuned again none that is done already."""
    states = {0: State.DONE, 1: State.DONE, 2: State.DONE, 3: State.FREE}

    def yielded(again: bool) -> list[int]:
        turns = Turns(Shard(0, 2).order(range(4)), lambda turn: states[turn.item], again=again)
        return [turn.item for turn in turns]

    assert yielded(again=False) == [0, 3]
    assert yielded(again=True) == [3]


@pytest.mark.parametrize(
    ("variables", "text", "shard"),
    [
        ({}, "2/4", Shard(1, 4)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, "auto", Shard(3, 8)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "auto", Shard(0, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "auto", Shard(1, 2)),
        ({"JOB_COMPLETION_INDEX": "5"}, "auto/6", Shard(5, 6)),
    ],
)
def test_a_shard_is_given_or_found_in_the_variables_of_a_launcher(
    variables: dict[str, str], text: str, shard: Shard
) -> None:
    assert shards.parse(text, variables) == shard


@pytest.mark.parametrize(
    ("variables", "text", "said"),
    [
        ({}, "0/4", "the shards of 4 are 1/4 to 4/4"),
        ({}, "5/4", "the shards of 4 are 1/4 to 4/4"),
        ({}, "four", "give e.g. 2/4, auto, or auto/4"),
        ({}, "auto", "start it with srun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "auto", "start it with srun"),
        ({"JOB_COMPLETION_INDEX": "5"}, "auto", "give --shard auto/N"),
        ({"JOB_COMPLETION_INDEX": "5"}, "auto/4", "the shards of 4 are 1/4 to 4/4"),
    ],
)
def test_what_is_not_a_shard_is_an_error_that_says_what_to_give(
    variables: dict[str, str], text: str, said: str
) -> None:
    with pytest.raises(TargetError, match=said):
        shards.parse(text, variables)


def test_the_place_of_a_process_on_its_node_is_its_launchers() -> None:
    assert shards.on_node({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}) == (1, 4)
    slurm = {"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "8(x64)"}
    assert shards.on_node(slurm) == (3, 8)
    assert shards.on_node({"SLURM_LOCALID": "3"}) == (3, 4)
    assert shards.on_node({}) == (0, 1)
