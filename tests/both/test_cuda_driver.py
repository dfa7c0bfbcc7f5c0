"""Calls of the CUDA driver, compared with the prototypes in the `cuda.h` that Triton brings along.

A wrong argument would crash the process, on a card alone.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton

from safetune.both import cuda, cuda_driver
from safetune.both.cuda import Cuda
from safetune.both.cuda_driver import Driver, DriverError
from tests.libcuda import stub

HEADER = Path(triton.__file__).parent / "backends/nvidia/include/cuda.h"
_PARAMETER = re.compile(r"(?P<type>[\w ]+?) ?(?P<stars>\**)\w+")

#: How each method of the driver is called; a context manager is entered.
CALLS: dict[str, Callable[[Driver], object]] = {
    "has_started": lambda driver: driver.has_started(),
    "describe": lambda driver: driver.describe(0),
    "device_count": lambda driver: driver.device_count(),
    "device": lambda driver: driver.device(0),
    "attribute": lambda driver: driver.attribute(1, 0),
    "l2_bytes": lambda driver: driver.l2_bytes(0),
    "device_name": lambda driver: driver.device_name(0),
    "device_uuid": lambda driver: driver.device_uuid(0),
    "context": lambda driver: driver.context(0),
    "use": lambda driver: driver.use(0),
    "on": lambda driver: entered(driver.on(0)),
    "relaxed": lambda driver: entered(driver.relaxed()),
    "synchronize": lambda driver: driver.synchronize(),
    "memory": lambda driver: driver.memory(),
    "allocate": lambda driver: driver.allocate(1),
    "free": lambda driver: driver.free(1),
    "allocate_host": lambda driver: driver.allocate_host(1),
    "free_host": lambda driver: driver.free_host(1),
    "copy": lambda driver: driver.copy(1, 1, 1),
    "copy_in": lambda driver: driver.copy_in(1, 1, 1),
    "read": lambda driver: driver.read(1, 1),
    "write": lambda driver: driver.write(1, b"1"),
    "fill": lambda driver: [driver.fill(1, 1, 1, width) for width in (1, 2, 4)],
    "can_share": lambda driver: driver.can_share(0),
    "granularity": lambda driver: driver.granularity(0),
    "create": lambda driver: driver.create(1, 0),
    "export": lambda driver: driver.export(1),
    "import_": lambda driver: driver.import_(1),
    "release": lambda driver: driver.release(1),
    "map": lambda driver: driver.map(1, 1, 0),
    "unmap": lambda driver: driver.unmap(1, 1),
    "stream": lambda driver: driver.stream(0),
    "wait": lambda driver: driver.wait(0),
    "capture": lambda driver: driver.capture(1, lambda: None),
    "replay": lambda driver: driver.replay(1),
    "drop_graph": lambda driver: driver.drop_graph(1),
    "event": lambda driver: driver.event(),
    "record": lambda driver: driver.record(1),
    "has_happened": lambda driver: driver.has_happened(1),
    "elapsed_ms": lambda driver: driver.elapsed_ms(1, 1),
    "drop_event": lambda driver: driver.drop_event(1),
    "module": lambda driver: driver.module(b"1"),
    "function": lambda driver: driver.function(1, "name"),
    "launch": lambda driver: driver.launch(1, 1, 1, [1, 1.0]),
    "Cuda.capture_id": lambda driver: Cuda(driver).capture_id(0),
    "Cuda.is_known_pointer": lambda driver: Cuda(driver).is_known_pointer(1),
}


def entered(context: Any) -> None:
    with context:
        pass


@functools.cache
def prototypes() -> dict[str, list[tuple[str, int]]]:
    """Return the parameters of each function that the library has: their types and their stars."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text("utf-8"), flags=re.DOTALL)
    newest = dict(re.findall(r"(?m)^ *# *define (cu\w+) +(cu\w+(?:_v\d|Flags))$", text))
    found: dict[str, list[tuple[str, int]]] = {}
    for name, listed in re.findall(r"CUresult CUDAAPI (cu\w+)\(([^)]*)\);", text):
        parameters = [] if listed.strip() == "void" else listed.split(",")
        matches = [_PARAMETER.fullmatch(" ".join(each.split())) for each in parameters]
        kinds = [(m["type"].replace("const ", ""), len(m["stars"])) for m in matches if m]
        exported = newest.get(name, name)  # the first time; then it is the oldest of that name
        found.setdefault(name if exported in found else exported, kinds)
    return found


def named() -> set[str]:
    """Return the functions that are named in the code."""
    texts = [inspect.getsource(module) for module in (cuda, cuda_driver)]
    return {name for text in texts for name in re.findall(r'"(cu[A-Z]\w+)"', text)}


@functools.cache
def sizes() -> dict[str, int]:
    """Return the bytes of each type that a function gets, or gets the address of."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    kinds = sorted({kind for name in named() for kind, _ in prototypes()[name]} - {"void"})
    lines = "".join(f'printf("%zu\\n", sizeof({kind}));' for kind in kinds)
    source = f'#include <stdio.h>\n#include "{HEADER}"\nint main() {{ {lines} }}'
    with tempfile.TemporaryDirectory() as folder:
        built = [compiler, "-x", "c", "-", "-o", f"{folder}/program"]
        subprocess.run(built, input=source, text=True, check=True)
        printed = subprocess.run([f"{folder}/program"], stdout=subprocess.PIPE, check=True).stdout
    return dict(zip(kinds, map(int, printed.split()), strict=True))


class Library:
    """In place of libcuda: checks what each function gets."""

    def __init__(self, exported: int) -> None:
        self.called: set[str] = set()
        self._exported = exported

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in prototypes():
            raise AttributeError(name)
        return functools.partial(self._check, name)

    def _check(self, name: str, *arguments: Any) -> int:
        self.called.add(name)
        parameters = prototypes()[name]
        assert len(arguments) == len(parameters), name
        for argument, (kind, stars) in zip(arguments, parameters, strict=True):
            assert fits(argument, kind, stars), (name, kind, stars, argument)
        if name == "cuMemExportToShareableHandle":
            arguments[0]._obj.value = self._exported
        return 0


def fits(argument: Any, kind: str, stars: int) -> bool:
    """Whether a parameter of this type can be read from an argument as ctypes passes it."""
    if not stars:
        if isinstance(argument, (ctypes.c_uint64, ctypes.c_void_p)):
            return True  # a register, or a place of 8 bytes; a narrower parameter is its part
        return ctypes.sizeof(argument) == sizes()[kind]
    if argument is None or isinstance(argument, (bytes, ctypes.c_char_p, ctypes.Array)):
        return True
    if isinstance(argument, ctypes.c_uint64):
        return kind == "void"  # an address on the host
    pointed = ctypes.sizeof(argument._obj)
    return pointed == 8 if stars > 1 else kind == "void" or pointed == sizes()[kind]


@pytest.fixture
def driver() -> Iterator[Driver]:
    with tempfile.TemporaryFile() as exported:
        yield Driver(Library(exported.fileno()))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_as_the_header_declares_it(name: str, driver: Driver) -> None:
    CALLS[name](driver)
    assert driver._library.called


def test_every_function_is_called(driver: Driver) -> None:
    for call in CALLS.values():
        call(driver)
    assert driver._library.called >= named()


def test_a_driver_that_lacks_a_function_has_failed(driver: Driver) -> None:
    """Else the program's own launch raised an AttributeError, not what is caught and told."""
    with pytest.raises(DriverError, match="too old: it has no cuNone"):
        driver.call("cuNone", 1)


def test_a_thread_without_a_context_gets_a_stream() -> None:
    with ThreadPoolExecutor() as pool:
        assert pool.submit(Driver(stub.library()).stream, 0).result()


def test_no_method_is_left_out() -> None:
    methods = {name for name, _ in inspect.getmembers(Driver, inspect.isfunction)}
    assert {each for each in CALLS if "." not in each} == {
        each for each in methods if not each.startswith("_") and each != "call"
    }
