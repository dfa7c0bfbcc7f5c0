"""What torch.compile sees of a safetuned kernel: exactly one config.

Dynamo and Inductor never call a tuner's `run`. They read its configs and its prune function, and
time what that leaves in the caller's process, on live buffers. So the prune function that they
find is `one_config`: traced, it leaves the stored choice, or what is launched without one. What it
needs from the store comes through helpers that Dynamo calls once and takes for constants.

An argument whose value is unknown while tracing (dynamic shapes) is compared with bounds between
the stored keys that have unlike choices: one graph for each choice, whatever the number of values.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune.compilers import dynamic_shapes
from safetune.compilers.inductor_options import not_carried, portable
from safetune.config import config_digest, config_text, declared_digest
from safetune.errors import TracingError
from safetune.keys import device, encoding
from safetune.keys.tuning_key import readable_key, tuning_key
from safetune.miss import candidates, resolve
from safetune.settings import Mode, Settings
from safetune.store.lookup import open_lookup
from safetune.tuning.requests import Call, TuningRequest

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner
    from safetune.store.local.store import Store

logger = logging.getLogger("safetune")

_numbers = itertools.count()
#: By number, written as a string: under dynamic shapes Dynamo makes a variable of an integer.
_tuners: weakref.WeakValueDictionary[str, Autotuner] = weakref.WeakValueDictionary()

#: Key and choice of each kernel in a `triton_op`, for the tag of torch's caches.
_traced: dict[str, str] = {}

#: (name, kind, what) of one argument, all constants: kind is `tensor` or `value`.
Fact = tuple[str, str, Any]


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch._dynamo.assume_constant_result`, without importing torch."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def one_config(tuner: Autotuner) -> Callable[..., list[Config]]:
    """Return the prune function that torch is to find on a tuner in place of the user's."""
    number = str(next(_numbers))
    _tuners[number] = tuner
    early, keys, parameters = tuner.pruning[0], tuple(tuner.keys), tuple(tuner.arg_names)

    def choose(configs: Any, named_args: Any, **kwargs: Any) -> list[Config]:
        """Leave one of `configs`; traced by Dynamo, so it has to stay as plain as it is."""
        import torch
        from torch.fx.experimental.symbolic_shapes import guard_or_false, has_static_value

        facts: list[Fact] = []
        unknown: list[Any] = []
        index = -1
        arguments = {**named_args, **kwargs}
        for name, value in arguments.items():
            if torch.is_tensor(value):  # Dynamo knows that of a descriptor, too, but not its type
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
        compiling = torch.compiler.is_dynamo_compiling()
        launched = compiling or any(
            torch.is_tensor(value) or hasattr(value, "block_shape") for value in arguments.values()
        )
        check(number, launched)
        names = tuple([name for name, _ in unknown])
        bounds = stored_regions(number, tuple(facts), names, index)
        for place, (name, value) in enumerate(unknown):
            chosen = None
            for upper, representative in bounds[place]:
                if upper is None or guard_or_false(value <= upper):  # False: only the data says
                    chosen = representative
                    break
            if chosen is not None:
                facts.append((name, "value", chosen))
        order = best_first(number, tuple(facts), names, index)
        if not compiling:
            mark_caches(number, tuple(facts), index, order[0])
        if len(order) == 1 or early is None:
            return [configs[order[0]]]
        return _best_of(configs, early(configs, named_args, **kwargs), order)

    return choose


def _best_of(configs: Any, left: Any, order: tuple[int, ...]) -> Any:
    """The first in the order that is left; traced by Dynamo, too."""
    for place in order:
        for config in left:
            if config is configs[place]:
                return [config]
    return left[:1]


@constant
def check(number: str, launched: bool) -> None:
    """Refuse what cannot be traced; raises `TracingError`."""
    name = _tuners[number].base_fn.__name__
    if not launched:
        raise TracingError(
            f"{name} was pruned outside a launch, as jax-triton does with a tuner: it would get "
            "every config. Call safetune.integrations.jax.triton_call, or resolve the kernel first"
        )
    refuse_vmap(name)


def refuse_vmap(kernel: str, arguments: Iterable[Any] = ()) -> None:
    """Raise `TracingError` under torch.vmap, which no Triton kernel can be run under."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or ()
    if any(level.key() == functorch.TransformType.Vmap for level in stack) or any(
        isinstance(value, torch.Tensor) and functorch.is_batchedtensor(value) for value in arguments
    ):
        raise TracingError(
            f"{kernel} was called under torch.vmap, which cannot batch a Triton kernel: add the "
            "batch to its grid, or wrap the launch in a torch.library.custom_op with register_vmap"
        )


@constant
def stored_regions(
    number: str, facts: tuple[Fact, ...], names: tuple[str, ...], index: int
) -> tuple[dynamic_shapes.Regions, ...]:
    """Return `regions` for the arguments whose values are unknown."""
    settings = Settings.current()
    if not names or settings.mode is Mode.OFF:
        return tuple(() for _ in names)
    request = _request(_tuners[number], facts, index)
    return dynamic_shapes.regions(request, names, open_lookup(settings).kin(request.key))


@constant
def best_first(
    number: str, facts: tuple[Fact, ...], unknown: tuple[str, ...], index: int
) -> tuple[int, ...]:
    """Return the places in the declared list of what to launch: the stored choice alone, or, for a
    key without one, everything that may be launched meanwhile, best first.

    Raises:
        TracingError: Inductor can carry none of the configs.
    """
    tuner = _tuners[number]
    settings = Settings.current()
    if len(tuner.configs) == 1 or settings.mode is Mode.OFF:
        return (portable(tuner, tuner.configs)[0],)
    request = _request(tuner, facts, index)
    lookup = open_lookup(settings)
    choice = resolve.stored(Traced(tuner, request, facts), request, lookup)  # type: ignore[arg-type]
    if choice is None:
        order = [found.config for found in candidates.fallbacks(request, lookup.store)]
        missed(Traced(tuner, request, facts), order[0], lookup.store)
        return portable(tuner, order)
    if not_carried(choice):
        order = [choice, *candidates.next_best(request, lookup.store)]
        return (portable(tuner, order)[0],)
    return portable(tuner, [choice])


@dataclass(frozen=True)
class Traced:
    """One call as a compiler saw it, without data."""

    tuner: Autotuner
    request: TuningRequest
    facts: tuple[Fact, ...]

    def readable_key(self) -> tuple[Any, ...]:
        """Return the key as Triton writes it."""
        arguments = _arguments(self.facts)
        return readable_key(self.tuner.keys, self.tuner.arg_names, arguments)


def missed(traced: Traced, config: Config, store: Store) -> None:
    """Keep a key that was compiled without a choice, and say so."""
    tuner, request = traced.tuner, traced.request
    name = request.key.kernel.name
    if Settings.current().mode is not Mode.FROZEN:
        from safetune.miss import record  # imports torch

        record.remember(traced, request, store, record.TRACED)  # type: ignore[arg-type]
    logger.info(
        "%s is to be tuned offline for %s: torch.compile found no choice", name, request.key
    )
    if tuner.__dict__.get("_told_of_compile"):
        return
    tuner.__dict__["_told_of_compile"] = True
    warnings.warn(
        f"{name} has no choice for {request.key} and is compiled with {config_text(config)}: "
        "nothing is tuned while torch.compile traces. Call safetune.prepare with what you compile, "
        "or run `safetune tune`; then torch.compiler.reset() and compile again",
        stacklevel=2,
    )


@constant
def mark_caches(number: str, facts: tuple[Fact, ...], index: int, place: int) -> None:
    """Have torch's caches tell apart what was traced with other choices.

    Inductor's own cache key has the config in it. AOT autograd's has that of a `triton_op`'s kernel
    by its source alone, so a changed choice would be served from a stale entry.
    """
    import torch.compiler

    tuner = _tuners[number]
    key = _request(tuner, facts, index).key.digest
    config = getattr(torch.compiler, "config", None)
    if config is None or not hasattr(config, "cache_key_tag"):
        return
    _traced[key] = config_digest(tuner.configs[place])
    users, _, _ = config.cache_key_tag.partition("safetune:")
    config.cache_key_tag = f"{users}safetune:{encoding.digest(sorted(_traced.items()))}"


def _request(tuner: Autotuner, facts: tuple[Fact, ...], index: int) -> TuningRequest:
    """What a tuning of the traced call would be asked for, but for its tensors."""
    index = index if index >= 0 else device.current_index()
    key = tuning_key(tuner.identity, tuner.keys, tuner.arg_names, _arguments(facts), index)
    call = Call(
        kernel=tuner.fn,
        arg_names=tuple(tuner.arg_names),
        args=(),
        kwargs={},
        grid=None,
        pins={},
        hooks=tuner.hooks,
        index=index,
    )
    return TuningRequest(
        key=key,
        call=call,
        configs=tuple(tuner.configs),
        declared=declared_digest(tuner.configs),
        limits=tuner.limits,
    )


def _arguments(facts: tuple[Fact, ...]) -> dict[str, Any]:
    return {
        name: encoding.TensorType(what) if kind == "tensor" else what for name, kind, what in facts
    }
