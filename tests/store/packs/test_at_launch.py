"""Packs at launch: where they are looked for, when they count, and that they cost nothing else."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.outcome import Mark
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.store.packs import exchange, packs
from safetune.store.packs.packs import name_of
from safetune.store.records import PINNED_LIST

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

OTHER = {"triton": "3.0.0", "backend": "b", "target": "t", "environment": {}}


@pytest.fixture
def told() -> Any:
    """The warnings of safetune since the beginning of the test."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield lambda: [str(w.message) for w in found if issubclass(w.category, UserWarning)]


def tuned(made: Any) -> bool:
    """Whether a call of this key is measured now, to some choice that is stored."""
    made()
    return bool(open_lookup(Settings.current()).store.choices())


def test_a_choice_in_a_pack_is_launched(copies: Any, packed: Any, cache_dir: Path) -> None:
    """Nothing is measured, and the user's own store stays as it is."""
    made = copies(blocks=(16, 32, 64))
    packed(made, 64)
    assert made() == 64
    assert open_lookup(Settings.current()).store.kernels() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"toolchain": OTHER},
        {"declared": "ab" * 16},
        {"kernel_digest": "ab" * 16},
        {"config": {"BLOCK": 8, "num_warps": 4}},
        {"call": {"values": [["n", 101]], "dtypes": [], "options": []}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_call_that_matches_no_pack_is_tuned(copies: Any, packed: Any, changes: Any) -> None:
    made = copies(blocks=(16, 32))
    packed(made, 32, **changes)
    assert tuned(made)


def test_a_choice_with_a_field_of_a_newer_version_is_not_launched(copies: Any, packed: Any) -> None:
    made = copies(blocks=(16, 32))
    path = packed(made, 32)
    text = path.read_text()
    path.write_text(text.replace('"measured":', '"clocks_mhz": 1980, "measured":'))
    assert tuned(made)


def test_the_content_of_a_pack_counts_and_not_its_name(
    copies: Any, packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copies(blocks=(16, 32))
    path = packed(made, 32)
    theirs = packed(made, 32, kernel_digest="ab" * 16)
    os.replace(theirs, path)
    with monkeypatch.context() as patched:
        patched.setenv("SAFETUNE_MODE", "frozen")
        assert copies(blocks=(16, 32))() == 16, "not even as something near"
    assert tuned(made)


@pytest.mark.parametrize("names", [("h100.json",), ("a.json", "b.json"), (None, "z.json")])
def test_a_pack_is_read_whatever_its_file_is_called(
    copies: Any, packed: Any, told: Any, names: tuple[str | None, ...]
) -> None:
    """A file of several choices of one kernel, or several files of one."""
    made = copies(blocks=(16, 32, 64))
    for n, name in zip((100, 101), names, strict=False):
        path = packed(made, 64, n=n)
        if name is not None:
            path.rename(path.with_name(name))
    (packed.directory / "notes.json").write_text('{"digest": 7')
    for n in (100, 101)[: len(names)]:
        assert copies(blocks=(16, 32, 64))(n) == 64
    assert open_lookup(Settings.current()).store.kernels() == [], "nothing was tuned"
    assert told() == []


OTHER_LIST = "it was made from another list of configs"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"declared": "ab" * 16}, f"{OTHER_LIST} or another `same_bits`"),
        ({"config": {"BLOCK": 8, "num_warps": 4}}, "its config is not declared, or pruned"),
    ],
)
@pytest.mark.parametrize("is_imported", [False, True])
def test_a_choice_that_is_not_used_is_one_line_that_says_so(
    copies: Any,
    packed: Any,
    monkeypatch: Any,
    caplog: Any,
    changes: Any,
    reason: str,
    is_imported: bool,
) -> None:
    made = copies(blocks=(16, 32))
    path, where = packed(made, 32, **changes), "that was imported into the store"
    packed(made, 32, n=101, **changes)
    if is_imported:
        exchange.import_into(open_lookup(Settings.current()).store, packs.read_pack(path))
        monkeypatch.delenv("SAFETUNE_PACKS")
    assert tuned(made)
    made(101)
    lines = [record.getMessage() for record in caplog.records if "not used" in record.message]
    where = where if is_imported else f"in {path}"
    assert lines == [f"copy_kernel: the choice for n=100 (float32) {where} is not used: {reason}"]


@pytest.mark.parametrize("same_bits", [False, True])
def test_a_choice_under_same_bits_is_not_one_without_it(
    copies: Any, packed: Any, monkeypatch: pytest.MonkeyPatch, same_bits: bool
) -> None:
    blocks = (16, 32, 64)
    packed(copies(blocks=blocks, same_bits=same_bits), 64)
    monkeypatch.setenv("SAFETUNE_MODE", "frozen")
    assert copies(blocks=blocks, same_bits=same_bits)() == 64
    assert copies(blocks=blocks, same_bits=True)() == (64 if same_bits else 16)


def test_two_lists_of_configs_in_one_pack(copies: Any, packed: Any) -> None:
    """Of two versions of a program."""
    old, new = copies(blocks=(16, 32, 64)), copies(blocks=(32, 64, 128))
    assert packed(old, 64) == packed(new, 128)
    assert [old(), new()] == [64, 128]
    assert open_lookup(Settings.current()).store.kernels() == []


@pytest.mark.parametrize(("pinned", "launched"), [(32, 32), (128, 64)])
def test_a_pin_in_a_pack_goes_before_a_later_choice_if_its_config_is_declared(
    copies: Any, packed: Any, pinned: int, launched: int
) -> None:
    made = copies(blocks=(16, 32, 64))
    packed(made, 64, generation=2)
    packed(copies(blocks=(32, 128)), pinned, declared=PINNED_LIST, marks=(Mark.PINNED.value,))
    assert made() == launched
    assert open_lookup(Settings.current()).store.kernels() == [], "nothing was tuned"


def test_the_order(copies: Any, packed: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The local store, the first directory, the second."""
    blocks = (16, 32, 64)
    second, first = packed, type(packed)(tmp_path / "first")
    first.directory.mkdir()
    monkeypatch.setenv(
        "SAFETUNE_PACKS", os.pathsep.join(map(str, (first.directory, second.directory)))
    )
    second(copies(blocks=blocks), 64)
    assert copies(blocks=blocks)() == 64

    first(copies(blocks=blocks), 32)
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "another process's"))
    monkeypatch.setenv("SAFETUNE_PACKS", f"{first.directory}{os.pathsep}{second.directory}/")
    assert copies(blocks=blocks)() == 32

    store = open_lookup(Settings.current()).store
    first(copies(blocks=blocks), 16, n=101)
    (path,) = first.directory.iterdir()
    exchange.import_into(
        store, [e for e in packs.read_pack(path) if e.key.call["values"][0][1] == 101]
    )
    second(copies(blocks=blocks), 64, n=101)
    assert copies(blocks=blocks)(101) == 16


def test_the_shipped_packs_are_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_PACKS", "/one:/two".replace(":", os.pathsep))
    lookup = open_lookup(Settings.current())
    assert lookup._packs._directories == (Path("/one"), Path("/two"))
    assert lookup._packs._shipped == packs.shipped()
    assert (packs.shipped() / "README.md").is_file()


def test_a_broken_pack_costs_one_warning(copies: Any, packed: Any, told: Any) -> None:
    made = copies(blocks=(16, 32))
    path = packed(made, 32)
    text = path.read_text()
    path.write_text(text.replace('"BLOCK": 32', '"BLOCK": NaN'))
    assert tuned(made)
    made(101)
    (message,) = told()
    assert message == f"safetune: skipping a pack: {path}: it is not the JSON of a pack: " + (
        "NaN is not a finite number"
    )


def test_a_directory_that_is_none_costs_one_warning(
    copies: Any, told: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAFETUNE_PACKS", str(tmp_path / "typo"))
    monkeypatch.setenv("SAFETUNE_MODE", "frozen")
    made, scales = copies(blocks=(16, 32)), copies(blocks=(16, 32), reset_to_zero=["dst"])
    assert made() == 16
    assert scales() == 16, "another kernel, and so another file"
    assert told() == [
        f"safetune: SAFETUNE_PACKS names {tmp_path / 'typo'}, which is not a directory"
    ]


@pytest.mark.parametrize("kind", ["pipe", "huge", "folder"])
def test_no_file_holds_a_launch_up(copies: Any, packed: Any, told: Any, kind: str) -> None:
    made = copies(blocks=(16, 32))
    path = packed(made, 32)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    assert tuned(made)
    (message,) = told()
    assert message.startswith(f"safetune: skipping a pack: {path}: ")


SCRIPT = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
import torch, triton, triton.language as tl
from safetune import safetune

@safetune(configs=[triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"])
@triton.jit
def fill_kernel(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, offset, mask=offset < n)

fill_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](torch.zeros(100), 100)
print(json.dumps([path for path in opened if path.endswith(".json") and "fill_kernel" in path]))
"""


def test_a_pack_is_opened_when_the_store_has_no_choice(
    fresh_process: FreshProcess, tmp_path: Path, cache_dir: Path
) -> None:
    """The one with the kernel and the device in its name first; the others only if it lacks it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    directory = tmp_path / "packs"
    directory.mkdir()
    (directory / "copy_kernel.interpreter.01234567.json").write_text("{")
    env = {"SAFETUNE_PACKS": str(directory)}

    def opened() -> list[str]:
        done = fresh_process(script, env=env, warm=True)
        assert "Warning" not in done.stderr
        paths: list[str] = json.loads(done.stdout)
        return paths

    missed = opened()
    assert {Path(path).parent for path in missed} == {directory, packs.shipped()}
    assert len({Path(path).name for path in missed}) == 1, "tuned, as no pack has it"
    assert opened() == [], "the store has it now"

    collected = exchange.collect(cache_dir).entries
    exchange.write(directory / name_of(collected[0]), packs.dump(collected))
    (cache_dir / "safetune.db").unlink()
    assert opened() == [str(directory / Path(missed[0]).name)]
    assert exchange.collect(cache_dir).entries == [], "nothing was tuned"
