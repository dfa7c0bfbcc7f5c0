"""The progress line, on a terminal and in a notebook."""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from safetune import forks
from safetune.keys.encoding import visible
from safetune.miss.how_far import DELAY_S, HowFar, repeated

#: Where the line has less room, a time of its own kind goes without its name.
_NARROW = 80

_LEAST_NAME = 8
_REFRESH_S = 0.5

_showing = forks.lock()


class Bar(Progress):
    """A line with progress parts beside a bar, cut at the end if it does not fit.

    Args:
        how_far: returns the current progress; None while there is nothing to show.
    """

    def __init__(self, how_far: Callable[[], HowFar | None], **options: Any) -> None:
        self._how_far: Callable[[], HowFar | None] = lambda: None
        width = options["console"].width
        texts = (_text(name) for name in ("count", "failed", "best", "times"))
        bar = BarColumn(bar_width=_bar_width(width))
        super().__init__(_text("name"), bar, *texts, _text("rest", ratio=1), expand=True, **options)
        self._task = self.add_task("", total=None, **_shown(HowFar(), width))
        self._how_far = how_far

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the present line."""
        far = self._how_far()
        if far is not None:
            fields = _shown(far, self.console.width)
            self.update(self._task, completed=far.done, total=far.total, **fields)
            yield from super().get_renderables()


def _text(name: str, ratio: int | None = None) -> TextColumn:
    column = Column(no_wrap=True, overflow="ellipsis", ratio=ratio)
    return TextColumn(f"{{task.fields[{name}]}}", markup=False, table_column=column)


def _bar_width(width: int) -> int:
    return max(6, width // 8)


def _shown(far: HowFar, width: int) -> dict[str, Any]:
    """Return the texts of a line; the name is cut to leave room for the others."""
    texts = {name: getattr(far, name) for name in ("count", "failed", "best", "times", "rest")}
    if width < _NARROW:
        texts["best"] = texts["best"].removeprefix("best ")
    taken = sum(len(texts[name]) + 1 for name in ("count", "failed", "best", "times"))
    room = max(_LEAST_NAME, width - taken - _bar_width(width) - 3)
    name = far.name if len(far.name) <= room else f"{far.name[: room - 1]}…"
    return {part: visible(text) for part, text in {"name": name, **texts}.items()}


@contextlib.contextmanager
def moving_line(how_far: Callable[[], HowFar | None], of_command: bool) -> Iterator[None]:
    """Show a line during the body, and remove it at the end; one in a process.

    Args:
        of_command: show it at once, with other output above it. A program's output is left
            unchanged.
    """
    redirects = {"redirect_stdout": of_command, "redirect_stderr": of_command}
    bar = Bar(how_far, console=Console(stderr=True), transient=True, **redirects)

    def show() -> None:
        if _showing.acquire(blocking=False):
            at_end.callback(_showing.release)
            at_end.callback(bar.stop)
            bar.start()

    first_s, once = 0.0 if of_command else DELAY_S, threading.TIMEOUT_MAX
    with contextlib.ExitStack() as at_end, repeated(show, first_s, once):
        yield


def can_move_cursor() -> bool:
    """Whether standard error, which is a terminal, can show the line."""
    console = Console(stderr=True)
    return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter


@contextlib.contextmanager
def in_notebook(how_far: Callable[[], HowFar | None]) -> Iterator[None]:
    """Show a bar below the cell that runs, after a while, and remove it at the end."""
    from IPython.display import display

    handles: list[Any] = []

    def show() -> None:
        far = how_far()
        if far is None:
            return
        if handles:
            handles[0].update(_page_of(far), raw=True)
        else:
            handles.append(display(_page_of(far), raw=True, display_id=True))  # type: ignore[no-untyped-call]

    try:
        with repeated(show, DELAY_S, _REFRESH_S):
            yield
    finally:
        for handle in handles:
            handle.update({"text/html": "", "text/plain": ""}, raw=True)


def _page_of(far: HowFar) -> dict[str, str]:
    text = visible(str(far))
    bar = f'<progress value="{far.done}" max="{far.total}"></progress>'
    return {"text/html": f"{bar} <code>{html.escape(text)}</code>", "text/plain": text}
