"""`safetune pin`: a choice by hand, which nothing that is measured replaces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import FreshProcess


def other_than_chosen(safetune: Any, n: int = 100) -> int:
    """The BLOCK of `add_one` that was not chosen for N."""
    (chosen,) = (
        entry["config"]["BLOCK"]
        for entry in safetune.json("list", "--kernel", "add_one")
        if entry["call"]["values"] == {"N": n}
    )
    return 64 + 128 - int(chosen)


@pytest.fixture
def pinned(safetune: Any, tuned: Any) -> int:
    """The BLOCK that is pinned for N=100, and was not chosen."""
    block = other_than_chosen(safetune)
    done = safetune("pin", "add_one", "--key", "N=100", f"BLOCK={block}")
    assert done.stdout == f"pinned BLOCK={block} num_warps=4 num_stages=3 for 1 key of add_one\n"
    return block


def chosen(safetune: Any, *words: object) -> tuple[str, int, bool]:
    """What `tune` chooses for N=100, how many configs it measured, and whether it is pinned."""
    (tuning,) = safetune.json("tune", *words, "--shape", "small")["tunings"]
    return tuning["choice"].split()[0], tuning["measured"], tuning["pinned"]


def test_it_is_launched_and_never_tuned_again(safetune: Any, targets: Path, pinned: int) -> None:
    target = f"{targets / 'add.py'}:add_one"
    for options in ((), ("--force",)):
        assert chosen(safetune, target, *options) == (f"BLOCK={pinned}", 0, True)
    rows = [line.split() for line in safetune("list", "--kernel", "add_one").stdout.splitlines()]
    assert [row[-1] for row in rows if row[:1] in (["100"], ["300"])] == ["pinned", "here"]
    shown = safetune("show", "add_one", "--key", "N=100").stdout
    assert "pinned   by hand; it is not tuned again until it is cleared" in shown
    assert f'"BLOCK": {pinned}' in safetune("show", "add_one", "--key", "N=100", "--python").stdout

    safetune("clear", "add_one", "--yes")
    _, measured, is_pinned = chosen(safetune, target)
    assert (measured, is_pinned) == (2, False)


def test_a_later_choice_of_another_node_does_not_replace_it(
    safetune: Any, targets: Path, pinned: int, cache_dir: Path
) -> None:
    safetune.share()
    target = f"{targets / 'add.py'}:add_one"
    safetune.json("tune", target)  # publishes what this node has measured
    assert len(safetune.json("list", "--shared")) == 3
    assert not any(entry["marks"] for entry in safetune.json("list", "--shared")), "no pin"
    safetune.use_store("node")
    assert chosen(safetune, target, "--force")[1:] == (2, False)

    safetune.set(SAFETUNE_CACHE_DIR=cache_dir)
    assert chosen(safetune, target) == (f"BLOCK={pinned}", 0, True)
    generations = [entry["generation"] for entry in safetune.json("list", "--shared")]
    assert max(generations) == 2


def test_the_last_pin_counts_here_and_where_it_is_imported(
    safetune: Any, targets: Path, pinned: int, tmp_path: Path
) -> None:
    target, last = f"{targets / 'add.py'}:add_one", 64 + 128 - pinned
    for block in (last, pinned, last):
        assert safetune.json("pin", "add_one", f"BLOCK={block}")["pinned"] == 2
    assert chosen(safetune, target) == (f"BLOCK={last}", 0, True)

    safetune("export", tmp_path / "packs")
    safetune.use_store("new")
    safetune.json("import", tmp_path / "packs")
    assert chosen(safetune, target) == (f"BLOCK={last}", 0, True)


LAUNCH = """
import sys, torch, add
add.add_one[lambda meta: (2,)](torch.zeros(100), 100)
print(add.add_one.best_config.kwargs["BLOCK"])
"""


@pytest.mark.parametrize("way", ["store", "pack"])
@pytest.mark.parametrize("declared", ["(32, 64, 128)", "(32, 256)"])
def test_it_holds_for_every_list_that_has_its_config(
    safetune: Any,
    targets: Path,
    pinned: int,
    tmp_path: Path,
    fresh_process: FreshProcess,
    declared: str,
    way: str,
) -> None:
    text = (targets / "add.py").read_text()
    (tmp_path / "add.py").write_text(text.replace("(64, 128)", declared))
    env = {"SAFETUNE_MODE": "frozen"}
    where = "that is pinned in the store"
    if way == "pack":
        safetune("export", tmp_path / "packs", "--kernel", "add_one")
        env |= {"SAFETUNE_PACKS": str(tmp_path / "packs"), "SAFETUNE_CACHE_DIR": "/nonexistent"}
        (file,) = (tmp_path / "packs").iterdir()
        where = f"in {file}"

    done = fresh_process(LAUNCH, env=env, cwd=tmp_path, warm=True)

    told = "is not used: its config is not declared, or pruned" in done.stderr
    if declared == "(32, 256)":
        assert done.stdout.split() == ["32"], "the first"
        assert told, done.stderr
        assert f"the choice for N=100 (float32) {where}" in done.stderr
    else:
        assert (done.stdout.split(), told) == ([str(pinned)], False), done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("BLOK=64",), "no config of add_one that was tried has BLOK=64. One is BLOCK="),
        (("BLOCK=96",), "no config of add_one that was tried has BLOCK=96. One is BLOCK="),
        (("num_warps=4",), "2 configs of add_one have these values; give more values"),
        (("--key", "N=7", "BLOCK=64"), "no key of add_one matches these options"),
    ],
)
def test_a_mistake_names_what_there_is(
    safetune: Any, tuned: Any, words: tuple[str, ...], message: str
) -> None:
    assert safetune.error("pin", "add_one", *words).startswith(f"Error: {message}")
    assert not any("pinned" in entry["marks"] for entry in safetune.json("list"))


def test_a_config_that_has_failed_is_not_pinned(safetune: Any, targets: Path) -> None:
    safetune("tune", f"{targets / 'faulty.py'}:hopeless")
    assert safetune.error("pin", "add_one", "BLOCK=64").endswith(
        "for N=100 float32: its outcome there is died(SIGSEGV)"
    )
