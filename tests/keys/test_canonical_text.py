"""One text for a function, in whatever Python, however its comments and lines lie.

`CASES` has the text that every version must make of a source. Each Python on this machine is asked:
the module needs nothing but the standard library.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "safetune" / "keys" / "canonical_text.py"

#: (source, the one text of it).
CASES: list[tuple[str, str]] = [
    ("def f(x):\n    return x\n", "def f ( x ) :\n return x"),
    (
        'def f(x):  # what\n    """Say it.\n\nAt column 0."""\n\n# here too\n    return x  # x\n',
        "def f ( x ) :\n return x",
    ),
    ("def f(\n    x,\n    y = 1,  # one\n):\n        return(x +\n y)\n",
     "def f ( x , y = 1 , ) :\n return ( x + y )"),
    ("def f(x): y = x; return y\n", "def f ( x ) : y = x ; return y"),
    ("def f(x):\n    r'''Say''' \"it\"\n    b'not'\n", "def f ( x ) :\n b'not'"),
    ("def f(x):\n    f'not {x} this'\n    'nor this'\n",
     "def f ( x ) :\n f'not {x} this'\n 'nor this'"),
    (
        "def f(x):\n    class C:\n        'Say it.'\n        a: int = 3\n"
        "        async def g(self):\n            'Say it.'\n            return 1\n    return C\n",
        "def f ( x ) :\n class C :\n  a : int = 3\n"
        "  async def g ( self ) :\n   return 1\n return C",
    ),
    ("def f(x):\n    if x:\n        'kept'\n    return x\n",
     "def f ( x ) :\n if x :\n  'kept'\n return x"),
    (
        "def f(x):\n    return f'{x!r:>{x}} {{}}' rf\"\"\"{x:\n}{f'{x}'} # kept\n\"\"\" 'é'\n",
        "def f ( x ) :\n return f'{x!r:>{x}} {{}}' rf\"\"\"{x:\n}{f'{x}'} # kept\n\"\"\" 'é'",
    ),
    ("def f(é, ℘, ñ):\n    return é@℘, 'é', ñ\n", "def f ( é , ℘ , ñ ) :\n return é @ ℘ , 'é' , ñ"),
    ("def f(x):\r\n\tif x: y = 0x1F; y += 1_0.5e3j\r\n\treturn '''a\r\nb'''\r\n",
     "def f ( x ) :\n if x : y = 0x1F ; y += 1_0.5e3j\n return '''a\nb'''"),
    ("def f(x):\n    return x \\\n  if x else(lambda: 1)\n",
     "def f ( x ) :\n return x if x else ( lambda : 1 )"),
    ("def f(x):\n    y = 1\n    \\\n\n    return y\n", "def f ( x ) :\n y = 1\n return y"),
    ("lambda x : (x+\n  # one\n1)", "lambda x : ( x + 1 )"),
    ("lambda x: x\n+ 1", "lambda x : x + 1"),
    ("def f(x)->{'a':1}:\n  match x:\n    case {'a': [*_]} if (y:=x): return\n",
     "def f ( x ) -> { 'a' : 1 } :\n match x :\n  case { 'a' : [ * _ ] } if ( y := x ) : return"),
    ("@d\ndef f(x):\n  'Say it.'\n  try: pass\n  except* E: pass\n",
     "@ d\ndef f ( x ) :\n try : pass\n except * E : pass"),
]  # fmt: skip

#: Texts that are not the same function, though each differs by little.
DIFFERENT = [
    "def f(x):\n    if x:\n        x = 1\n    x = 2\n",
    "def f(x):\n    if x:\n        x = 1\n        x = 2\n",
    "def f(x):\n    if x:\n        x = 1; x = 2\n",
    "def f(x):\n    if x:\n        x = '1; x = 2'\n",
    "def f(x):\n    if x:\n        x = '1;  x = 2'\n",
    "def f(x):\n    if x:\n        x = f'{1}; x = 2'\n",
    "def f(x):\n    if x:\n        x = f'{ 1}; x = 2'\n",
    "def f(x):\n    if x:\n        x = '''1;\n x = 2'''\n",
    "def f(x):\n    if x:\n        x = '''1;\nx = 2'''\n",
    "def f(x):\n    if x:\n        x = '1' '; x = 2'\n",
]


def load() -> Any:
    """The module alone, as it runs in a Python that has no Triton."""
    spec = importlib.util.spec_from_file_location("canonical_text", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pythons() -> list[str]:
    """Each other Python from 3.10 on that is installed."""
    names = [f"python3.{minor}" for minor in range(10, 16)]
    found = [shutil.which(name) or "" for name in names]
    found += glob.glob(os.path.expanduser("~/.pyenv/versions/3.1[0-9]*/bin/python"))
    works = []
    for path in filter(None, found):
        asked = [path, "-c", "import sys; print(sys.version_info[:2] >= (3, 10))"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.strip() == "True":
            works.append(path)
    return [*dict.fromkeys([sys.executable, *works])]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_text_without_what_changes_nothing(number: int) -> None:
    source, expected = CASES[number]
    assert load().canonical(source) == expected


def test_what_is_not_the_same_function_has_another_text() -> None:
    canonical = load().canonical
    assert len({canonical(text) for text in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize("python", pythons())
def test_every_python_makes_the_same_text(python: str) -> None:
    script = (
        f"import sys, json; sys.path.insert(0, {str(FILE.parent)!r}); import canonical_text\n"
        "print(json.dumps([canonical_text.canonical(text) for text in json.load(sys.stdin)]))"
    )
    sources = [source for source, _ in CASES] + DIFFERENT
    done = subprocess.run(
        [python, "-I", "-c", script],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [text for _, text in CASES] + [load().canonical(text) for text in DIFFERENT]
    assert json.loads(done.stdout) == expected
