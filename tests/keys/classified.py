"""The class of each key name of a kernel, decided as at the first launch of its tuner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from safetune.keys.key_names import KeyReport, classes_of
from safetune.keys.lazy_key import announce
from safetune.keys.written_key import Key, written_key
from safetune.settings import PhantomPolicy


def classify(
    kernel: Any,
    key: Key,
    *,
    configs: Iterable[Any],
    policy: PhantomPolicy = PhantomPolicy.DROP,
    keep: Iterable[str] = (),
    **callbacks: Any,
) -> KeyReport:
    """Return the class of each name in `key`, and warn about those that are dropped."""
    written = written_key(kernel, key, keep, callbacks.get("prune_configs_by"))
    report = classes_of(kernel, written, list(configs), policy, **callbacks)
    announce(kernel, report, policy, is_logged=False)
    return report
