"""Safetuned kernels in JAX, on top of jax-triton (the extra `safetune[jax]`).

jax-triton gives XLA every config of a tuner, and XLA tries them on the program's own buffers. Here
safetune chooses first, and XLA gets one plain kernel: aliased buffers are written once, and a call
can be captured and compiled ahead of time.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from safetune.compilers import arrays
from safetune.compilers.resolve import Resolved, resolve
from safetune.errors import InvalidSetting, NoDevice, TracingError
from safetune.inputs.call import checked_grid
from safetune.keys.identity import base_function
from safetune.launch.call_shape import named_arguments
from safetune.messages import counted

#: The launch options that jax-triton passes on to Triton.
_PASSED_ON = ("num_warps", "num_stages", "num_ctas")


def triton_call(
    *args: Any,
    kernel: Any,
    grid: Any,
    out_type: Any = None,
    out_shape: Any = None,
    input_output_aliases: Mapping[int, int] | None = None,
    device: int | None = None,
    **options: Any,
) -> Any:
    """Call a safetuned kernel as `jax_triton.triton_call` does; accepts its other options, too.

    The kernel gets `args`, one pointer per `out_type`, then constants by name. Outside `jax.jit`, a
    key without a choice is tuned on copies of the arrays. Inside, there is no data, so the key must
    have a choice.

    Args:
        grid: integers, or a function of the arguments with the chosen config's values.
        out_type: one `jax.ShapeDtypeStruct`, or a tree of them; `out_shape` is the same.
        input_output_aliases: which input array (counted without scalars) shares memory with which
            output. With jax-triton 0.4 the kernel may have one pointer for both.
        device: index of the GPU whose choice is used if no array is on one.

    Raises:
        MissingChoice: there is no choice and no data to tune on; the message has the command.
        TracingError: under `jax.vmap`, with a config that jax-triton would ignore, or without
            jax-triton.
        InvalidSetting: an alias between arrays of different shapes or dtypes; `kernel` or `grid` is
            not one; an option that the choice sets, such as num_warps, is passed.
    """
    jax, jax_triton = _modules()
    name = getattr(getattr(kernel, "base_fn", None), "__name__", repr(kernel))
    args = _checked_arguments(name, args)
    if (out_type is None) == (out_shape is None):
        raise InvalidSetting(f"{name} needs out_type= (or out_shape=, its alias)")
    outputs, tree = jax.tree_util.tree_flatten(out_shape if out_type is None else out_type)
    aliases = dict(input_output_aliases or {})
    _check_aliases(name, args, outputs, aliases)
    passed = _pop_passed(name, kernel, options)
    by_reference = "out_type" in inspect.signature(jax_triton.triton_call).parameters
    in_place = by_reference and _is_in_place(kernel, len(args), passed, len(outputs), aliases)
    shared = {*aliases.values()} if in_place else set()
    pointed = [output for number, output in enumerate(outputs) if number not in shared]
    contents = [_contents(jax, value) for value in args]
    index = _device(contents) if device is None else device
    resolved = resolve(kernel, (*contents, *pointed), passed, checked_grid(grid), index)
    _check_options(resolved)
    options |= _launch(resolved, len(args) + len(pointed), passed)
    operands = {
        name: resolved.metaparams.get(name, value)
        for name, value in named_arguments(resolved.fn.arg_names, args).items()
    }
    if by_reference:
        pointer_names = None if in_place else resolved.fn.arg_names[len(args) :]
        made = _by_reference(jax, jax_triton, operands, outputs, aliases, pointer_names, options)
    else:
        made = jax_triton.triton_call(
            *operands.values(), out_shape=outputs, input_output_aliases=aliases, **options
        )
    return jax.tree_util.tree_unflatten(tree, made)


def _by_reference(
    jax: Any,
    jax_triton: Any,
    operands: dict[str, Any],
    outputs: Sequence[Any],
    aliases: Mapping[int, int],
    pointer_names: Sequence[str] | None,
    options: dict[str, Any],
) -> list[Any]:
    """Call jax-triton 0.4, where an aliased output is a `Ref` that begins as the input.

    Args:
        pointer_names: names of the outputs' pointers; None if aliased outputs use their inputs'.
    """
    inputs = [name for name, value in operands.items() if arrays.is_array(value)]
    references = {out: jax.new_ref(operands[inputs[source]]) for source, out in aliases.items()}
    if references and options.get("zeroed_outputs"):
        raise InvalidSetting("zeroed_outputs= cannot be passed with input_output_aliases=")
    for source, out in aliases.items():
        if pointer_names is None:
            operands[inputs[source]] = references[out]
        else:
            options[pointer_names[out]] = references[out]
    types = [each for number, each in enumerate(outputs) if number not in references]
    made = iter(jax_triton.triton_call(*operands.values(), out_type=types, **options))
    return [
        references[number][...] if number in references else next(made)
        for number in range(len(outputs))
    ]


def _is_in_place(
    kernel: Any,
    positional: int,
    passed: Mapping[str, Any],
    outputs: int,
    aliases: Mapping[int, int],
) -> bool:
    """Whether the kernel has no pointers for aliased outputs except their inputs' pointers."""
    if not aliases:
        return False
    fn, _ = base_function(kernel)
    pointers = (p for p in fn.params[positional:] if not p.is_constexpr and p.name not in passed)
    return len([*pointers]) < outputs


def _contents(jax: Any, value: Any) -> Any:
    """Return the value of a reference; return any other object unchanged."""
    is_reference = isinstance(value, getattr(jax, "Ref", ())) and not arrays.is_traced(value)
    return value[...] if is_reference else value


def _checked_arguments(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(type(value).__name__ == "BatchTracer" for value in args):
        raise TracingError(
            f"{name} was called under jax.vmap, which cannot batch a Triton kernel: add the batch "
            "to its grid, or wrap the call in jax.custom_batching.custom_vmap"
        )
    # jax-triton takes all numpy scalars but float32 for arrays.
    return tuple(v if type(v).__name__ == "float32" else arrays.plain(v) for v in args)


def _modules() -> tuple[Any, Any]:
    """Import jax and jax-triton.

    jax-triton clears TRITON_CACHE_DIR during its import. It is restored, as safetune compiles into
    that directory.
    """
    directory = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax
        import jax_triton
    except ImportError as error:
        raise TracingError(
            f"triton_call needs jax-triton and a JAX for CUDA ({error}): pip install "
            "'safetune[jax]' and 'jax[cuda12]' or 'jax[cuda13]'"
        ) from error
    finally:
        if directory is not None:
            os.environ["TRITON_CACHE_DIR"] = directory
        elif not os.environ.get("TRITON_CACHE_DIR"):
            os.environ.pop("TRITON_CACHE_DIR", None)
    return jax, jax_triton


def _pop_passed(name: str, kernel: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Take the kernel's own arguments out of the options for jax-triton."""
    for option in _PASSED_ON:
        if option in options:
            raise InvalidSetting(f"{name} gets {option} from its config: call it without {option}=")
    names = getattr(kernel, "arg_names", ())
    return {key: options.pop(key) for key in list(options) if key in names}


def _check_aliases(
    name: str, args: tuple[Any, ...], outputs: list[Any], aliases: Mapping[int, int]
) -> None:
    inputs = [value for value in args if arrays.is_array(arrays.plain(value))]
    for source, target in aliases.items():
        if source not in range(len(inputs)) or target not in range(len(outputs)):
            raise InvalidSetting(
                f"input_output_aliases={{{source!r}: {target!r}}} of {name} is out of range: there "
                f"are {counted(len(inputs), 'input array')} and {counted(len(outputs), 'output')}"
            )
        given, wanted = inputs[source], outputs[target]
        if (tuple(given.shape), given.dtype) != (tuple(wanted.shape), wanted.dtype):
            raise InvalidSetting(
                f"input_output_aliases={{{source}: {target}}} of {name}: {given.dtype}"
                f"{list(given.shape)} cannot share memory with {wanted.dtype}{list(wanted.shape)}"
            )


def _check_options(resolved: Resolved) -> None:
    if lost := resolved.lost(_PASSED_ON):
        raise TracingError(
            f"the config chosen for {resolved.kernel} has {lost}, which jax-triton ignores: use "
            "configs without them"
        )
    try:
        size = resolved.scratch_bytes
    except NoDevice:  # the program is lowered for a GPU that this machine does not have
        return
    if size:
        raise TracingError(
            f"{resolved.kernel} needs {size} bytes of scratch memory for each program, which "
            "jax-triton does not allocate: use a kernel without device-side tensor descriptors"
        )


def _device(args: Sequence[Any]) -> int | None:
    """Return the index of the GPU of the first array that has one; None without such an array."""
    for value in args:
        devices = getattr(value, "devices", None)
        try:
            device = next(iter(devices())) if callable(devices) else None
        except Exception:  # a tracer has the method, and raises
            continue
        if device is not None and device.platform in ("gpu", "cuda"):
            index = getattr(device, "local_hardware_id", None)
            return int(device.id if index is None else index)
    return None


def _launch(resolved: Resolved, positional: int, passed: dict[str, Any]) -> dict[str, Any]:
    """Return the launch by name, with the arguments after the pointers: jax-triton does not know
    defaults.
    """
    defaults = {p.name: p.default for p in resolved.fn.params[positional:] if p.has_default}
    before = resolved.fn.arg_names[:positional]
    chosen = {n: v for n, v in resolved.metaparams.items() if n not in before}
    launch = {name: getattr(resolved, name) for name in ("grid", *_PASSED_ON)}
    return {"kernel": resolved.fn, **launch, **defaults, **passed, **chosen}
