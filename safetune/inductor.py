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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune import announce, canonical, device, fallback, miss, regions
from safetune.config import config_digest, config_text
from safetune.errors import TracingError
from safetune.key import TuningKey
from safetune.settings import Mode, Settings
from safetune.store.lookup import open_lookup
from safetune.tuning.jobs import Call, TuningRequest

if TYPE_CHECKING:
    from safetune.autotuner import Autotuner
    from safetune.store.sqlite import Store

logger = logging.getLogger("safetune")

#: What Inductor keeps of a config besides its keyword arguments.
_CARRIED = ("num_warps", "num_stages")

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
        for name, value in {**named_args, **kwargs}.items():
            if isinstance(value, torch.Tensor):
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
        check(number, tuple(facts))
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
        if not torch.compiler.is_dynamo_compiling():
            mark_caches(number, tuple(facts), index, order[0])
        if len(order) == 1 or early is None:
            return [configs[order[0]]]
        left = early(configs, named_args, **kwargs)
        for place in order:
            for config in left:
                if config is configs[place]:
                    return [config]
        return left[:1]

    return choose


@constant
def check(number: str, facts: tuple[Fact, ...]) -> None:
    """Refuse what cannot be traced; raises `TracingError`."""
    name = _tuners[number].base_fn.__name__
    if not any(kind == "tensor" for _, kind, _ in facts):
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
) -> tuple[regions.Regions, ...]:
    """Return `regions` for the arguments whose values are unknown."""
    settings = Settings.current()
    if not names or settings.mode is Mode.OFF:
        return tuple(() for _ in names)
    request = _request(_tuners[number], facts, index)
    return regions.regions(request, names, open_lookup(settings).kin(request.key))


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
        return (_portable(tuner, tuner.configs)[0],)
    request = _request(tuner, facts, index)
    lookup = open_lookup(settings)
    choice = miss.stored(Traced(tuner, request), request, lookup)  # type: ignore[arg-type]
    if choice is None:
        first = fallback.fallback(request, lookup.store)
        missed(Traced(tuner, request, unknown), first, lookup.store)
        return _portable(tuner, _once([first, *fallback.next_best(request, lookup.store)]))
    if not_carried(choice):
        order = _once([choice, *fallback.next_best(request, lookup.store)])
        return (_portable(tuner, order)[0],)
    return _portable(tuner, [choice])


@dataclass(frozen=True)
class Traced:
    """One call as a compiler saw it, without data.

    Attributes:
        unknown: names of key arguments that had no value, as shapes were dynamic.
    """

    tuner: Autotuner
    request: TuningRequest
    unknown: tuple[str, ...] = ()

    def readable_key(self) -> tuple[Any, ...]:
        """Return the key as Triton writes it."""
        return announce.readable_key(self.tuner, dict(self.request.key.values))


def missed(traced: Traced, config: Config, store: Store) -> None:
    """Keep a key that was compiled without a choice, and say so."""
    tuner, request = traced.tuner, traced.request
    name = request.key.kernel.name
    if Settings.current().mode is not Mode.FROZEN:
        from safetune import record  # imports torch

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


def not_carried(config: Config) -> dict[str, Any]:
    """Return the launch options of a config that Inductor would lose without a word."""
    default = Config({}).all_kwargs()
    return {
        name: value
        for name, value in config.all_kwargs().items()
        if name not in config.kwargs and name not in _CARRIED and value != default.get(name)
    }


def _portable(tuner: Autotuner, order: Sequence[Config]) -> tuple[int, ...]:
    """The places of the configs that Inductor can carry; warns where that is not the first."""
    kept = [config for config in order if not not_carried(config)]
    lost = not_carried(order[0])
    if lost:
        name = tuner.base_fn.__name__
        told = f"torch.compile loses {lost} of {name}'s config {config_text(order[0])}"
        if not kept:
            raise TracingError(
                f"{told}, and no other config is without such options: add one, or wrap the launch "
                "in a torch.library.custom_op, which torch.compile leaves alone"
            )
        warnings.warn(f"{told}: {config_text(kept[0])} is compiled instead", stacklevel=2)
    places = {id(config): place for place, config in enumerate(tuner.configs)}
    return tuple(places[id(config)] for config in kept)


def _once(configs: Iterable[Config]) -> list[Config]:
    return list({id(config): config for config in configs}.values())


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
    config.cache_key_tag = f"{users}safetune:{canonical.digest(sorted(_traced.items()))}"


def _request(tuner: Autotuner, facts: tuple[Fact, ...], index: int) -> TuningRequest:
    """What a tuning of the traced call would be asked for, but for its tensors."""
    index = index if index >= 0 else int(device.active_driver().get_current_device())
    found, toolchain = miss.detect(index)
    encoded = {
        name: {"tensor": canonical.dtype_name(what)} if kind == "tensor" else canonical.encode(what)
        for name, kind, what in facts
    }
    dtypes = {name: canonical.dtype_name(what) for name, kind, what in facts if kind == "tensor"}
    key = TuningKey(
        kernel=miss.identity_of(tuner),
        values=tuple((name, encoded[name]) for name in tuner.keys if name in encoded),
        dtypes=tuple((name, dtypes[name]) for name in tuner.arg_names if name in dtypes),
        options=tuple(pair for pair in sorted(encoded.items()) if pair[0] not in tuner.arg_names),
        device=found,
        toolchain=toolchain,
    )
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
        declared=miss.declared_by(tuner),
        limits=tuner.limits,
    )
