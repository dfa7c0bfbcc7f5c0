"""Write the tables of figures in README.md and docs/, from the committed results.

`make figures` runs `figures.py` and this; tests/test_benchmarks.py holds the pages to it. A page
has the place of a table as `<!-- figures: NAME -->`; `tables.toml` says what is in it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bars
import figures
import proof_list
import recording

PAGES = tuple(
    recording.ROOT / page for page in ("README.md", "docs/benchmarks.md", "docs/for_maintainers.md")
)
TABLES = Path(__file__).with_name("tables.toml")

_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)


class Results:
    """The results of one device."""

    def __init__(self, device: str = figures.DEVICE, folder: Path = recording.RESULTS) -> None:
        self.folder = folder / device

    def load(self, bench: str) -> dict[str, Any]:
        """Return a result, `BENCHMARK` or `DEVICE/BENCHMARK`; empty where there is none."""
        folder = self.folder.parent if "/" in bench else self.folder
        path = folder / f"{bench}.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def figures(self, *benches: str) -> recording.Figures:
        """Return the figures of results."""
        return {n: v for bench in benches for n, v in self.load(bench).get("figures", {}).items()}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; nothing where it would have no rows."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def described(table: Mapping[str, Any], results: Results) -> str:
    """Return a table of tables.toml, and below it where its figures are from."""
    benches = table["results"]
    body = _table(table["heads"], list(_rows(table, results.figures(*benches))))
    below = table.get("below", "sources")
    if below == "sources":
        return _with_sources(results, body, *benches)
    sentence = machine(results, benches) if below == "machine" else ""
    return "\n\n".join(filter(None, [body, sentence]))


def _rows(table: Mapping[str, Any], known: recording.Figures) -> Iterator[list[str]]:
    each = table.get("each", {})
    for pairs in itertools.product(*each.values()):
        words = dict(zip(each, (name for name, _ in pairs), strict=True))
        words |= {f"{name}_words": text for name, (_, text) in zip(each, pairs, strict=True)}
        for row in table["rows"]:
            try:
                cells = [string.Template(cell).substitute(words).format_map(known) for cell in row]
            except KeyError:
                continue
            yield _marked(cells) if table["heads"][-1] == "safetune" else cells


def _marked(cells: Sequence[str]) -> list[str]:
    """Return a row; a time of safetune that is longer than the one before it says so."""
    seconds = [float(cell[:-2]) if cell.endswith(" s") else 0.0 for cell in cells]
    slower = [0 < before < after for before, after in itertools.pairwise([0.0, *seconds])]
    marks = [place % 2 == 0 and is_slower for place, is_slower in enumerate(slower)]
    return [f"{cell}, slower" if mark else cell for cell, mark in zip(cells, marks, strict=True)]


def machine(results: Results, benches: Sequence[str]) -> str:
    """Return one sentence: the card, the versions and the days of these results."""
    found = [loaded for bench in benches if (loaded := results.load(bench))]
    if not found:
        return ""
    days = sorted({loaded["date"][:10] for loaded in found})
    versions = found[-1]["versions"]
    names = f"torch {versions['torch'].partition('+')[0]}, Triton {versions['triton']}"
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    device = found[-1]["device"].replace("_", " ")
    return f"One {device}, {versions['cpus']} cores, {names}; {span}."


def _with_sources(results: Results, body: str, *benches: str) -> str:
    """Return a table with its sources below; a sentence where there is no result."""
    if not body:
        return f"There is no result of `benchmarks/{benches[-1].rpartition('/')[2]}.py` yet."
    sources = [_source(loaded, bench) for bench in benches if (loaded := results.load(bench))]
    return "\n\n".join([body, *sources])


def _source(loaded: Mapping[str, Any], bench: str) -> str:
    """Return a result's file and days; the file has its command, versions and commit.

    Rows that a later run took over have a day of their own.
    """
    name = bench.rpartition("/")[2]
    path = f"../benchmarks/results/{loaded['device']}/{name}.json"
    days = sorted({row.get("date", loaded["date"])[:10] for row in loaded["rows"]})
    return f"[{name}.json]({path}), {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def proofs(results: Results) -> str:
    """Return what libraries' own tests say under safetune, and the times of their first steps."""
    known, groups = results.figures("proofs", "proof_steps"), dict[str, list[str]]()
    for proof in proof_list.PROOFS:
        if f"passed {proof.name}, run" in known:
            library = re.sub(r" \d+$", "", proof.name.partition(":")[0])
            groups.setdefault(library, []).append(proof.name)
    ways, caches = ("stock", "run", "shim"), ("cold", "stored")
    rows = [
        [
            f"{library}: {', '.join(name.partition(': ')[2] for name in names)}",
            *(_passed(known, names, way) for way in ways),
            *(
                _span([known.get(f"first_step_s {name}, run {c}") for name in names])
                for c in caches
            ),
        ]
        for library, names in groups.items()
    ]
    heads = ("tests that pass", "triton.autotune", "`safetune run`", "the shim")
    heads += ("first step, empty caches", "stored choices")
    return _with_sources(results, _table(heads, rows), "proof_steps", "proofs")


def _passed(known: recording.Figures, names: Sequence[str], way: str) -> str:
    """Return how many tests pass, of those that ran in this way."""
    ran = [name for name in names if f"passed {name}, {way}" in known]
    passed = sum(known[f"passed {name}, {way}"] for name in ran)
    of = sum(known[f"tests {name}, run"] for name in ran)
    return f"{passed:g} of {of:g}"


def _span(seconds: Sequence[float | None]) -> str:
    known = sorted(each for each in seconds if each is not None)
    ends = dict.fromkeys(f"{each:.1f}" for each in known[:1] + known[-1:])
    return f"{' to '.join(ends)} s" if known else ""


def licences(results: Results) -> str:
    """Return the licences of what is installed with safetune."""
    bench, by_licence = "interpreter/dependency", dict[str, list[str]]()
    for row in results.load(bench).get("rows", []):
        if row["what"] == "package":
            by_licence.setdefault(row["licence"], []).append(row["name"])
    rows = [[licence, ", ".join(sorted(names))] for licence, names in sorted(by_licence.items())]
    return _with_sources(results, _table(("licence", "packages"), rows), bench)


def missed(results: Results) -> str:
    """Return the bars that these results miss, or have no figure for; a word where none is."""
    rows = [
        [line["benchmark"], line["figure"], line["value"] or "not measured", line["bar"]]
        for line in bars.report(bars.load(), results.folder)
        if line["verdict"] in ("missed", "absent")
    ]
    return _table(("benchmark", "figure", "value", "bar"), rows) or "None."


def picture(name: str, caption: str, _: Results) -> str:
    """Return a figure in both variants; nothing where it is not drawn."""
    if not figures.path(name, "light").exists():
        return ""
    dark = f'media="(prefers-color-scheme: dark)" srcset="figures/{name}-dark.svg"'
    image = f'<img src="figures/{name}.svg" alt="{caption}" width="800">'
    return f"<picture><source {dark}>{image}</picture>"


def blocks() -> dict[str, Callable[[Results], str]]:
    """Return the writer of each table and figure by its name; needs Python 3.11."""
    import tomllib

    tables = tomllib.loads(TABLES.read_text(encoding="utf-8"))
    return {
        **{n: partial(described, tables.get(t.get("as"), {}) | t) for n, t in tables.items()},
        **{
            f"picture_{n}": partial(picture, n, drawn.caption) for n, drawn in figures.DRAWN.items()
        },
        **{function.__name__: function for function in (proofs, licences, missed)},
    }


def written(page: Path, results: Results) -> str:
    """Return a page's text with its tables as the results have them."""
    docs, writers = os.path.relpath(recording.ROOT / "docs", page.parent), blocks()

    def block(match: re.Match[str]) -> str:
        made = writers[match[2]](results).replace(
            '"figures/', f'"{docs}/figures/'.replace("./", "")
        )
        return f"{match[1]}{made}\n{match[4]}" if made else f"{match[1]}{match[4]}"

    return _PLACE.sub(block, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page, Results()), encoding="utf-8")
        print(page)
