"""The live line of a tuning on a terminal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from safetune import forks
from safetune.keys.encoding import visible

#: Seconds before a tuning shows its line; shorter tunings show nothing.
DELAY_S = 2.0

_showing = forks.lock()


@contextlib.contextmanager
def late_line(text: Callable[[], str]) -> Iterator[None]:
    """Show a line for a tuning that takes longer than `DELAY_S`, and remove it at the end.

    One at a time in a process. The output of the caller's program is not changed.

    Args:
        text: returns what to show at the moment; it is cut where it is longer than the terminal.
    """
    live = Live(
        get_renderable=lambda: Text(visible(text()), no_wrap=True, overflow="ellipsis"),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    at_end = contextlib.ExitStack()

    def show() -> None:
        if _showing.acquire(blocking=False):
            at_end.callback(_showing.release)
            at_end.callback(live.stop)
            live.start()

    timer = threading.Timer(DELAY_S, show)
    timer.name, timer.daemon = "safetune-progress", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        at_end.close()


def can_move_cursor() -> bool:
    """Return whether standard error, which is a terminal, can show the line."""
    console = Console(stderr=True)
    return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
