"""A launch by Triton's own path: the first of its kind, and whatever a plan does not cover."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config, Heuristics

from safetune.launch import fast_path, scratch_memory
from safetune.launch.call_shape import heuristic_values, named_arguments, refuse_vmap
from safetune.miss.relaunch import CLEAN_FAILURES, is_callers, relaunch
from safetune.settings import Mode, Settings

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner
    from safetune.launch.call_shape import CallForm

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def first(tuner: Autotuner, grid: Any, args: Args, kwargs: Kwargs) -> Any:
    """Launch as Triton does, and remember what it launched for calls that are the same to it."""
    plans = tuner._plans  # others, once anything that a launch depends on is changed
    complete = dict(**kwargs, grid=grid, warmup=False)  # raises TypeError for one in kwargs
    kind = fast_path.kind(args, kwargs)
    if kind not in plans:
        made = fast_path.make(tuner, args, kwargs)
        plans[kind] = made and made.launch
    launch = plans[kind]
    if launch is None:
        return by_triton(tuner, args, complete)[0]
    said: Kwargs = {}
    plain = not launch.plan.in_the_way()  # which something may be for this launch alone
    kernel, config = by_triton(tuner, args, complete, said)
    if plain and config is not None:
        launch.plan.remember(args, kwargs, config, kernel, said)
    return kernel


def by_triton(
    tuner: Autotuner, args: Args, kwargs: Kwargs, said: Kwargs | None = None
) -> tuple[Any, Config | None]:
    """Launch with the chosen config, tuning first if there is none.

    Args:
        said: gets what each of the tuner's heuristics says for this launch, by name.

    Returns:
        What Triton returns, and the config; None for one that is used for want of another.
    """
    form = tuner._forms.of(args, kwargs)
    said = {} if said is None else said
    with _no_collection_under_capture():  # Triton may compile, whether the choice is known or not
        if len(tuner.configs) == 1:
            return _run(tuner, None, form, tuner.configs[0], args, kwargs, said)
        key = form.key(args, kwargs)
        config = tuner.states.hits.get(key) or tuner._miss(key, form, args, kwargs)
        return _run(tuner, key, form, config, args, kwargs, said)


def _run(
    tuner: Autotuner,
    key: Any,
    form: CallForm,
    config: Config,
    args: Args,
    kwargs: Kwargs,
    said: Kwargs,
) -> tuple[Any, Config | None]:
    tuner.best_config = config
    if config.pre_hook is not None:
        named = named_arguments(tuner.arg_names, args, kwargs)
        config.pre_hook({**named, **config.all_kwargs()})
    given_args, given_kwargs = args, kwargs
    if form.pins:
        args, kwargs = form.pinned(args, kwargs)
    run = functools.partial(_below_heuristics, tuner.fn, said)
    options = config.all_kwargs()
    try:
        if tuner.needs_scratch:
            return scratch_memory.launch(run, *args, **kwargs, **options), config
        return run(*args, **kwargs, **options), config
    except RuntimeError as error:
        if tuner.needs_scratch or not scratch_memory.is_missing(error):
            refuse_vmap(tuner.base_fn.__name__, given_args)
            raise
        tuner.needs_scratch = True
        return scratch_memory.launch(run, *args, **kwargs, **options), config
    except CLEAN_FAILURES as error:
        if Settings.current().mode is Mode.OFF or len(tuner.configs) == 1:
            raise
        if is_callers(error, tuner, given_kwargs):
            raise
        state = tuner.states.of(key)
        return relaunch(tuner, state, form, config, error, (given_args, given_kwargs)), None


def _below_heuristics(kernel: Any, said: Kwargs, /, *args: Any, **kwargs: Any) -> Any:
    """Launch as `Heuristics.run` does, and note what they say: it decides the binary."""
    if type(kernel) is not Heuristics:
        return kernel.run(*args, **kwargs)
    named = named_arguments(kernel.arg_names, args, kwargs)
    below, values = heuristic_values(kernel, named, exact=True)
    said.update(values)
    return below.run(*args, **{**kwargs, **values})


def _no_collection_under_capture() -> contextlib.AbstractContextManager[None]:
    from safetune.miss import under_capture  # the store and the tuning wait for the first miss

    return under_capture.no_collection() if under_capture.under_way() else contextlib.nullcontext()
