"""The use of Triton's compiler and its disk cache for a tuning.

Like `triton_internals`, which has the rest, this uses private parts of Triton.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetune.outcome import Binary

#: Options that affect a launch only through the code that they make.
_ONLY_CODE = ("hash", "num_stages", "maxnreg")
#: The first capability with tensor maps.
_HAS_TENSOR_MAPS = 90
#: The metadata that a launcher is built from.
_NO_SCRATCH = SimpleNamespace(
    **dict.fromkeys(("global_scratch_size", "global_scratch_align"), 0),
    **dict.fromkeys(("profile_scratch_size", "profile_scratch_align"), 0),
    launch_cooperative_grid=False,
    launch_pdl=False,
)
#: What a kernel was made of, by its suffix in the disk cache.
_TEXTS = frozenset((".source", ".ttir", ".glir", ".ttgir", ".llir", ".ptx", ".amdgcn"))
#: In an entry of the disk cache that has no code: the shared memory that a launch would need.
_SHARED_BYTES = "safetune.shared_bytes"


def cached_binary(jit: Any, spec: tuple[Any, ...], most_shared: int = 0) -> Binary | None:
    """Return the result of `compiled_binary` if it is in the disk cache."""
    from triton import knobs

    if knobs.compilation.always_compile:
        return None
    with contextlib.suppress(OSError, ValueError, LookupError):  # the compiler writes it again
        source, entry, backend = _entry(jit, spec)
        if most_shared and (note := entry.get_file(_SHARED_BYTES)):
            shared_bytes = int(Path(note).read_text())
            if shared_bytes > most_shared:
                return Binary(shared_bytes)
        name = source.name[:150]  # as Triton does, for the sake of file systems
        if files := entry.get_group(f"{name}.json"):
            metadata = json.loads(Path(files[f"{name}.json"]).read_text())
            seen = {key: value for key, value in metadata.items() if key not in _ONLY_CODE}
            digest = hashlib.sha256(json.dumps(seen, sort_keys=True).encode())
            digest.update(Path(files[f"{name}.{backend.binary_ext}"]).read_bytes())
            return Binary(int(metadata["shared"]), digest.hexdigest())
    return None


def compiled_binary(jit: Any, spec: tuple[Any, ...], most_shared: int = 0) -> Binary:
    """Compile the result of `compile_arguments` into Triton's disk cache, in a compile child.

    Stops early if a launch would need more than `most_shared` bytes of shared memory; 0: no limit.
    """
    from triton.compiler import compile as triton_compile
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources

    *_, options, target = spec
    # In place of the driver: kernels may ask for their target.
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    if found := cached_binary(jit, spec, most_shared):
        return found
    source, entry, _ = _entry(jit, spec)
    began = time.perf_counter()
    try:
        with _within(most_shared if target.backend == "cuda" else 0):
            compiled = triton_compile(source, target=target, options=options)
    except OutOfResources as error:
        entry.put(str(error.required), _SHARED_BYTES, binary=False)
        return Binary(error.required)
    binary = cached_binary(jit, spec) or Binary(int(compiled.metadata.shared))
    return replace(binary, compile_s=time.perf_counter() - began)


def begin_launcher(jit: Any, spec: tuple[Any, ...]) -> None:
    """Build in a thread what Triton 3.6 builds with a C compiler for launches of a kernel.

    That takes 0.3 s, and the first launch would wait for it.
    """
    from triton.backends.nvidia import driver as nvidia

    if spec[-1].backend == "cuda" and hasattr(nvidia, "make_launcher"):
        build = functools.partial(_build_launcher, nvidia.CudaLauncher, jit, spec)
        threading.Thread(target=build, name="safetune-launcher", daemon=True).start()


def _build_launcher(launcher: Any, jit: Any, spec: tuple[Any, ...]) -> None:
    signature, *_, target = spec
    source, *_ = _entry(jit, spec)
    # What a descriptor becomes is known once a kernel is compiled: where the card has them, a map.
    descriptors = sum(str(kind).startswith("tensordesc") for kind in signature.values())
    maps = [dict[str, int]()] * descriptors if target.arch >= _HAS_TENSOR_MAPS else None
    metadata = SimpleNamespace(**vars(_NO_SCRATCH), tensordesc_meta=maps)
    with contextlib.suppress(Exception):  # the launch raises the error
        launcher(source, metadata)


@contextlib.contextmanager
def compiling_for(target: Any, properties: Mapping[str, int]) -> Iterator[None]:
    """Let Triton compile for a device that may be absent, in place of its driver."""
    from triton.runtime import driver

    answers = SimpleNamespace(
        get_current_device=lambda: 0,
        set_current_device=lambda index: None,
        get_current_stream=lambda index: 0,
        get_current_target=lambda: target,
        utils=SimpleNamespace(get_device_properties=lambda index: properties),
    )
    before = driver._active
    driver.set_active(answers)
    try:
        yield
    finally:
        driver._active = before


def forget_binaries(jit: Any) -> None:
    """Make a kernel look up its target and its binaries again."""
    jit.device_caches.clear()


@functools.cache
def load_code_alone() -> None:
    """Let this process read compiled kernels from the disk cache without their source and
    intermediate texts.

    Triton reads all of the texts with each kernel, and they are many times as large as its code.
    """
    from triton.runtime.cache import FileCacheManager

    get_group = FileCacheManager.get_group

    def code_of(entry: Any, name: str) -> Any:
        found = get_group(entry, name) or {}
        return {n: path for n, path in found.items() if Path(n).suffix not in _TEXTS}

    FileCacheManager.get_group = code_of


def _entry(jit: Any, spec: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return the source that Triton compiles, its entry in the disk cache, and the back end."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.runtime import cache

    signature, constexprs, attrs, options, target = spec
    source_type = ASTSource
    if jit.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(jit, signature, constexprs, attrs)
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    key = cache.get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())
    entry = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return source, entry, backend


@contextlib.contextmanager
def _within(most_shared: int) -> Iterator[None]:
    """Have Triton raise `OutOfResources` once it has laid out more shared memory than this.

    LLVM and the assembler come after that. They take most of the time of a compilation, and the
    most for the largest tiles, which no launch could have.
    """
    if not most_shared:
        yield
        return
    from triton._C.libtriton import ir, nvidia
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.errors import OutOfResources

    passes, lower = nvidia.passes.ttgpuir, CUDABackend.make_llir
    lay_out = getattr(passes, "add_allocate_shared_memory_nv", None)
    if lay_out is None:
        yield
        return

    class LaidOut(Exception):
        """The passes up to the one that lays out shared memory have run."""

    def lay_out_alone(trial: Any, manager: Any, *options: Any) -> None:
        lay_out(manager, *options)
        manager.run(trial, "shared memory")
        raise LaidOut

    def checked(backend: Any, module: Any, *options: Any) -> Any:
        needed = 0
        with contextlib.suppress(Exception):  # another Triton: then it is compiled to the end
            trial = _copy_of(module, ir)
            passes.add_allocate_shared_memory_nv = functools.partial(lay_out_alone, trial)
            try:
                lower(backend, trial, *options)
            except LaidOut:
                needed = trial.get_int_attr("ttg.shared") or 0
            finally:
                passes.add_allocate_shared_memory_nv = lay_out
        if needed > most_shared:
            raise OutOfResources(needed, most_shared, "shared memory")
        return lower(backend, module, *options)

    CUDABackend.make_llir = checked
    try:
        yield
    finally:
        CUDABackend.make_llir = lower


def _copy_of(module: Any, ir: Any) -> Any:
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(str(module))
        file.flush()
        copied = ir.parse_mlir_module(file.name, module.context)
    copied.context = module.context
    return copied
