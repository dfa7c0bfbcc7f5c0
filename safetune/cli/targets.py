"""TARGETs of the command line: `package.module[:kernel]`, `file.py[:kernel]` or a directory."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from safetune.cli.output import echo, location_of, typed
from safetune.errors import NoDevice, TargetError
from safetune.settings import Settings

if TYPE_CHECKING:
    from safetune.offline.tasks import OfflineKernel
    from safetune.store.local.store import Store
    from safetune.store.records import RecordedCall

#: The GPUs that a process sees.
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def workload_options(required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add TARGETs, and the options that choose among their workloads.

    Args:
        required: a TARGET must be given; otherwise the command also takes recorded calls.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for add in (
            click.option(
                "--dtype",
                multiple=True,
                metavar="DTYPE",
                help="Call workloads with this torch dtype.",
            ),
            click.option(
                "--shape", multiple=True, metavar="NAME", help="Only workloads with this name."
            ),
            click.argument("target", nargs=-1, required=required),
        ):
            function = add(function)
        return function

    return decorate


def check_wanted(
    target: Sequence[str], shape: Sequence[str], dtype: Sequence[str], recorded: bool
) -> None:
    """Raise a usage error if the command line names neither workloads nor recorded calls."""
    if not (target or recorded):
        raise click.UsageError("Missing argument 'TARGET...'.")
    if recorded and (shape or dtype):
        raise click.UsageError(
            "--shape and --dtype select workloads; do not combine them with --recorded."
        )


class Named(NamedTuple):
    """The kernels that TARGETs name, and all kernels of their modules.

    `whole`: the names and files of the modules of which a TARGET names all kernels.
    """

    kernels: list[OfflineKernel]
    there: list[OfflineKernel]
    whole: frozenset[str]


def recorded(store: Store, target: Sequence[str]) -> tuple[list[RecordedCall], list[OfflineKernel]]:
    """Return the recorded calls, only of the kernels of TARGETs if there are any, and the kernels.

    This includes calls whose kernel is gone from its file, and excludes kernels that are left to
    Triton. Raises `TargetError` if there is no call.
    """
    from safetune.keys.left_kernels import is_left_by_name
    from safetune.offline.replay import keep_as_recorded

    calls = store.calls()
    keep_as_recorded(calls)
    named, settings = named_by(target, with_workload=False), Settings.current()
    if target:
        keys = store.keys()
        files = {key.digest: os.path.realpath(key.kernel_file) for key in keys}
        calls = [call for call in calls if _is_of(call, files.get(call.key, ""), named)]
    left = [c for c in calls if is_left_by_name(c.name, c.place.replace(":", "."), settings)]
    _tell_left(left)
    if found := [call for call in calls if call not in left]:
        return found, named.kernels
    raise TargetError("no recorded call matches; run the program with SAFETUNE_MODE=record")


def _is_of(call: RecordedCall, file: str, named: Named) -> bool:
    """Whether TARGETs name the kernel of a recorded call, which was in `file`.

    Its kernel may have been edited, or be gone. If another file still has the kernel, a kernel of
    the same name is a different one.
    """
    digest = call.arguments.get("kernel")
    for kernels in (named.kernels, named.there):
        if any(k.name == call.name and k.tuner.identity.digest == digest for k in kernels):
            return kernels is named.kernels
    if not {file, call.place.partition(":")[0]}.isdisjoint(named.whole):
        return True
    same = [kernel for kernel in named.kernels if kernel.name == call.name]
    files = {os.path.realpath(kernel.tuner.identity.file) for kernel in same}
    return file in files or (bool(same) and not os.path.exists(file))


def without_left(kernels: Sequence[OfflineKernel]) -> list[OfflineKernel]:
    """Return the kernels that are not left to Triton; raises `TargetError` without one."""
    from safetune.keys.left_kernels import is_left

    settings = Settings.current()
    left = [kernel for kernel in kernels if is_left(kernel.tuner.fn, settings)]
    if len(left) == len(kernels):
        raise TargetError("SAFETUNE_LEAVE leaves all kernels of TARGET to Triton")
    _tell_left(left)
    return [kernel for kernel in kernels if kernel not in left]


def _tell_left(left: Iterable[RecordedCall | OfflineKernel]) -> None:
    for name in dict.fromkeys(each.name for each in left):
        echo(f"left to Triton by SAFETUNE_LEAVE: {name}", err=True)


def kernels_of(targets: Iterable[str], with_workload: bool = True) -> list[OfflineKernel]:
    """Return the kernels that TARGETs name, as `named_by` does."""
    return named_by(targets, with_workload).kernels


def named_by(targets: Iterable[str], with_workload: bool = True) -> Named:
    """Return the kernels that TARGETs name, without duplicates.

    Without `with_workload`, also kernels under `triton.autotune`.

    Raises:
        TargetError: a TARGET does not import, lacks the kernel, or, with `with_workload`, has no
            kernel with a workload.
    """
    load = functools.cache(_load)
    found: dict[int, OfflineKernel] = {}
    there: list[OfflineKernel] = []
    whole: set[str] = set()
    for target in targets:
        source, _, wanted = target.partition(":")
        modules, wanted = load(source), wanted.removeprefix(":")  # as pytest writes it
        kernels = _kernels_of(source, modules, under_triton=not with_workload)
        named = _named(source, wanted, modules, kernels) if wanted else kernels
        if with_workload:
            _check_workload(source, named)
        there += kernels
        for module in () if wanted else modules:
            whole.update((module.__name__, os.path.realpath(module.__file__ or "")))
        for kernel in named:
            found.setdefault(id(kernel.tuner), kernel)
    return Named(list(found.values()), there, frozenset(whole))


def use_interpreter_without_gpu() -> bool:
    """Switch Triton to its interpreter if there is no GPU and the user has not decided."""
    if "TRITON_INTERPRET" in os.environ:
        return False
    import torch

    if torch.cuda.is_available():
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    return True


def is_interpreted() -> bool:
    """Whether kernels of TARGETs run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def devices_of(text: str) -> dict[str, dict[str, str]]:
    """Return the devices in `all` or `0,3` by name, each as variables that hide all others.

    In the interpreter each number is a process. Raises `TargetError`.
    """
    numbers = text.split(",")
    if text != "all" and not all(number.isdecimal() for number in numbers):
        raise TargetError(f"--devices {text!r} is not a list of GPUs; give all, or e.g. 0,3")
    if is_interpreted():
        return {f"process {number}": {} for number in (numbers if text != "all" else "0")}
    names = _visible_gpus()
    if not names:
        raise NoDevice(f"--devices {text} needs a GPU, but torch finds none")
    if text == "all":
        numbers = [str(number) for number in range(len(names))]
    if missing := [number for number in numbers if int(number) >= len(names)]:
        raise TargetError(
            f"--devices {text}: there is no GPU {', '.join(missing)}; torch finds {len(names)}, "
            "numbered from 0"
        )
    return {f"GPU {number}": {_VISIBLE: names[int(number)]} for number in numbers}


def use_gpu_of_rank(rank: int) -> None:
    """Show this process one of its GPUs, by its rank on the node, before it uses the driver."""
    names = _visible_gpus()
    if len(names) > 1:
        os.environ[_VISIBLE] = names[rank % len(names)]


def _visible_gpus() -> list[str]:
    """Return the GPUs that torch finds, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get(_VISIBLE)
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


def check_device(kernels: Iterable[OfflineKernel]) -> None:
    """Raise `NoDevice` if the kernels cannot run here."""
    from safetune.keys.tuning_key import active_driver

    if not all(kernel.interpreted for kernel in kernels):
        active_driver()


def check_shapes(shapes: Iterable[str], names: Sequence[str]) -> None:
    """Raise `TargetError` for a `--shape` that is not the name of a workload."""
    for shape in shapes:
        if shape not in names:
            known = ", ".join(dict.fromkeys(names))
            raise TargetError(f"no workload is named {shape!r}; the workloads are: {known}")


def _kernels_of(
    source: str, modules: Sequence[ModuleType], under_triton: bool
) -> list[OfflineKernel]:
    """The kernels of some modules, without duplicates; raises `TargetError` without one."""
    from safetune.offline.tasks import find_kernels

    found = [kernel for module in modules for kernel in find_kernels(vars(module), under_triton)]
    if found:
        return list({id(kernel.tuner): kernel for kernel in found}.values())
    raise TargetError(
        f"{source} has no kernel decorated with @safetune; name a module that has one. For "
        "kernels under triton.autotune, use `safetune run`, then `safetune tune --recorded`"
    )


def _named(
    source: str, wanted: str, modules: Sequence[ModuleType], kernels: list[OfflineKernel]
) -> list[OfflineKernel]:
    """The kernels of one name: an attribute first, else a function."""
    values = [getattr(module, wanted, None) for module in modules]
    by_attribute = [k for k in kernels if any(value is k.outer for value in values)]
    by_function = [kernel for kernel in kernels if kernel.name == wanted]
    if not (by_attribute or by_function):
        tuners = {id(kernel.outer) for kernel in kernels}
        attributes = (item for module in modules for item in vars(module).items())
        names = {name for name, value in attributes if id(value) in tuners}
        known = ", ".join(sorted(names.union(kernel.name for kernel in kernels)))
        raise TargetError(f"{source} has no kernel {wanted!r}; it has {known}")
    return by_attribute or by_function


def _check_workload(source: str, kernels: list[OfflineKernel]) -> None:
    if not any(kernel.tuner.workloads for kernel in kernels):
        first = kernels[0]
        tuner = first.name if first.outer is first.tuner else f"{first.name}.fn"
        raise TargetError(
            f"no workload is declared for {', '.join(k.name for k in kernels)} in {source}: "
            f"decorate a function that yields safetune.Workload(...) with @{tuner}.workload, or "
            "give `safetune tune` or `warm` --recorded for the calls of a program"
        )


def _load(source: str) -> list[ModuleType]:
    path = Path(source)
    if not source or (path.is_file() and path.suffix != ".py"):
        raise TargetError(
            f"TARGET {source!r} is not a .py file, a directory or a module; give "
            "package.module[:kernel], file.py[:kernel] or a directory"
        )
    is_package = source.isidentifier() and (path / "__init__.py").is_file()
    if path.is_dir() and not is_package:
        return [_imported(str(file)) for file in _files_with_kernels(path)]
    if source.endswith(".py") and not path.is_file():
        raise TargetError(f"{source} is not a file")
    return [_imported(source)]


def _imported(source: str) -> ModuleType:
    try:
        if source.endswith(".py"):
            return _load_file(Path(source).resolve())
        from safetune.offline.imports import import_named

        return import_named(source)
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"{source} cannot be imported: {typed(error)}{location_of(error)}"
        ) from error


def _files_with_kernels(directory: Path) -> list[Path]:
    """The files below a directory whose text may declare workloads; no other file is run."""
    found = []
    for file in sorted(directory.rglob("*.py")):
        parts = file.relative_to(directory).parts
        if "site-packages" in parts or any(part.startswith(".") for part in parts):
            continue
        if file.is_file():  # an editor marks what it has open by a link to nothing
            text = file.read_bytes()
            if b"safetune" in text and b".workload" in text:
                found.append(file)
    if not found:
        raise TargetError(
            f"no .py file below {directory} declares a workload with @kernel.workload for a "
            "kernel decorated with @safetune"
        )
    return found


def _load_file(path: Path) -> ModuleType:
    """Import a file under its own name, or a free one if that module is imported already.

    A file of a package is imported as its module, so that its relative imports work.
    """
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    sys.path.insert(0, str(root))
    if root != path.parent:
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        if Path(module.__file__ or "").resolve() == path:
            return module
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
