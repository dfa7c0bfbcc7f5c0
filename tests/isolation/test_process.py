"""Environment, CPUs, exits and process groups, with real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from safetune.both import protocol
from safetune.isolation.child_handle import describe_exit
from safetune.isolation.compile_pool import usable_cpus
from safetune.isolation.fork_server import child_environment
from tests.conftest import ended

ROOT = Path(__file__).parents[2]

RANKS = [
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "ROLE_NAME", "NNODES"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"),
    *("MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK", "I_MPI_RANK", "JSM_NAMESPACE_RANK", "FLUX_URI"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_NODELIST"),
]
OTHERS = ["RANKS", "MY_RANK", "WORLD", "MASTER_ADDRESS", "SLURMISH", "PATH", "LOCAL", "rank"]


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_is_not_handed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert name not in child_environment()


@pytest.mark.parametrize("name", [*OTHERS, "CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR"])
def test_everything_else_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"value of {name}")
    assert child_environment()[name] == f"value of {name}"


def test_usable_cpus_follows_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    assert 1 <= usable_cpus() <= len(allowed)
    os.sched_setaffinity(0, [min(allowed)])
    try:
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exit 0", "exit code 0"),
        ("exit 3", "exit code 3"),
        ("exit 255", "exit code 255"),
        ("kill -SEGV $$", "SIGSEGV"),
        ("kill -ABRT $$", "SIGABRT"),
        ("kill -KILL $$", "SIGKILL"),
        ("kill -BUS $$", "SIGBUS"),
        ("kill -40 $$", "signal 40"),
    ],
)
def test_an_exit_in_words(command: str, words: str) -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"ulimit -c 0; {command}"], os.environ)
    assert describe_exit(os.waitpid(pid, 0)[1]) == words


def test_an_unknown_exit_is_described_as_unknown() -> None:
    assert describe_exit(None) == "unknown"


class Family:
    """A process and what it prints: pids, one on each line."""

    def __init__(self, command: list[str], *, leads: bool) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=leads,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def end(self) -> None:
        """Kill it, and the group that it leads; do not wait for a process that holds its pipe."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def families() -> Iterator[list[Family]]:
    made: list[Family] = []
    yield made
    for family in made:
        family.end()


def test_a_group_is_killed_with_what_it_started(families: list[Family]) -> None:
    script = 'sleep 1000 & echo $!; (trap "" TERM INT HUP; echo $$; sleep 1000)'
    family = Family(["sh", "-c", script], leads=True)
    families.append(family)
    pids = [int(family.line()), int(family.line())]

    protocol.kill_group(family.process.pid)

    assert family.process.wait(20) == -signal.SIGKILL
    assert ended(*pids)


def test_a_child_that_is_still_in_our_group_is_killed_alone(families: list[Family]) -> None:
    """Between fork and setsid; the group is ours, and stays."""
    family = Family(["sleep", "1000"], leads=False)
    bystander = Family(["sleep", "1000"], leads=False)
    families += [family, bystander]

    protocol.kill_group(family.process.pid)

    assert family.process.wait(20) == -signal.SIGKILL
    assert bystander.process.poll() is None


def test_killing_a_group_that_is_gone_does_not_raise(families: list[Family]) -> None:
    family = Family(["true"], leads=True)
    families.append(family)
    family.process.wait(20)
    protocol.kill_group(family.process.pid)
    assert family.process.returncode == 0


FATHER_AND_SON = """
import os, sys, time
from safetune.child.server_main import die_with_parent

father = os.getpid()
if os.fork() == 0:
    die_with_parent(father if sys.argv[1] == "father" else 1 << 22)
    print(os.getpid(), flush=True)
    time.sleep(1000)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_child_dies_with_its_parent(families: list[Family]) -> None:
    father = Family([sys.executable, "-c", FATHER_AND_SON, "father"], leads=True)
    families.append(father)
    son = int(father.line())

    father.process.kill()

    assert ended(son)


def test_a_child_whose_parent_died_before_it_could_say_so_ends(families: list[Family]) -> None:
    """Its parent is then another process than the one it was told of."""
    father = Family([sys.executable, "-c", FATHER_AND_SON, "stranger"], leads=True)
    families.append(father)
    assert father.line() == "1"
