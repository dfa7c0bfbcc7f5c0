"""Draw the figures of docs/benchmarks.md from the committed results, for light and dark pages.

    make figures

A file carries the digest of the rows that it was drawn from; tests/test_benchmarks.py holds it to
the committed ones. A figure whose results are not there yet is not drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import norms
import recording
from recording import Row

DEVICE = "NVIDIA_H100_80GB_HBM3"
FOLDER = recording.ROOT / "docs" / "figures"

Rows = Mapping[str, Sequence[Row]]  # of each result, by its name


@dataclass(frozen=True)
class Theme:
    """The colours of a page; those of lines are Okabe and Ito's, told apart by everybody."""

    text: str
    grid: str
    lines: Mapping[str, str]


THEMES = {
    "light": Theme(
        "#24292f",
        "#d0d7de",
        {
            "blue": "#0072B2",
            "orange": "#D55E00",
            "yellow": "#B8860B",
            "green": "#009E73",
            "pink": "#B5579A",
            "grey": "#6e7781",
        },
    ),
    "dark": Theme(
        "#e6edf3",
        "#3d444d",
        {
            "blue": "#56B4E9",
            "orange": "#F0883E",
            "yellow": "#F0E442",
            "green": "#3FB68B",
            "pink": "#E59AC8",
            "grey": "#9198a1",
        },
    ),
}

#: Each tuner's and system's name, colour and marker.
TUNERS = {
    "safetune": ("safetune", "blue", "o"),
    "triton": ("triton.autotune", "orange", "s"),
}
SYSTEMS = {
    "ours": ("safetune.kernels", "blue", "o"),
    "compile": ("torch.compile", "orange", "s"),
    "compile_max": ("torch.compile, max-autotune", "yellow", "D"),
    "fla": ("FLA", "green", "^"),
    "liger": ("Liger", "pink", "v"),
    "torch": ("torch", "grey", "x"),
}
NORMS = {"ln": "LayerNorm", "rms": "RMSNorm"}

#: Percent of copy bandwidth by (operation, norm), system and columns.
Shares = dict[tuple[str, str], dict[str, dict[int, float]]]


def shares(results: Rows) -> Shares:
    """Return percent of copy bandwidth by (operation, norm), system and columns.

    Each is a share of the bandwidth that was measured in the same run; of a system in several
    results it is that of the first.
    """
    found: Shares = {}
    for rows in results.values():
        bandwidth = max(row["tb_per_s"] for row in rows if row["part"] == "copy")
        of_result: Shares = {}
        for row in rows:
            height, columns = map(int, row.get("shape", "0x0").split("x"))
            if height * columns >= norms.LARGE and "microseconds" in row:
                moved = norms.MATRICES[row["op"]] * height * columns * 2
                share = 100 * moved / row["microseconds"] / 1e6 / bandwidth
                case = of_result.setdefault((row["op"], row["norm"]), {})
                case.setdefault(row["system"], {})[columns] = share
        for case_name, by_system in of_result.items():
            found[case_name] = {**by_system, **found.get(case_name, {})}
    return found


def draw_norms(pyplot: Any, results: Rows, theme: Theme) -> None:
    """Draw one panel for each operation and norm."""
    found = shares(results)
    _, panels = pyplot.subplots(2, 2, figsize=(9, 5.6), sharex=True, sharey=True)
    columns = [width for _, width in norms.SHAPES]
    for line, op in zip(panels, ("backward", "forward"), strict=True):
        for panel, norm in zip(line, NORMS, strict=True):
            for system, style in SYSTEMS.items():
                points = found.get((op, norm), {}).get(system, {})
                _line(panel, points, style, theme, bold=system == "ours")
            panel.set_title(f"{NORMS[norm]}, {op}")
            panel.set_xscale("log", base=2)
            panel.set_xticks(columns, [str(width) for width in columns], rotation=30)
            panel.set_ylim(0, 105)
    for panel in panels[:, 0]:
        panel.set_ylabel("% of copy bandwidth")
    for panel in panels[1]:
        panel.set_xlabel("columns, bf16")
    _legend(pyplot, panels[0, 0])


def draw_launches(pyplot: Any, results: Rows, theme: Theme) -> None:
    """Draw the host time of a known launch as bars, by the number of arguments."""
    import launch_overhead

    found = launch_overhead.figures(results["launch_overhead"])
    ways = {
        "autotune": ("triton.autotune", "orange"),
        "jit": ("triton.jit", "grey"),
        "safetune": ("safetune", "blue"),
        "run": ("the launcher alone", "green"),
    }
    counts = [count for count in (3, 13, 24) if f"us_jit_{count}" in found]
    _, panel = pyplot.subplots(figsize=(9, 3.2))
    for place, (way, (label, colour)) in enumerate(ways.items()):
        values = [found[f"us_{way}_{count}"] for count in counts]
        middles = [group + 0.2 * (place - 1.5) for group in range(len(counts))]
        bars = panel.bar(middles, values, 0.18, color=theme.lines[colour], label=label)
        panel.bar_label(bars, fmt="%.1f", color=theme.text, fontsize=8)
    panel.set_xticks(range(len(counts)), [f"{count} arguments" for count in counts])
    panel.set_ylabel("us on the host")
    panel.grid(axis="x", visible=False)
    _legend(pyplot, panel)


def draw_tuning_configs(pyplot: Any, results: Rows, theme: Theme) -> None:
    """Draw the seconds of the first tuning of a process by the number of configs."""
    points: dict[str, dict[int, float]] = {tuner: {} for tuner in TUNERS}
    small = [row for row in results["first_tuning"] if (row["kernel"], row["state"]) == FIRST]
    for (count, tuner), seconds in recording.medians(small, "seconds", "configs", "tuner").items():
        points[tuner][count] = seconds
    calls = [row for row in results["tuning_time"] if row["kind"] == "first_call"]
    calls = [row for row in calls if row["state"] == "cold" and row["tuner"] in TUNERS]
    for (count, tuner), seconds in recording.medians(
        calls, "first_call_s", "configs", "tuner"
    ).items():
        points[tuner][count] = seconds
    swept = [row for row in results.get("sweep", ()) if row["key"] == "first"]
    for (count,), seconds in recording.medians(swept, "seconds", "configs").items():
        points["safetune"][count] = seconds
    _, panel = pyplot.subplots(figsize=(9, 3.6))
    for tuner, style in TUNERS.items():
        _line(panel, points[tuner], style, theme, bold=tuner == "safetune")
        for count, seconds in points[tuner].items():
            up = 7 if tuner == "triton" else -15
            panel.annotate(
                f"{seconds:.3g} s",
                (count, seconds),
                (0, up),
                textcoords="offset points",
                ha="center",
            )
    counts = sorted({*points["safetune"], *points["triton"]})
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(counts, [f"{count}" for count in counts])
    panel.margins(x=0.08, y=0.3)
    _plain_seconds(panel)
    panel.set_xlabel("configs (up to 16: a vector add; from 72: a matrix product), empty caches")
    panel.set_ylabel("seconds")
    _legend(pyplot, panel)


#: Kernel and state of the rows of `first_tuning` that are drawn.
FIRST = ("add", "cold")


def draw_tuning_arguments(pyplot: Any, results: Rows, theme: Theme) -> None:
    """Draw the seconds of a further key by the size of its arguments, a panel for each kernel."""
    import argument_size

    titles = {"add": "vector add", "softmax": "row softmax", "in_place": "in place"}
    times = recording.medians(results["argument_size"], "seconds", "kernel", "size", "tuner")
    _, panels = pyplot.subplots(1, 3, figsize=(9, 3.2), sharey=True)
    sizes = {name: size / (1 << 20) for name, size in argument_size.SIZES.items()}
    for panel, kernel in zip(panels, titles, strict=True):
        for tuner, style in TUNERS.items():
            points = {
                size: times[kernel, name, tuner]
                for name, size in sizes.items()
                if "short" not in name and (kernel, name, tuner) in times
            }
            _line(panel, points, style, theme, bold=tuner == "safetune")
        panel.set_title(titles[kernel])
        panel.set_xscale("log")
        panel.set_yscale("log")
        ticks = [size for name, size in sizes.items() if "short" not in name]
        panel.set_xticks(ticks, ["12 MiB", "192", "768", "3 GiB", "6"], rotation=30)
        _plain_seconds(panel)
    panels[0].set_ylabel("seconds for 8 configs")
    _legend(pyplot, panels[0])


def _line(
    panel: Any, points: Mapping[int | float, float], style: Sequence[str], theme: Theme, bold: bool
) -> None:
    if points:
        label, colour, marker = style
        x, y = zip(*sorted(points.items()), strict=True)
        width = 2.4 if bold else 1.2
        panel.plot(x, y, marker, ls="-", c=theme.lines[colour], lw=width, ms=4, label=label)


def _plain_seconds(panel: Any) -> None:
    """Label a logarithmic axis by 0.2, 0.3, 0.5, 1, 2, not by powers."""
    lowest, highest = panel.get_ylim()
    steps = (step * 10**power for power in range(-2, 4) for step in (1, 2, 3, 5))
    ticks = [step for step in steps if lowest <= step <= highest]
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()


def _legend(pyplot: Any, panel: Any) -> None:
    handles, labels = panel.get_legend_handles_labels()
    pyplot.gcf().legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    height = pyplot.gcf().get_figheight()
    pyplot.tight_layout(rect=(0, 0.28 / height, 1, 1))


@dataclass(frozen=True)
class Drawing:
    """A figure: the results that it needs, those that it shows where they are there, and how."""

    caption: str
    needs: tuple[str, ...]
    draw: Callable[[Any, Rows, Theme], None]
    shows: tuple[str, ...] = ()


DRAWN = {
    "norms": Drawing(
        "Share of copy bandwidth of layer and RMS norm, forward and backward, against torch, "
        "torch.compile in two modes, FLA and Liger",
        ("norms", "norms_max_autotune"),
        draw_norms,
    ),
    "launches": Drawing(
        "Host time of a launch whose config is known, by the number of arguments",
        ("launch_overhead",),
        draw_launches,
    ),
    "tuning_configs": Drawing(
        "Seconds of the first tuning of a process, by the number of configs",
        ("first_tuning", "tuning_time"),
        draw_tuning_configs,
        ("sweep",),
    ),
    "tuning_arguments": Drawing(
        "Seconds of a further tuning of 8 configs, by the size of the arguments",
        ("argument_size",),
        draw_tuning_arguments,
    ),
}


def path(name: str, theme: str) -> Path:
    """Return the file of a figure."""
    return FOLDER / (f"{name}.svg" if theme == "light" else f"{name}-{theme}.svg")


def stored_rows(name: str) -> dict[str, Sequence[Row]]:
    """Return the rows of the results of a figure; empty where one that it needs is not there."""
    drawing, folder = DRAWN[name], recording.RESULTS / DEVICE
    files = {bench: folder / f"{bench}.json" for bench in (*drawing.needs, *drawing.shows)}
    if not all(files[bench].exists() for bench in drawing.needs):
        return {}
    there = {bench: file for bench, file in files.items() if file.exists()}
    return {bench: json.loads(file.read_text())["rows"] for bench, file in there.items()}


def digest(results: Rows) -> str:
    """Return what tells these rows from others."""
    text = json.dumps([list(rows) for rows in results.values()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def draw(name: str, results: Rows) -> None:
    """Draw a figure for both kinds of page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for theme_name, theme in THEMES.items():
        pyplot.rcdefaults()
        pyplot.rcParams.update({"svg.hashsalt": "safetune", "svg.fonttype": "none", "font.size": 9})
        colours = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor")
        pyplot.rcParams.update(dict.fromkeys(colours, theme.text))
        pyplot.rcParams.update({"axes.edgecolor": theme.grid, "grid.color": theme.grid})
        pyplot.rcParams.update({"axes.grid": True, "axes.axisbelow": True, "axes.titlesize": 10})
        pyplot.rcParams.update({"savefig.transparent": True, "grid.alpha": 0.6})
        DRAWN[name].draw(pyplot, results, theme)
        file = path(name, theme_name)
        file.parent.mkdir(parents=True, exist_ok=True)
        about = {"Description": digest(results), "Date": None, "Creator": "safetune"}
        pyplot.savefig(file, metadata=about)
        pyplot.close()
        # One space at the end of a line is what matplotlib writes, and git complains of.
        lines = (text.rstrip() for text in file.read_text().splitlines())
        file.write_text("\n".join(lines) + "\n")
        print(file)


if __name__ == "__main__":
    for figure in DRAWN:
        if rows := stored_rows(figure):
            draw(figure, rows)
