"""The part of a list that a process tunes, and what a launcher says of it."""

from __future__ import annotations

import pytest

from safetune.errors import TargetError
from safetune.offline import shards
from safetune.offline.shards import Shard


@pytest.mark.parametrize("count", [1, 3, 4, 30])
def test_each_item_is_in_one_part_and_all_parts_are_as_long(count: int) -> None:
    parts = [Shard(index, count).of(range(20)) for index in range(count)]
    assert sorted(item for part in parts for item in part) == [*range(20)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(part == sorted(part) for part in parts)


def test_parts_of_a_list_from_small_to_large_are_of_one_size() -> None:
    parts = [Shard(index, 2).of(range(12)) for index in (0, 1)]
    assert parts == [[0, 3, 4, 7, 8, 11], [1, 2, 5, 6, 9, 10]]
    assert sum(parts[0]) == sum(parts[1])


@pytest.mark.parametrize(
    ("variables", "text", "shard"),
    [
        ({}, "2/4", Shard(1, 4)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, "auto", Shard(3, 8)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "auto", Shard(0, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "auto", Shard(1, 2)),
    ],
)
def test_a_shard_is_given_or_found_in_the_variables_of_a_launcher(
    variables: dict[str, str], text: str, shard: Shard
) -> None:
    assert shards.parse(text, variables) == shard


@pytest.mark.parametrize(
    ("variables", "text", "said"),
    [
        ({}, "0/4", "is out of range; give 1/4 to 4/4"),
        ({}, "5/4", "is out of range; give 1/4 to 4/4"),
        ({}, "four", "give e.g. 2/4, or auto"),
        ({}, "auto", "start it with srun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "auto", "start it with srun"),
        ({}, "auto/4", "give e.g. 2/4, or auto"),
    ],
)
def test_what_is_not_a_shard_is_an_error_that_says_what_to_give(
    variables: dict[str, str], text: str, said: str
) -> None:
    with pytest.raises(TargetError, match=said):
        shards.parse(text, variables)


def test_the_place_of_a_process_on_its_node_is_its_launchers() -> None:
    assert shards.on_node({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}) == Shard(1, 4)
    slurm = {"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "8(x64)"}
    assert shards.on_node(slurm) == Shard(3, 8)
    assert shards.on_node({"SLURM_LOCALID": "3"}) == Shard(3, 4)
    assert shards.on_node({}) == Shard()
