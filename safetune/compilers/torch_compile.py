"""The one config that torch.compile sees of a safetuned kernel.

Dynamo and Inductor never call a tuner's `run`. They read its configs and its prune function, and
time the remaining configs in the caller's process, on live buffers. So they find `one_config` as
the prune function: when traced, it returns the stored choice, or else the fallback. Helpers fetch
the choice from the store; Dynamo calls each once and takes the result as a constant.

An argument whose value is unknown while tracing (dynamic shapes) is compared with the bounds
between stored keys with different choices: one graph per choice, whatever the number of values.

Inductor silently drops some launch options of a config; a config with such options is not compiled.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune.config import config_digest, config_text, declared_digest
from safetune.errors import TracingError, TuningWarning
from safetune.inputs.call import Call
from safetune.keys import encoding
from safetune.keys.tuning_key import current_index, triton_key, tuning_key
from safetune.launch.call_shape import is_pruning, refuse_vmap
from safetune.messages import logger, warn
from safetune.settings import Mode, Settings
from safetune.tuning.requests import Grids, TuningRequest

if TYPE_CHECKING:
    from safetune.compilers import dynamic_shapes
    from safetune.launch.call_shape import Tuner
    from safetune.store.local.store import Store

_numbers = itertools.count()
#: The tuners by number, as a string: under dynamic shapes Dynamo makes an integer a variable.
_tuners: weakref.WeakValueDictionary[str, Tuner] = weakref.WeakValueDictionary()

#: The choice for each key that a `triton_op` has launched, for the tag of torch's caches.
_traced: dict[str, str] = {}

#: The launch options that Inductor keeps; it keeps the keyword arguments of a config too.
_INDUCTOR_KEEPS = ("num_warps", "num_stages")

#: (name, kind, content) of an argument, all constants: a `tensor` has its dtype as content, a
#: `descriptor` its `element_type`, a `value` itself.
Fact = tuple[str, str, Any]


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `torch._dynamo.assume_constant_result`, but without importing torch."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def one_config(tuner: Tuner, early: Any) -> Callable[..., list[Config]]:
    """Return the prune function that torch finds on a tuner in place of the user's, `early`."""
    number = str(next(_numbers))
    _tuners[number] = tuner

    def choose(configs: Any, named_args: Any, /, **kwargs: Any) -> list[Config]:
        """Return one of `configs`. Dynamo traces this function, so it has to stay plain."""
        import torch
        from torch.fx.experimental.symbolic_shapes import guard_or_false, has_static_value

        keys, parameters = names_of(number)
        unknown: list[Any] = []
        index = -1
        arguments = {**named_args, **kwargs}
        compiling = torch.compiler.is_dynamo_compiling()
        facts: list[Fact] = list(traced_descriptors() if compiling else descriptors(arguments))
        for name, value in arguments.items():
            if torch.is_tensor(value):  # False for a descriptor, whose class Dynamo does not know
                facts.append((name, "tensor", value.dtype))
                if index < 0 and value.device.index is not None:
                    index = value.device.index
            elif name in keys or name not in parameters:
                if isinstance(
                    value, (int, float, torch.SymInt, torch.SymFloat)
                ) and not has_static_value(value):
                    unknown.append((name, value))
                else:
                    facts.append((name, "value", value))
        launched = compiling or any(
            torch.is_tensor(value) or hasattr(value, "block_shape") for value in arguments.values()
        )
        # Someone else asks what is left: a prune function that wraps this one, or a test.
        if not compiling and (is_pruning() or not (launched or named_args)):
            return configs if early is None else list(early(configs, named_args, **kwargs))
        check(number, launched)
        names = tuple([name for name, _ in unknown])
        bounds = stored_regions(number, tuple(facts), names, index)
        for position, (name, value) in enumerate(unknown):
            chosen = None
            for upper, representative in bounds[position]:
                # False too where only the data of a tensor decides
                if upper is None or guard_or_false(value <= upper):
                    chosen = representative
                    break
            if chosen is not None:
                facts.append((name, "value", chosen))
        order = best_first(number, tuple(facts), names, index, tuple(arguments))
        if not compiling:
            mark_caches(number, tuple(facts), index, order[0])
        if len(order) == 1 or early is None:
            return [configs[order[0]]]
        return _best_of(configs, early(configs, named_args, **kwargs), order)

    return choose


def _best_of(configs: Any, pruned: Any, order: tuple[int, ...]) -> Any:
    """Return the first config in the order that pruning has kept. Dynamo traces this too."""
    for index in order:
        for config in pruned:
            if config is configs[index]:
                return [config]
    return pruned[:1]


def descriptors(arguments: dict[str, Any]) -> tuple[Fact, ...]:
    """Return the facts of the tensor descriptors among the arguments."""
    return tuple(
        (name, "descriptor", encoding.element_type(value))
        for name, value in arguments.items()
        if encoding.is_descriptor(value)
    )


@constant
def traced_descriptors() -> tuple[Fact, ...]:
    """Return the facts of the tensor descriptors among the `arguments` of the function that Dynamo
    traces.

    Traced code cannot query a descriptor; Dynamo keeps its tensor beside the code.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    descriptors_by_name = {}
    # A torch that keeps them elsewhere compiles all other kernels.
    with contextlib.suppress(AttributeError, KeyError):
        traced = InstructionTranslator.current_tx().output.current_tx.symbolic_locals["arguments"]
        for name, variable in traced.items.items():
            if type(variable).__name__ == "TMADescriptorStableVariable":
                tensor = variable.get_tensor().as_proxy().node.meta["example_value"]
                descriptors_by_name[name.vt.as_python_constant()] = SimpleNamespace(
                    base=tensor, strides=tensor.stride(), block_shape=variable.block_shape
                )
    return descriptors(descriptors_by_name)


@constant
def names_of(number: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names in the tuner's key, classifying them if this is their first use, and the
    parameters.
    """
    return tuple(_tuners[number].key_names), tuple(_tuners[number].arg_names)


@constant
def check(number: str, launched: bool) -> None:
    """Raise `TracingError` for a call that cannot be traced."""
    name = _tuners[number].base_fn.__name__
    if not launched:
        raise TracingError(
            f"the configs of {name} were pruned outside a launch; jax-triton does this, and would "
            "get all of them. Call safetune.integrations.jax.triton_call, or resolve the kernel "
            "first"
        )
    refuse_vmap(name)


@constant
def stored_regions(
    number: str, facts: tuple[Fact, ...], names: tuple[str, ...], index: int
) -> tuple[dynamic_shapes.Regions, ...]:
    """Return the regions of the arguments whose values are unknown."""
    from safetune.compilers import dynamic_shapes
    from safetune.store.lookup import open_lookup

    settings = Settings.current()
    if not names or settings.mode is Mode.OFF:
        return tuple(() for _ in names)
    tuner = _tuners[number]
    request = _request(tuner, facts, index)
    related = open_lookup(settings).related(request.key)
    return dynamic_shapes.regions(request, names, related, tuner.key_names.buckets)


@constant
def best_first(
    number: str,
    facts: tuple[Fact, ...],
    unknown: tuple[str, ...],
    index: int,
    passed: tuple[str, ...],
) -> tuple[int, ...]:
    """Return the indices of the configs to launch, best first: only the written or stored choice,
    or, without one, all configs that may be launched.
    """
    from safetune.miss import candidates, resolve  # every tuner has this module
    from safetune.store.lookup import open_lookup

    tuner = _tuners[number]
    settings = Settings.current()
    choice = None if unknown else written(tuner, facts, passed)
    if len(tuner.configs) == 1 or (settings.mode is Mode.OFF and choice is None):
        return (compilable(tuner, tuner.configs)[0],)
    request = _request(tuner, facts, index)
    lookup = open_lookup(settings)
    choice = choice or resolve.stored(tuner, request, lookup).config
    if choice is None:
        order = list(candidates.best_first(request, lookup.store)) or [request.configs[0]]
        missed(tuner, request, order[0], lookup.store)
        return compilable(tuner, order)
    order = [choice]
    if lost_options(choice):
        order += candidates.best_first(request, lookup.store, measured_first=True)
    return compilable(tuner, order)[:1]


def written(tuner: Tuner, facts: tuple[Fact, ...], passed: tuple[str, ...]) -> Config | None:
    """Return the declared config that the program has written into `tuner.cache` for the call."""
    known = _arguments(facts)
    config = tuner.states.written({name: known.get(name) for name in passed})
    if config is None:
        return None
    digest = config_digest(config)
    declared = next((each for each in tuner.configs if config_digest(each) == digest), None)
    if declared is None:
        warn(
            f"the cache of {tuner.base_fn.__name__} has {config_text(config)}, which is not in its "
            "configs: torch.compile compiles declared configs only; add it to configs=",
            TuningWarning,
        )
    return declared


def lost_options(config: Config) -> dict[str, Any]:
    """Return the launch options of a config that Inductor silently drops."""
    default = Config({}).all_kwargs()
    return {
        name: value
        for name, value in config.all_kwargs().items()
        if name not in config.kwargs and name not in _INDUCTOR_KEEPS and value != default.get(name)
    }


def compilable(tuner: Tuner, order: Sequence[Config]) -> tuple[int, ...]:
    """Return the indices of the configs that Inductor keeps intact; warns if the first is not among
    them.

    Raises:
        TracingError: Inductor would lose options of every config.
    """
    whole_configs = [config for config in order if not lost_options(config)]
    lost = lost_options(order[0])
    if lost:
        name = tuner.base_fn.__name__
        problem = f"torch.compile ignores {lost} of {name}'s config {config_text(order[0])}"
        if not whole_configs:
            raise TracingError(
                f"{problem}, and every other config has such options too: add a config without "
                "them, or wrap the launch in a torch.library.custom_op, which torch.compile does "
                "not change"
            )
        warn(f"{problem}: {config_text(whole_configs[0])} is compiled instead", TuningWarning)
    indices = {id(config): index for index, config in enumerate(tuner.configs)}
    return tuple(indices[id(config)] for config in whole_configs)


def missed(tuner: Tuner, request: TuningRequest, config: Config, store: Store) -> None:
    """Record a key that is compiled without a choice; warn once per kernel."""
    from safetune.miss import reporting

    name, settings = request.key.kernel.name, Settings.current()
    if settings.mode is not Mode.FROZEN:
        from safetune.miss import record  # imports torch

        record.remember(request, store, record.TRACED)
    reporting.check_policy(tuner, request, settings)
    logger.info("tune %s offline for %s: torch.compile found no choice", name, request.key)
    if not tuner.first_time("compiled without a choice"):
        return
    warn(
        f"{name} has no choice for {request.key} and is compiled with {config_text(config)}: "
        "nothing is tuned while torch.compile traces. Call safetune.prepare before you compile, "
        "or run `safetune tune`; then torch.compiler.reset() and compile again",
        TuningWarning,
    )


@constant
def mark_caches(number: str, facts: tuple[Fact, ...], index: int, chosen: int) -> None:
    """Add the choice to the key of torch's caches.

    Inductor's own cache key contains the config. AOT autograd's key identifies a `triton_op`'s
    kernel by its source alone, so it would serve a stale entry after a changed choice.
    """
    from torch.compiler import config

    tuner = _tuners[number]
    key = _request(tuner, facts, index).key.digest
    _traced[key] = config_digest(tuner.configs[chosen])
    users, _, _ = config.cache_key_tag.partition("safetune:")
    config.cache_key_tag = f"{users}safetune:{encoding.digest(sorted(_traced.items()))}"


def _request(tuner: Tuner, facts: tuple[Fact, ...], index: int) -> TuningRequest:
    """Return the request for a tuning of the traced call, without its tensors."""
    index = index if index >= 0 else current_index()
    names, arguments = (tuner.key_names, tuner.arg_names), _arguments(facts)
    settings = Settings.current()
    measure = tuner.measure or settings.measure
    same_bits = settings.same_bits_of(tuner.same_bits)
    return TuningRequest(
        known=(Grids.unknown(len(tuner.configs)), None),
        key=tuning_key(tuner.identity, *names, arguments, index, measure),
        call=Call(tuner.fn, tuple(tuner.arg_names), (), {}, None, {}, tuner.hooks, index),
        configs=tuple(tuner.configs),
        declared=declared_digest(tuner.configs, same_bits),
        readable_key=triton_key(tuner.keys, tuner.arg_names, arguments),
        limits=tuner.limits,
        measure=measure,
        same_bits=same_bits,
    )


def _arguments(facts: tuple[Fact, ...]) -> dict[str, Any]:
    stand_ins = {"tensor": encoding.TensorType, "descriptor": encoding.DescriptorType}
    return {
        name: stand_ins[kind](content) if kind in stand_ins else content
        for name, kind, content in facts
    }
