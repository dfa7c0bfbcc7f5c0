"""The compiler's input for one config, so that another process can compile it without a GPU.

The input (signature, constexprs, attributes, options) comes from the launch itself, because
heuristics and pre-hooks may change any of it. A compile child then writes an entry of Triton's own
disk cache, under the key that the launch will look up.

A launch without hooks is resolved in the caller, on copies of its jit function and heuristics, so
that compilation starts while the measuring child is still starting. A launch with hooks is resolved
in the measuring child, on the rebuilt arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from triton.runtime.jit import JITFunction

from safetune import triton_internals
from safetune.inputs import kernel_pickle
from safetune.keys.tuning_key import current_index

if TYPE_CHECKING:
    from triton.runtime.autotuner import Config

    from safetune.inputs.call import Call
    from safetune.outcome import Binary


def capture_spec(jit: JITFunction, launch: Callable[[], object], device: int) -> bytes:
    """Run `launch` up to the point where Triton would compile, and return the compiler's input.

    Nothing is compiled, loaded or launched.
    """
    return packed(jit, triton_internals.compile_arguments(jit, launch, device))


def packed(jit: JITFunction, spec: tuple[Any, ...]) -> bytes:
    """Return the result of `compile_arguments` as bytes for a compile child."""
    return kernel_pickle.pack(spec, f"the constants of {jit.__name__}", by_value=[jit.fn])


class CallerSpecs:
    """The specs of a call's configs, made in the caller if they are certain to equal the child's.

    The caller's own objects stay unchanged, because other threads may be launching them.
    """

    def __init__(self, call: Call, has_arguments: bool = True, most_shared: int = 0) -> None:
        self._call = call
        self._most_shared = most_shared
        self._kernel, self._jit = triton_internals.private_copy(call.kernel)
        self._usable = has_arguments and self._jit is not None and _plain(call, self._jit)

    def spec_of(
        self, config: Config, values: Mapping[str, Any] | None = None
    ) -> Binary | bytes | None:
        """Return a config's binary if it is in the disk cache, otherwise the result that
        `capture_spec` would have in the measuring child; None if only the child can tell.

        `values` are set by heuristics; if None, the heuristics run now.
        """
        jit = self._jit
        if not self._usable or jit is None or config.pre_hook is not None:
            return None
        args, pinned = self._call.pinned()
        kernel = self._kernel if values is None else jit
        kwargs = {**pinned, **config.all_kwargs(), **(values or {}), "grid": (1,), "warmup": False}
        from safetune import triton_compile  # no kernel of the interpreter comes here

        try:
            spec = triton_internals.compile_arguments(
                jit, lambda: kernel.run(*args, **kwargs), self._call.index
            )
            cached = triton_compile.cached_binary(jit, spec, self._most_shared)
            return cached or packed(jit, spec)
        except Exception:  # the child reports the error
            return None


def _plain(call: Call, jit: JITFunction) -> bool:
    """Whether heuristics are the only code of the user that runs before Triton's compile step."""
    hooks = call.hooks
    return (
        hooks.pre_hook is None
        and hooks.post_hook is None
        and hooks.inputs is None
        and not triton_internals.has_launch_hooks(jit)
        and current_index() == call.index
    )


def pack_for_compiler(jit: JITFunction) -> bytes:
    """Return a jit function as bytes for a compile child.

    Omits `launch_metadata`: only launches need it, and it may need torch.
    """
    copied = copy.copy(jit)
    copied.launch_metadata = None
    return kernel_pickle.pack(copied, jit.__name__, by_value=[jit.fn])
