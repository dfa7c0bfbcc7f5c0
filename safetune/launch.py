"""A launch by Triton's own path: the first of its kind, and whatever a plan does not cover."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune import inductor, plan, scratch
from safetune.rejection import CLEAN_FAILURES, is_callers, relaunch
from safetune.settings import Mode, Settings

if TYPE_CHECKING:
    from safetune.autotuner import Autotuner
    from safetune.call_form import CallForm

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def first(tuner: Autotuner, grid: Any, args: Args, kwargs: Kwargs) -> Any:
    """Launch as Triton does, and remember what it launched for calls that are the same to it."""
    plans = tuner._plans  # others, once anything that a launch depends on is changed
    complete = {**kwargs, "grid": grid, "warmup": False}
    kind = plan.kind(args, kwargs)
    if kind not in plans:
        made = plan.make(tuner, args, kwargs)
        plans[kind] = made and made.launch
    launch = plans[kind]
    if launch is None:
        return by_triton(tuner, args, complete)[0]
    with _no_collection_under_capture():  # it may compile
        kernel, config = by_triton(tuner, args, complete)
    if config is not None:
        launch.plan.remember(grid, args, kwargs, config, kernel)
    return kernel


def by_triton(tuner: Autotuner, args: Args, kwargs: Kwargs) -> tuple[Any, Config | None]:
    """Launch with the chosen config, tuning first if there is none.

    Returns:
        What Triton returns, and the config; None for one that is used for want of another.
    """
    form = tuner._forms.of(args, kwargs)
    if len(tuner.configs) == 1:
        return _run(tuner, None, form, tuner.configs[0], args, kwargs)
    key = form.key(args, kwargs)
    config = tuner.cache.get(key)
    if config is not None:
        return _run(tuner, key, form, config, args, kwargs)
    with _no_collection_under_capture():
        config = tuner._miss(key, form, args, kwargs)
        return _run(tuner, key, form, config, args, kwargs)


def _run(
    tuner: Autotuner, key: Any, form: CallForm, config: Config, args: Args, kwargs: Kwargs
) -> tuple[Any, Config | None]:
    tuner.best_config = config
    if config.pre_hook is not None:
        named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        config.pre_hook({**named, **config.all_kwargs()})
    given_args, given_kwargs = args, kwargs
    if form.pins:
        args, kwargs = form.pinned(args, kwargs)
    options = tuner._options.get(id(config)) or config.all_kwargs()
    try:
        if tuner.needs_scratch:
            return scratch.launch(tuner.fn.run, *args, **kwargs, **options), config
        return tuner.fn.run(*args, **kwargs, **options), config
    except RuntimeError as error:
        if tuner.needs_scratch or not scratch.is_missing(error):
            inductor.refuse_vmap(tuner.base_fn.__name__, given_args)
            raise
        tuner.needs_scratch = True
        return scratch.launch(tuner.fn.run, *args, **kwargs, **options), config
    except CLEAN_FAILURES as error:
        if Settings.current().mode is Mode.OFF or len(tuner.configs) == 1:
            raise
        if is_callers(error, tuner, given_kwargs):
            raise
        return relaunch(tuner, key, form, config, error, (given_args, given_kwargs)), None


def _no_collection_under_capture() -> contextlib.AbstractContextManager[None]:
    from safetune import capture  # the store and the tuning wait for the first miss

    return capture.no_collection() if capture.under_way() else contextlib.nullcontext()
