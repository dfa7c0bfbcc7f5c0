"""Blocks of text: lines, headings, facts and tables, and the console that prints them.

No block can control a terminal, because names and values may come from anybody's files.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box, table
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from safetune.keys.encoding import visible

Block = RenderableType

#: The width in a file or a pipe, where lines never wrap.
_WIDE = 10_000
_WIDE_PAGE = 160
_NUMBER = frozenset("0123456789.+-% ")

_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class Column(NamedTuple):
    """A column of a table. A `spare` column is dropped if the table is too wide."""

    name: str
    cells: Sequence[object]
    spare: bool = False


def heading(text: str) -> Block:
    """Return a bold line that never wraps, so that users can copy a path from it."""
    return verbatim(text, "bold")


def verbatim(text: str, style: str = "") -> Block:
    """Return a text that is never wrapped, such as source."""
    # A console joins texts to one that it wraps, but leaves a group as it is.
    return Group(Text(visible(text), style=style, no_wrap=True, overflow="ignore"))


def indented(text: str) -> Block:
    """Return an indented text."""
    return Padding.indent(text, 2)


def facts(named: Iterable[tuple[str, str]], style: str = "") -> Block:
    """Return a line per fact: its name, and its text, which wraps beside the name."""
    made = table.Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, style=style)
    made.add_column(overflow="fold")
    for name, text in named:
        made.add_row(name, text)
    return made


class Table:
    """Rows of one line each, with a heading per column.

    If the table is too wide, headings wrap first. Then spare columns are dropped, last one first;
    then texts are cut, longest first, and numbers last.
    """

    def __init__(self, columns: Iterable[Column], styles: Sequence[str | None] = ()) -> None:
        self.columns = [column for column in columns if any(map(str, column.cells))]
        self.styles = styles

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, object]],
        styles: Sequence[str | None] = (),
        spare: Collection[str] = (),
    ) -> Table:
        """Return a table with a column for each name in the rows."""
        columns = [column._replace(spare=column.name in spare) for column in columns_of(rows)]
        return cls(columns, styles)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, at most as wide as the console."""
        if not self.columns:
            return
        made = _made(self.columns, self.styles, str)
        columns = list(self.columns)
        while console.measure(made, options=options.update(width=_WIDE)).maximum > (
            options.max_width
        ):
            made = _made(columns, self.styles, lambda name: name.replace("_", "_\n"))
            spare = [place for place, column in enumerate(columns) if column.spare]
            if not spare:
                break
            del columns[spare[-1]]
        yield made


def _made(
    columns: Sequence[Column], styles: Sequence[str | None], headed: Callable[[str], str]
) -> table.Table:
    made = table.Table(box=box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
    for name, cells, _ in columns:
        is_number = all(_NUMBER.issuperset(str(cell)[:1]) for cell in cells)
        justify: Any = "right" if is_number else "left"
        made.add_column(headed(visible(name)), justify=justify, no_wrap=is_number)
    for number, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        made.add_row(*map(_cell, cells), style=styles[number] if styles else None)
    return made


def _cell(cell: object) -> RenderableType:
    if isinstance(cell, Bar):
        return cell
    return Text(visible(str(cell)), no_wrap=True, overflow="ellipsis")


def columns_of(rows: Sequence[Mapping[str, object]]) -> list[Column]:
    """Return a column for each name in some rows, with empty cells for missing values."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [Column(name, [row.get(name, "") for row in rows]) for name in names]


def common_and_columns(
    rows: Sequence[Mapping[str, str]],
) -> tuple[dict[str, str], list[Column]]:
    """Return the common values of several rows, and the columns in which they differ."""
    columns = columns_of(rows)
    if len(rows) < 2:
        return {}, columns
    common = {c.name: str(c.cells[0]) for c in columns if len({*c.cells}) == 1}
    return common, [column for column in columns if column.name not in common]


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print each block on standard output as soon as it is ready."""
    console = _stdout_console()
    for block in blocks:
        with console.capture() as printed:
            console.print(block, crop=False)
        for line in printed.get().splitlines():
            sys.stdout.write(f"{line.rstrip()}\n")


def html(blocks: Iterable[Block]) -> str:
    """Return blocks as HTML."""
    console = _Console(record=True, file=io.StringIO(), width=_WIDE_PAGE, force_jupyter=False)
    for block in blocks:
        console.print(block, crop=False)
    return console.export_html(inline_styles=True, code_format=_HTML)


def _stdout_console() -> Console:
    """Return the console for standard output: as wide as the terminal, or as $COLUMNS says."""
    console = _Console(force_jupyter=False)
    if console.width and (console.is_terminal or "COLUMNS" in os.environ):
        return console
    return _Console(width=_WIDE, force_jupyter=False)


class _Console(Console):
    """A console whose texts cannot control the terminal; its styles can.

    Text is printed literally: a config's `[64, 64]` is not rich markup.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def on_broken_pipe(self) -> None:
        """Let the caller handle it; rich's own method ends the process with exit code 1."""
        raise  # what rich is handling
