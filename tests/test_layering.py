"""Imports in the product point one way, and a few things are done in one place only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: The folders and single modules of the product, from the bottom up. A module may import from its
#: own layer and from layers below; types count as much as values. A module named alone is in its
#: own layer, not in that of its folder; a new folder or top-level module needs a layer here.
LAYERS: list[list[str]] = [
    ["frozen"],
    ["errors", "forks", "messages", "outcome", "settings"],
    ["triton_compile", "triton_internals", "triton_launch"],
    ["both"],  # what parent and child share
    ["keys"],
    ["config"],
    ["store"],
    ["launch"],
    ["inputs"],
    ["isolation"],
    ["child"],  # no other folder imports it: see below
    ["tuning"],
    ["miss"],
    ["show"],
    ["compilers"],
    ["frontend"],
    ["offline", "integrations", "verify", "lint"],
    ["safetune"],  # the package's own __init__: the public names
    ["kernels", "integrations.site", "pytest_plugin"],
    ["cli"],
    ["__main__"],
]


UNITS = {unit for layer in LAYERS for unit in layer}


@dataclass(frozen=True)
class Module:
    """One source file of the product, as it will be imported."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def unit(self) -> str:
        """The name that LAYERS knows it by: its own, or that of the closest folder above it."""
        name = self.name.partition(".")[2] or "safetune"
        while name not in UNITS and "." in name:
            name = name.rpartition(".")[0]
        return name


@cache
def product() -> dict[str, Module]:
    """Return the modules under safetune/ and kernels/ by their import names."""
    modules = {}
    for folder, package in (
        (ROOT / "safetune", "safetune"),
        (ROOT / "kernels", "safetune.kernels"),
    ):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            modules[name] = Module(name, path, tree)
    return modules


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """Yield (imported module, line), inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                is_module = whole in product() or whole in ("safetune.kernels", "safetune.cache")
                yield (whole if is_module else base), node.lineno


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    if module.path.name != "__init__.py":
        package.pop()
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def product_imports(module: Module) -> Iterator[tuple[Module, int]]:
    """Yield (product module, line) for what a module imports from the product."""
    for name, line in imports(module):
        if name in product():
            yield product()[name], line


def where(module: Module, line: int) -> str:
    return f"{module.path.relative_to(ROOT)}:{line}"


def calls(module: Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield (name as written, node) for each call, e.g. `os.environ.get`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_every_module_has_a_layer() -> None:
    without = sorted({module.unit for module in product().values()} - UNITS - {"cache"})
    assert not without, f"give these a place in LAYERS: {without}"


def test_imports_point_to_lower_layers() -> None:
    level = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}
    upward = [
        f"{where(module, line)}: {module.name} imports {imported.name}, which is above it"
        for module in product().values()
        for imported, line in product_imports(module)
        if level.get(imported.unit, 0) > level.get(module.unit, len(LAYERS))
    ]
    assert not upward, "\n".join(upward)


def test_folders_of_one_layer_do_not_import_each_other() -> None:
    """Else their order is not declared."""
    level = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}
    crossing = {
        (module.unit, imported.unit)
        for module in product().values()
        for imported, _ in product_imports(module)
        if level.get(imported.unit) == level.get(module.unit) and imported.unit != module.unit
    }
    both = sorted(pair for pair in crossing if pair[::-1] in crossing)
    assert not both, f"give these an order in LAYERS: {both}"


def test_no_other_folder_imports_child() -> None:
    """So that the folder of a line tells in which process it runs; types count, too."""
    importing = [
        f"{module.path.relative_to(ROOT)}: imports {name}"
        for module in product().values()
        if module.unit != "child"
        for node in ast.walk(module.tree)
        for name in _imported(module, node)
        if f"{name}.".startswith("safetune.child.")
    ]
    assert not importing, "\n".join(importing)


def test_a_child_imports_nothing_that_runs_in_its_parent_alone() -> None:
    """What both need as code is in the folders below both: inputs, launch, keys, both."""
    closed = ("safetune.isolation", "safetune.tuning", "safetune.miss", "safetune.store")
    importing = [
        f"{module.path.relative_to(ROOT)}: imports {name}"
        for module in product().values()
        if module.unit == "child"
        for node in ast.walk(module.tree)
        for name in _imported(module, node)
        if name.startswith(closed)
    ]
    assert not importing, "\n".join(importing)


def _imported(module: Module, node: ast.AST) -> Iterator[str]:
    """Yield all that one import statement may mean, modules and names alike."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(module, node)
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def test_only_the_command_imports_verify() -> None:
    """It is there for people who write kernels: no launch and no tuning may depend on it."""
    importing = {
        module.name
        for module in product().values()
        for imported, _ in product_imports(module)
        if imported.unit == "verify" and module.unit != "verify"
    }
    assert importing == {"safetune.cli.verify"}


def test_the_top_level_is_the_folders_and_few_modules() -> None:
    """A file here has no folder, so the architecture page has to explain it on its own."""
    modules = sorted(path.name for path in (ROOT / "safetune").glob("*.py"))
    assert len(modules) <= 12, modules


def test_there_is_no_import_cycle_even_of_types() -> None:
    """Modules that know each other's types cannot be read one after the other."""
    graph = {
        module.name: {other.name for other, _ in product_imports(module)} - {module.name}
        for module in product().values()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' <- '.join(error.args[1])}")


def test_only_settings_reads_safetune_variables() -> None:
    """A second reader is a variable that the docs table misses and that tests cannot fix."""
    readers = [
        f"{where(module, line)}: reads {name}"
        for module in product().values()
        if module.name != "safetune.settings"
        for name, line in _environment_reads(module)
    ]
    assert not readers, "\n".join(readers)


def _environment_reads(module: Module) -> Iterator[tuple[str, int]]:
    """Yield (variable, line) for each SAFETUNE_* name looked up in a mapping, whatever its name.

    Not reads: setting one for a child (`env["SAFETUNE_MODE"] = ...`), naming one in a message.
    """
    for node in ast.walk(module.tree):
        candidates: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            candidates = [node.slice]
        elif isinstance(node, ast.Compare):
            candidates = [node.left]
        elif isinstance(node, ast.Call):
            reads = ast.unparse(node.func).endswith(("get", "getenv", "getenvb"))
            candidates = node.args[:1] if reads else []
            candidates += [word.value for word in node.keywords if word.arg == "envvar"]
        for candidate in candidates:
            name = candidate.value if isinstance(candidate, ast.Constant) else None
            if isinstance(name, str) and re.fullmatch(r"SAFETUNE_\w*", name):
                yield name, candidate.lineno


def test_only_forks_registers_hooks() -> None:
    """A second place has an order of its own."""
    names = re.compile(r"(.*\.)?(register_at_fork|register_after_fork|Finalize|atexit\.\w+)")
    modules = [module for module in product().values() if module.name != "safetune.forks"]
    found = [
        f"{where(module, node.lineno)}: {ast.unparse(node)}"
        for module in modules
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and names.fullmatch(ast.unparse(node)))
        or (isinstance(node, ast.ImportFrom) and node.module == "atexit")
    ]
    assert not found, "\n".join(found)


#: Why a module may name one kind of device. Any other asks `both.backend`.
NAMES_CUDA = {
    "safetune.both.cuda": "it is the back end",
    "safetune.both.backend": "it lists the back ends",
    "safetune.triton_internals": "torch's name for its devices",
    "safetune.both.cuda_driver": "that driver's library",
    "safetune.both.byte_kernels": "the target of the kernels that ship as PTX",
    "safetune.triton_compile": "the compiler whose layout of shared memory is known",
    "safetune.triton_launch": "the launcher of Triton's that is known",
    "safetune.launch.fast_path": "it launches past Triton only where the launcher is known",
    "safetune.launch.fast_path_codegen": "a tensor's own attribute is the quickest to ask",
    "safetune.launch.scratch_memory": "torch's caching allocator",
    "safetune.inputs.caller_view": "torch.backends.cuda.matmul has a setting that hooks may read",
    "safetune.integrations.graph": "it is torch.cuda.graph, with a report",
    "safetune.integrations.jax": "JAX's name for the platform",
    "safetune.cli.doctor.gpus": "it checks that driver and its devices",
    "safetune.cli.targets": "CUDA_VISIBLE_DEVICES, which shows each process its GPU",
    "safetune.offline.tasks": "the torch device of a workload",
    "safetune.frontend.decorator": "use_cuda_graph is a parameter of triton.autotune",
    "safetune.frontend.options": "use_cuda_graph is a parameter of triton.autotune",
}


def test_only_a_back_end_names_its_kind_of_device() -> None:
    """A second place that does is one more file that the author of a back end has to find."""
    kind = re.compile(r"cuda|nvidia", re.IGNORECASE)
    plain = re.compile(r"[\w.:-]*(cuda|nvidia)[\w.:-]*", re.IGNORECASE)  # no sentence
    found = [
        f"{where(module, node.lineno)}: {ast.unparse(node)}"
        for module in product().values()
        if module.name not in NAMES_CUDA and not module.name.startswith("safetune.kernels")
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and kind.search(node.attr))
        or (isinstance(node, ast.Name) and kind.search(node.id))
        or (isinstance(node, ast.arg) and kind.search(node.arg))
        or (isinstance(node, ast.alias) and kind.search(node.name))
        or (isinstance(node, ast.Constant) and plain.fullmatch(str(node.value)))
    ]
    assert not found, "\n".join(found)


#: What Triton may change in any version. Only modules named `triton_...` name it.
INTERNALS = frozenset(
    """
    _active _allocator _bench _do_compile HookChain NullAllocator
    add_stages_inspection_hook arg_annotations base_knobs create_binder device_caches gsan_enabled
    get_cache_invalidating_env_vars instrumentation_mode kernel_signature launch_cooperative_grid
    launch_enter_hook launch_pdl make_backend packed_metadata pre_run_hooks triton_key
    used_global_vals
    """.split()  # noqa: SIM905
)

#: Why a module may name some of them all the same.
NAMES_INTERNALS = {
    "safetune.frontend.autotuner": {"_bench"},  # has one of its own, in front of Triton's
    "safetune.integrations.shadow_tuner": {"_bench"},  # wraps what triton_internals then replaces
    "safetune.miss.resolve": {"_bench"},  # inherited from triton.autotune's class
}


def test_only_triton_internals_reaches_behind_triton() -> None:
    found = [
        f"{where(module, node.lineno)}: {ast.unparse(node)}"
        for module in product().values()
        if not module.name.startswith("safetune.triton_")
        and module.name != "safetune.verify.interpretation"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in INTERNALS - NAMES_INTERNALS.get(module.name, set())
        and ast.unparse(node.value) != "self"
    ]
    assert not found, "\n".join(found)


def test_only_the_cli_prints() -> None:
    printing = [
        where(module, node.lineno)
        for module in product().values()
        if module.unit != "cli"
        for name, node in calls(module)
        if name == "print"
    ]
    assert not printing, f"print() outside safetune/cli: {printing}"


def test_only_tuning_unpickles() -> None:
    """A pickle may run code: only bytes that came through our own pipe are ever loaded."""
    loads = re.compile(
        r"(.*\.)?(Unpickler|(c?pickle|cloudpickle|dill|torch|joblib|shelve)\.\w*(load|open)\w*)"
    )
    unpickling = [
        f"{where(module, node.lineno)}: {name}"
        for module in product().values()
        if module.unit not in ("child", "inputs", "isolation", "tuning")
        for name, node in calls(module)
        if loads.fullmatch(name)
    ]
    unpickling += [
        f"{where(module, node.lineno)}: {ast.unparse(node)}"
        for module in product().values()
        if module.unit not in ("child", "inputs", "isolation", "tuning")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "cloudpickle")
        if any("load" in alias.name or alias.name == "Unpickler" for alias in node.names)
    ]
    assert not unpickling, "\n".join(unpickling)


def test_no_parameter_of_ours_takes_a_keyword_of_a_kernel() -> None:
    """A kernel's parameter may have any name, e.g. `run`, so a function that passes a call on takes
    its own arguments by position only.
    """
    found = [
        f"{where(module, node.lineno)}: {node.name}"
        for module in product().values()
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if node.args.kwarg is not None and node.args.kwarg.arg == "kwargs" and node.args.args
        if module.path.parent != ROOT / "kernels"
    ]
    assert not found, f"write a `/` behind these parameters: {found}"
