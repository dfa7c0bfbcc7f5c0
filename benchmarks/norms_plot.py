"""Draw the norms' figure in README.md from committed results: docs/figures/norms.svg.

    pip install 'safetune[plot]'
    python benchmarks/norms_plot.py

The file carries the digest of the rows that it was drawn from; tests/test_benchmarks.py holds it to
the committed ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import norms
import recording
from readme_table import DEVICE
from recording import Row

FIGURE = recording.ROOT / "docs" / "figures" / "norms.svg"

#: All systems in one process; then torch.compile's mode max-autotune, beside ours once more.
RESULTS = ("norms", "norms_max_autotune")

#: Each system's name, colour (Okabe and Ito's, told apart by everybody) and marker.
LINES = {
    "ours": ("safetune.kernels", "#0072B2", "o"),
    "compile": ("torch.compile", "#E69F00", "s"),
    "compile_max": ("torch.compile, max-autotune", "#F0E442", "D"),
    "fla": ("FLA", "#009E73", "^"),
    "liger": ("Liger", "#CC79A7", "v"),
    "torch": ("torch", "#555555", "x"),
}
NORMS = {"ln": "LayerNorm", "rms": "RMSNorm"}

#: Percent of copy bandwidth by (operation, norm), system and columns.
Shares = dict[tuple[str, str], dict[str, dict[int, float]]]


def shares(rows: Sequence[Row]) -> Shares:
    """Return percent of copy bandwidth by (operation, norm), system and columns."""
    bandwidth = max(row["tb_per_s"] for row in rows if row["part"] == "copy")
    found: Shares = {}
    for row in rows:
        shape = tuple(map(int, row.get("shape", "0x0").split("x")))
        if shape in norms.LARGE and "microseconds" in row:
            height, columns = shape
            moved = norms.MATRICES[row["op"]] * height * columns * 2
            share = 100 * moved / row["microseconds"] / 1e6 / bandwidth
            case = found.setdefault((row["op"], row["norm"]), {})
            case.setdefault(row["system"], {})[columns] = share
    return found


def stored_rows() -> list[Sequence[Row]]:
    """Return the rows of each committed result, in the order of `RESULTS`."""
    folder = recording.RESULTS / DEVICE
    return [json.loads((folder / f"{name}.json").read_text())["rows"] for name in RESULTS]


def all_shares(results: Sequence[Sequence[Row]]) -> Shares:
    """Return the shares of all results; of a system in several, those of the first.

    Each is a share of the bandwidth that was measured in the same run.
    """
    found: Shares = {}
    for rows in results:
        for case, by_system in shares(rows).items():
            found[case] = {**by_system, **found.get(case, {})}
    return found


def digest(results: Sequence[Sequence[Row]]) -> str:
    """Return what tells these rows from others."""
    text = json.dumps([list(rows) for rows in results], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def draw(results: Sequence[Sequence[Row]], figure: Path) -> None:
    """Draw one panel for each operation and norm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = all_shares(results)
    pyplot.rcParams.update({"svg.hashsalt": "safetune", "svg.fonttype": "none", "font.size": 9})
    _, panels = pyplot.subplots(2, 2, figsize=(9, 5.6), sharex=True, sharey=True)
    for line, op in zip(panels, ("backward", "forward"), strict=True):
        for panel, norm in zip(line, NORMS, strict=True):
            for system, (label, colour, marker) in LINES.items():
                points = sorted(found.get((op, norm), {}).get(system, {}).items())
                if points:
                    width = 2.4 if system == "ours" else 1.2
                    x, y = zip(*points, strict=True)
                    panel.plot(x, y, marker, ls="-", c=colour, lw=width, ms=4, label=label)
            panel.set_title(f"{NORMS[norm]}, {op}", fontsize=10)
            panel.set_xscale("log", base=2)
            columns = [width for _, width in norms.LARGE]
            panel.set_xticks(columns, [str(width) for width in columns], rotation=30)
            panel.set_ylim(0, 105)
            panel.grid(alpha=0.3)
    for panel in panels[:, 0]:
        panel.set_ylabel("% of copy bandwidth")
    for panel in panels[1]:
        panel.set_xlabel("columns, bf16")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    pyplot.gcf().legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    pyplot.tight_layout(rect=(0, 0.05, 1, 1))
    figure.parent.mkdir(parents=True, exist_ok=True)
    about = {"Description": digest(results), "Date": None, "Creator": "safetune"}
    pyplot.savefig(figure, metadata=about)
    # One space at the end of a line is what matplotlib writes, and git complains of.
    lines = (text.rstrip() for text in figure.read_text().splitlines())
    figure.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    draw(stored_rows(), FIGURE)
    print(FIGURE)
