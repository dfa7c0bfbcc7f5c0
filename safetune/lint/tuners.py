"""The tuners in a file: each decorator with configs and a key above a Triton kernel."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from safetune import forks
from safetune.frozen import dataclass
from safetune.keys.effects import Accesses, accesses_of
from safetune.keys.key_names import KernelFacts
from safetune.keys.source_text import children, dotted, last_name, walk
from safetune.keys.written_kernel import WrittenFunction, WrittenHeuristics, WrittenLayer
from safetune.keys.written_key import WrittenKey, buckets_of
from safetune.lint.frames import File, Frame
from safetune.lint.interpret import base_of, decorated, run_around, value_of, values_passed
from safetune.lint.values import UNKNOWN, Items, WrittenConfig

#: What a file with a tuner has in its text.
MENTION = re.compile(r"autotune|safetune|\bconfigs\s*=")

_NAMES = frozenset({"autotune", "safetune"})
_POSITIONS = ("configs", "key", "prune_configs_by", "reset_to_zero", "restore_value")
_KERNELS = (WrittenFunction, WrittenHeuristics, WrittenLayer)

#: The roots of decorators named `jit` that are not Triton's.
_OTHER_JITS = frozenset({"jax", "numba", "tilelang", "torch"})


@dataclass(frozen=True)
class Tuner:
    """A tuner and its kernel, as written."""

    file: File
    frame: Frame
    decorator: ast.Call
    function: ast.FunctionDef
    kernel: Any  # below the tuner
    configs: Items
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.function.name

    @property
    def is_safetunes(self) -> bool:
        """Whether safetune's own decorator is written."""
        owner = dotted(self.decorator.func)
        return "safetune" in owner or getattr(self.frame.get(owner), "__name__", "") == "safetune"

    @forks.cached_property
    def accesses(self) -> Accesses:
        """The parameters that the kernel loads from and stores to."""
        return accesses_of(self.kernel)

    @property
    def is_single(self) -> bool:
        """Whether there is one config: it is launched as it is, and nothing is timed."""
        return self.configs.complete and len(self.configs) == 1

    @property
    def written(self) -> list[WrittenConfig]:
        """The configs that the text tells."""
        return [config for config in self.configs if isinstance(config, WrittenConfig)]

    def names(self, option: str) -> tuple[str, ...] | None:
        """Return the names in an option such as `restore_value`; None where they are not known."""
        value = self.options.get(option)
        if value is None:
            return ()
        if not isinstance(value, (Items, dict)) or not getattr(value, "complete", True):
            return None
        return tuple(value) if all(isinstance(name, str) for name in value) else None

    def key(self) -> WrittenKey | None:
        """Return the key as written; None where the text does not tell it."""
        if self.options.get("key") == "auto":
            return WrittenKey(None)
        names, keep = self.names("key"), self.names("keep")
        if names is None or keep is None:
            return None
        given = self.options.get("key")
        written = {n: f for n, f in given.items() if callable(f)} if isinstance(given, dict) else {}
        buckets = buckets_of(self.name, written)
        return WrittenKey(tuple(dict.fromkeys(names)), keep, tuple(buckets), buckets)

    def facts(self) -> KernelFacts:
        """Return what is known of the kernel."""
        prune = self.options.get("prune_configs_by")
        callbacks = {name: self.options.get(name) for name in ("pre_hook", "post_hook")}
        known = {"prune_configs_by": prune if isinstance(prune, Mapping) else None}
        if prune is not None and not known["prune_configs_by"]:
            known["prune_configs_by"] = {"perf_model": UNKNOWN}  # it may read anything
        return KernelFacts(self.kernel, self.written, {**known, **callbacks})


def tuners_in(file: File) -> Iterator[Tuner]:
    """Yield the tuners in a file, in the order of its lines."""
    tree = file.tree
    if any(isinstance(node, ast.Call) and _is_tuner(node) for node in walk(tree)):
        yield from _below(tree, file.frame)


def _below(node: ast.AST, frame: Frame) -> Iterator[Tuner]:
    for child in children(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _of_function(child, frame)
            if MENTION.search("".join(frame.file.lines[child.lineno : child.end_lineno])):
                yield from _below(child, run_around(child, frame))
            continue
        if isinstance(child, ast.Call) and (tuner := _of_call(child, frame)):
            yield tuner
        yield from _below(child, frame)


def _of_function(node: Any, frame: Frame) -> Iterator[Tuner]:
    for position, decorator in enumerate(node.decorator_list):
        call = _written_call(decorator, frame)
        if call is None or not _is_tuner(call) or _is_another_language(node):
            continue
        kernel = decorated(node, frame, position + 1)
        if isinstance(kernel, _KERNELS):
            yield _tuner(call, node, kernel, frame)


def _of_call(node: ast.Call, frame: Frame) -> Tuner | None:
    """Return the tuner that `triton.autotune(...)(kernel)` makes."""
    call = _written_call(node.func, frame)
    if call is None or not _is_tuner(call) or not node.args:
        return None
    kernel = value_of(node.args[0], frame)
    if isinstance(kernel, WrittenLayer):  # `kernel = tuner(kernel)`: the name is of the tuner now
        kernel = kernel.fn
    if not isinstance(kernel, _KERNELS):
        return None
    return _tuner(call, base_of(kernel), kernel, frame)


def _written_call(decorator: ast.expr, frame: Frame) -> ast.Call | None:
    """Return a decorator's call, also where a name of the module stands for it."""
    if isinstance(decorator, ast.Call):
        return decorator
    if isinstance(decorator, ast.Name):
        for statement in frame.file.tree.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=decorator.id)], value=ast.Call() as call):
                    return call
    return None


def _is_tuner(call: ast.Call) -> bool:
    given = {keyword.arg for keyword in call.keywords}
    return {"configs", "key"} <= given or (
        last_name(call.func) in _NAMES and ("configs" in given or bool(call.args))
    )


def _is_another_language(node: ast.FunctionDef) -> bool:
    calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(dotted(call).partition(".")[0] in _OTHER_JITS for call in calls)


def _tuner(call: ast.Call, node: ast.FunctionDef, kernel: Any, frame: Frame) -> Tuner:
    args, keywords = values_passed(call, frame)
    options: dict[str, Any] = {**dict(zip(_POSITIONS, args, strict=False)), **keywords}
    configs = options.pop("configs", None)
    if not isinstance(configs, Items):
        configs = Items((), complete=False)
    return Tuner(frame.file, frame, call, node, kernel, configs, options)
