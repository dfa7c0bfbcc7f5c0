"""A card that is not there: launches go to a list, and everything before them is Triton's own.

    python card.py store | launch

`store` puts a choice for each workload into the store, as a tuning would, and one for a key near a
call that it records;
`launch` launches all of them, then forgets all binaries, preloads them and launches again; it
prints what Triton has told its hooks in both.
"""

# ruff: noqa: E402

import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

import torch
import warm_kernels
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver

import safetune
from safetune import triton_compile
from safetune.both import backend
from safetune.config import config_digest, config_record
from safetune.keys.identity import base_function
from safetune.miss.resolve import Miss
from safetune.offline import tasks
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.store.records import ChoiceRecord, KeyRecord
from tests.backends import FakeBackend

launched: list[str] = []


class Launcher:
    def __init__(self, source, metadata):
        self.name = f"{metadata.name} {metadata.num_warps}"

    def __call__(self, *arguments, **options):
        launched.append(self.name)


target = GPUTarget("cuda", 90, 32)
name = "NVIDIA H100 80GB HBM3"
facts = {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32}
facts |= {"max_num_regs": 65536, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1}
driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        set_current_device=lambda index: None,
        get_current_stream=lambda index: 0,
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cpu"),
        launcher_cls=Launcher,
        utils=SimpleNamespace(
            get_device_properties=lambda index: facts,
            load_binary=lambda *binary: (1, 2, 32, 0, 1024),
            unload_module=lambda module: None,
        ),
    )
)
backend.register(target.backend, FakeBackend(device_name=lambda index: name))


def store():
    (kernel,) = (k for k in tasks.find_kernels(vars(warm_kernels)) if k.tuner.workloads)
    (stream,) = tasks.streams(kernel, "cpu", ("float16",))
    for number, task in enumerate(stream):
        request = tasks.request_for(task)
        choose(request, request.configs[3 - number])
    near = Miss(warm_kernels.fill, (torch.zeros(40), 24), {"grid": (1,)}).request()
    choose(near, near.configs[1])


def choose(request, config):
    lookup = open_lookup(Settings.current())
    lookup.store.put_key(KeyRecord.of(request.key))
    digests = (request.key.digest, 1, config_digest(config))
    lookup.store.put_choice(
        ChoiceRecord(*digests, config_record(config), request.declared, 0.5, 4, 1.0)
    )


def launch():
    for count in (256, 301):
        arguments = warm_kernels.arguments(count, torch.float16)
        warm_kernels.add_one[warm_kernels.grid](*arguments)
    warm_kernels.record_fill()


def watched(*preloaded):
    """Launch all, and return what was seen meanwhile."""
    compilations, hooks = [], []
    launched.clear()
    knobs.compilation.listener = lambda *, cache_hit, **_: compilations.append(cache_hit)
    loaded = safetune.preload(*preloaded, dtypes=["float16"]) if preloaded else 0
    knobs.runtime.jit_post_compile_hook = lambda **event: hooks.append(event["fn"].name)
    launch()
    knobs.runtime.jit_post_compile_hook = None
    found = {"compilations": compilations, "hooks": hooks, "launched": list(launched)}
    return {**found, "loaded": loaded}


kernels = (warm_kernels.add_one, warm_kernels.fill)
if sys.argv[1] == "store":
    store()
    os.environ["SAFETUNE_MODE"] = "record"
    warm_kernels.record_fill()
    with contextlib.suppress(CompilationError):
        warm_kernels.record_broken()
else:
    first = watched()
    for kernel in tasks.find_kernels(dict(enumerate(kernels))):
        triton_compile.forget_binaries(base_function(kernel.tuner.fn)[0])
        kernel.tuner.forget_launches()
    print(json.dumps([first, watched(*kernels)]))
