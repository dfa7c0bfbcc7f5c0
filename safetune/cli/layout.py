"""Tables that fit the terminal: columns go before a row is wrapped."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from safetune.frozen import dataclass

_NUMBER = frozenset("0123456789.+-% ")


@dataclass(frozen=True)
class Column:
    """A column of texts.

    Attributes:
        spare: a table that is too wide is printed without its columns of the highest number first;
            those with 0 stay.
    """

    name: str
    cells: tuple[str, ...]
    spare: int = 0

    @property
    def right(self) -> bool:
        """Whether all cells are numbers, perhaps with a unit."""
        return all(_NUMBER.issuperset(cell[:1]) for cell in self.cells)


def shared_and_columns(
    records: Sequence[Mapping[str, str]],
) -> tuple[dict[str, str], list[Column]]:
    """Return what all of several records have in common, and a column for each other name."""
    names = list(dict.fromkeys(name for record in records for name in record))
    columns = [Column(name, tuple(record.get(name, "") for record in records)) for name in names]
    if len(records) < 2:
        return {}, columns
    shared = {column.name: column.cells[0] for column in columns if len({*column.cells}) == 1}
    return shared, [column for column in columns if column.name not in shared]


def print_records(
    console: Console,
    title: str,
    records: Sequence[Mapping[str, object]],
    styles: Sequence[str | None] = (),
) -> None:
    """Print a table with a row for each record, below a title."""
    console.print(title, style="bold", soft_wrap=True)
    names = records[0] if records else ()
    print_table(console, [Column(n, tuple(str(r[n]) for r in records)) for n in names], styles)
    console.print()


def words(values: Mapping[str, str]) -> str:
    """Return `BLOCK=64 num_warps=4`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def print_table(
    console: Console, columns: Sequence[Column], styles: Sequence[str | None] = ()
) -> None:
    """Print rows, each on one line if the terminal has room for the columns that must stay.

    If it has not, each row is a paragraph of `name=value`.
    """
    columns = [column for column in columns if any(column.cells)]
    if not columns:
        return
    for variant in _variants(columns):
        table = _table(variant, styles)
        wide = console.options.update(width=10_000)
        if console.measure(table, options=wide).maximum <= console.width:
            console.print(table)
            return
    for row in range(len(columns[0].cells)):
        cells = {column.name: column.cells[row] for column in columns if column.cells[row]}
        for line in paragraph(list(cells.items()), console.width - 1):
            console.print(line, soft_wrap=True)


def paragraph(cells: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield lines of `name=value`, broken between these only; later lines are indented."""
    line = ""
    for name, value in cells:
        word = f"{name}={value}" if name else value
        if line.strip() and cell_len(line) + 1 + cell_len(word) > width:
            yield line
            line = "     "
        line = f"{line} {word}" if line else word
    yield line


def print_fact(console: Console, name: str, text: str, style: str | None = None) -> None:
    """Print a text after its name, wrapped between words and indented by the name's width."""
    lines = textwrap.wrap(
        text,
        max(20, console.width - 1 - len(name)),
        break_on_hyphens=False,
        break_long_words=False,
    )
    console.print(name, style=style, end="")
    console.print(f"\n{' ' * len(name)}".join(lines), soft_wrap=True)


def _variants(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """Yield a table's columns; then with its headings in lines; then fewer and fewer of them."""
    shown = list(columns)
    yield shown
    while True:
        yield [Column(c.name.replace("_", "_\n"), c.cells, c.spare) for c in shown]
        most = max(column.spare for column in shown)
        if not most:
            return
        shown = [column for column in shown if column.spare < most]


def _table(columns: Sequence[Column], styles: Sequence[str | None]) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True)
    for number, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        table.add_row(*cells, style=styles[number] if styles else None)
    return table
