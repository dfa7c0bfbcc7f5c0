"""Records that anybody wrote: whatever is in them, a command ends well and controls no terminal."""

from __future__ import annotations

import ast
import json
import shutil
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from safetune.errors import PackError
from safetune.keys import encoding
from safetune.outcome import Outcome, Verdict
from safetune.store.local import rows
from safetune.store.local.store import Store
from safetune.store.records import KeyRecord, TrialRecord
from safetune.store.shared import local_copy
from safetune.store.shared.protocol import decode, encode
from tests.conftest import FreshProcess
from tests.selection import FULL
from tests.store.shared.conftest import config, key, stored

CLI = Path(__file__).parents[2] / "safetune" / "cli"
SHOW = CLI.with_name("show")

ESCAPE = "\x1b]0;title\x07\x1b[31m\u202e\u2028\x85\ud800 name"

#: Values that mean something where they are read, and JSON of any shape.
ANY = st.sampled_from(
    [ESCAPE, {}, [], [[]], 5, 10**4000, 1e308, 5e-324, -0.0, None, {ESCAPE: [ESCAPE]}, {"repr": {}}]
) | st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
CHOICE = ("tunings", 0, "choices", 0)
FIELDS: list[tuple[Any, ...]] = [
    *(("kernel", "name"), ("device", "name"), ("device", "sm_count"), ("device", "newer")),
    *(("tunings", 0, "toolchain", name) for name in ("triton", "environment", "newer")),
    *((*CHOICE, name) for name in ("values", "dtypes", "options", "config", "created", "marks")),
    *((*CHOICE, name, 0, part) for name in ("values", "dtypes") for part in (0, 1)),
    *((*CHOICE, "config", name) for name in ("BLOCK", "num_warps", "pre_hook", ESCAPE)),
    *((*CHOICE, name) for name in ("median_ms", "measured", "generation")),
]

few = settings(
    max_examples=100 if FULL else 20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def store(cache_dir: Path) -> Iterator[Store]:
    """A store with a choice that nothing is wrong with."""
    opened = Store.open(cache_dir)
    local_copy.adopt(opened.connection, [stored()])
    yield opened
    opened.close()


def check(safetune: Any, tmp_path: Path, *kernels: str) -> None:
    """Every command that reads the store ends well, and no character would control a terminal.

    A record may say that it was made in 1970; that is not unused for 99,999 days yet.
    """
    for words in (
        *(("list",), ("list", "--json")),
        *(("export", tmp_path / "out"), ("clear", "--unused-for", "99999d", "--yes")),
        *(("show", kernel) for kernel in kernels),
    ):
        result = safetune(*words)
        assert result.exit_code == 0, result.output
        check_text(result.output)


def check_text(text: str) -> None:
    assert not {
        c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl") and c != "\n"
    }


@few
@given(changes=st.lists(st.tuples(st.sampled_from(FIELDS), ANY), min_size=1, max_size=3))
@example(changes=[((*CHOICE, "created"), 5)])
@example(changes=[((*CHOICE, "values"), [{"": 1}]), ((*CHOICE, "values", 0, 0), 2)])
def test_any_record_is_shown_or_absent(
    safetune: Any, store: Store, tmp_path: Path, changes: Any
) -> None:
    """With the right checksum and anything in its fields; and a node keeps it for good."""
    content = json.loads(encode(stored()))
    del content["checksum"]
    for path, value in changes:
        part = content
        try:
            for name in path[:-1]:
                part = part[name]
            if isinstance(part, dict) and not isinstance(path[-1], str):
                continue  # names in JSON are text
            part[path[-1]] = value
        except (IndexError, KeyError, TypeError):
            continue  # an earlier change took the place away
    text = encoding.dumps({**content, "checksum": encoding.digest(content)})
    packs = tmp_path / "packs"
    shutil.rmtree(packs, ignore_errors=True)
    packs.mkdir()
    file = packs / "hostile\x1b[31m.json"
    file.write_text(text)
    for words in (("import", file), ("export", "--into", packs)):
        result = safetune(*words)
        assert result.exit_code in (0, 2), result.output
        check_text(result.output)
    try:
        found = decode(text)
    except PackError:
        return
    local_copy.adopt(store.connection, [found])
    check(safetune, tmp_path, "add_kernel")


@few
@given(
    call=st.dictionaries(st.sampled_from(["values", "dtypes", "options"]), ANY),
    toolchain=st.dictionaries(st.sampled_from(["triton", "target", "backend"]), ANY),
    device=st.dictionaries(st.sampled_from(["name", "sm_count"]), ANY),
)
def test_any_row_with_the_right_checksum_is_shown_or_absent(
    safetune: Any, store: Store, tmp_path: Path, call: Any, toolchain: Any, device: Any
) -> None:
    """As another program may write it."""
    values = {**vars(KeyRecord.of(key(1))), "call": call, "toolchain": toolchain, "device": device}
    values["device_digest"] = encoding.digest(device)
    with store.connection.transaction() as sqlite:
        rows.KEY.insert(sqlite, rows.KEY.seal(KeyRecord(**values)), "REPLACE")
        late = stored(1, created=1e300).choice
        rows.CHOICE.insert(sqlite, rows.CHOICE.seal(late), "REPLACE")
    check(safetune, tmp_path, "add_kernel")


def test_the_texts_of_a_trial_are_escaped(safetune: Any, store: Store, tmp_path: Path) -> None:
    """A compiler may say anything about a kernel, and so may the kernel."""
    for number, verdict in enumerate((Verdict.OK, Verdict.DIED, Verdict(ESCAPE))):
        outcome = Outcome(verdict, None, ESCAPE, f"{ESCAPE}\n{ESCAPE}", ESCAPE, ESCAPE, (ESCAPE,))
        block = {"BLOCK": ESCAPE, "n": number}
        store.put_trial(TrialRecord(key().digest, config(number), block, 1, outcome, created=1e300))
    check(safetune, tmp_path, "add_kernel")
    assert "\\x1b[31m" in safetune("show", "add_kernel").output


def test_names_and_logged_rows_are_escaped(safetune: Any, store: Store, tmp_path: Path) -> None:
    with store.connection.transaction() as sqlite:
        named = replace(
            KeyRecord.of(key()), digest="d", kernel_name=ESCAPE, toolchain={"triton": ESCAPE}
        )
        rows.KEY.insert(sqlite, rows.KEY.seal(named), "REPLACE")
        sqlite.execute("INSERT INTO choice (key, declared) VALUES (?, ?)", (ESCAPE[:-6],) * 2)
    check(safetune, tmp_path, "add_kernel")
    for words in (("show", "nope"), ("clear", "nope"), ("clear", ESCAPE[:-6])):
        check_text(safetune(*words).output)


def test_an_unknown_name_is_answered_with_some_of_many(safetune: Any, store: Store) -> None:
    many = [
        {**vars(KeyRecord.of(key())), "digest": f"{n}", "kernel_name": f"k{n}"} for n in range(50)
    ]
    with store.connection.transaction() as sqlite:
        for each in many:
            rows.KEY.insert(sqlite, rows.KEY.seal(KeyRecord(**each)), "REPLACE")
    assert safetune.error("show", "nope").endswith(", …")


def test_a_table_is_printed_where_the_terminal_lacks_its_letters(
    store: Store, run: FreshProcess
) -> None:
    """Regression: the name of a Greek kernel ended `list` under an ASCII locale."""
    with store.connection.transaction() as sqlite:
        greek = {**vars(KeyRecord.of(key())), "kernel_name": "κernel"}
        rows.KEY.insert(sqlite, rows.KEY.seal(KeyRecord(**greek)), "REPLACE")
    done = run("list", env={"PYTHONIOENCODING": "ascii"})
    assert done.stderr == ""
    assert "\\u03baernel" in done.stdout


def test_every_command_prints_through_one_function() -> None:
    """Else one of them would forget to escape; JSON is ASCII as it is."""
    calls = {
        f"{path.stem}.{function.name}"
        for path in (*CLI.glob("*.py"), *SHOW.glob("*.py"))
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("click.echo", "click.secho", "print", "sys.stdout.write")
    }
    assert calls == {"output.echo", "tables.print_blocks", "emit.print_json"}
