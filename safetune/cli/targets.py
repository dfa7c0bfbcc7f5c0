"""TARGETs of the command line: `package.module[:kernel]` or `file.py[:kernel]`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from safetune.errors import TargetError

if TYPE_CHECKING:
    from safetune.offline import OfflineKernel


def kernels_of(target: str) -> list[OfflineKernel]:
    """Return the kernels that a TARGET names, all with a workload.

    Raises:
        TargetError: it does not import, has no such kernel, or no kernel with a workload.
    """
    place, _, wanted = target.partition(":")
    module = _load(place)
    from safetune.offline import find_kernels

    kernels = find_kernels(vars(module))
    if not kernels:
        raise TargetError(
            f"{place} has no kernel decorated with @safetune; name a module that has one"
        )
    if wanted:
        names = {**{k.name: k for k in kernels}, **_by_attribute(module, kernels)}
        if wanted not in names:
            raise TargetError(
                f"{place} has no kernel {wanted!r}; it has {', '.join(sorted(names))}"
            )
        kernels = [names[wanted]]
    working = [kernel for kernel in kernels if kernel.tuner.workloads]
    if not working:
        listed = ", ".join(kernel.name for kernel in kernels)
        raise TargetError(
            f"no workload is declared for {listed} in {place}: decorate a function that yields "
            f"safetune.Workload(...) with @{kernels[0].name}.workload"
        )
    return working


def use_interpreter_without_gpu() -> bool:
    """Switch Triton to its interpreter where there is no GPU and nobody has decided; True if so."""
    if "TRITON_INTERPRET" in os.environ:
        return False
    import torch

    if torch.cuda.is_available():
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    return True


def _load(place: str) -> ModuleType:
    if place.endswith(".py") and not Path(place).is_file():
        raise TargetError(f"{place} is not a file")
    try:
        if place.endswith(".py"):
            return _load_file(Path(place))
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({last.filename}:{last.lineno})" if "importlib" not in last.filename else ""
        raise TargetError(
            f"{place} does not import: {type(error).__name__}: {error}{where}"
        ) from error


def _load_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _by_attribute(module: ModuleType, kernels: list[OfflineKernel]) -> dict[str, OfflineKernel]:
    return {
        name: kernel
        for name, value in vars(module).items()
        for kernel in kernels
        if value is kernel.outer
    }
