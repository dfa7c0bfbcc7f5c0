"""The stored keys of a kernel, shown in Python and in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from safetune.messages import notebook
from safetune.settings import Settings
from safetune.show.keys import key_blocks, keys_of
from safetune.show.tables import Block, html, print_blocks

if TYPE_CHECKING:
    from safetune.launch.call_shape import Tuner


def show(tuner: Tuner, everything: bool = False) -> None:
    """Print the keys of a kernel's current source; with `everything`, all their configs."""
    if notebook() is None:
        print_blocks(_blocks(tuner, everything))
        return
    from IPython.display import display

    display({"text/html": as_html(tuner, everything)}, raw=True)  # type: ignore[no-untyped-call]


def as_html(tuner: Tuner, everything: bool = False) -> str:
    """Return the output of `show` as HTML."""
    return html(_blocks(tuner, everything))


def _blocks(tuner: Any, everything: bool) -> Iterator[Block]:
    from safetune.store.lookup import open_lookup

    store = open_lookup(Settings.current()).store
    name, digest = tuner.base_fn.__name__, tuner.identity.digest
    keys = [key for key in keys_of(store, name) if key.key.kernel_digest == digest]
    if not keys:
        yield f"{name}: no choice is stored yet"
        return
    names = "; ".join(f"{name.name}: {name.reason}" for name in tuner.key_report.names)
    yield from key_blocks(keys, everything, names)
