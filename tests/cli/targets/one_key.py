"""A kernel of one key with twenty configs. Every process that tunes notes in the folder TEST_CARDS
which configs it launches; the first one waits in its first launch until another one launches. Where
there is a FIFO `go`, each waits with its second config until someone writes there."""

import contextlib
import os

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


def parent_of(process):
    with open(f"/proc/{process}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def note(arguments):
    folder, tuner = os.environ["TEST_CARDS"], str(parent_of(os.getppid()))
    with open(f"{folder}/card.{tuner}", "a+") as card:
        card.write(f"{arguments['VARIANT']}\n")
        card.seek(0)
        second = len({*card.read().split()}) == 2
    if second and os.path.exists(f"{folder}/go"):
        with contextlib.suppress(FileExistsError):
            os.symlink(tuner, f"{folder}/waited.{tuner}")
            open(f"{folder}/go").close()
    for place, mode in (("first", "r"), ("second", "w")):
        with contextlib.suppress(FileExistsError):
            if mode == "r" or os.readlink(f"{folder}/first") != tuner:
                os.symlink(tuner, f"{folder}/{place}")
                open(f"{folder}/fifo", mode).close()
            return
        if os.readlink(f"{folder}/first") == tuner:
            return


@safetune(
    configs=[triton.Config({"VARIANT": number}) for number in range(20)], key=["N"], pre_hook=note
)
@triton.jit
def add_one(x, N, VARIANT: tl.constexpr):
    offsets = tl.arange(0, 64)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)


@add_one.workload
def vectors(device, dtype):
    yield Workload("64", (1,), (torch.zeros(64, device=device, dtype=dtype), 64))
