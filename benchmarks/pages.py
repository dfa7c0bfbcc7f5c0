"""Write the tables of figures in README.md and docs/, from the committed results.

`make figures` runs `figures.py` and this; tests/test_benchmarks.py holds the pages to it. A page
has the place of a table as `<!-- figures: NAME -->`. A benchmark without a result has no line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars
import figures
import proof_list
import recording

DEVICE = figures.DEVICE
PAGES = tuple(
    recording.ROOT / page for page in ("README.md", "docs/benchmarks.md", "docs/for_maintainers.md")
)

_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """One row of a table: words, then a cell for each figure of a result."""

    bench: str
    words: str
    figures: tuple[str, ...]  # names; an empty one leaves its cell empty
    form: str = "{:.1f} s"

    def text(self, results: Results) -> list[str]:
        """Return the cells; nothing where a figure is missing."""
        found = results.figures(self.bench)
        if not set(filter(None, self.figures)) <= set(found):
            return []
        return [self.words, *(self.form.format(found[n]) if n else "" for n in self.figures)]


class Results:
    """The results of one device."""

    def __init__(self, device: str = DEVICE, folder: Path = recording.RESULTS) -> None:
        self.folder = folder / device

    def load(self, bench: str) -> dict[str, Any]:
        """Return a result; empty where there is none."""
        path = self.folder / f"{bench}.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def figures(self, bench: str) -> recording.Figures:
        """Return a result's figures."""
        return dict(self.load(bench).get("figures", {}))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; nothing where it would have no rows."""
    rows = [row for row in rows if row]
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _compared(results: Results, lines: Sequence[Line], *heads: str) -> str:
    heads = heads or ("", "triton.autotune", "safetune")
    return _table(heads, [line.text(results) for line in lines])


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


def _source(results: Results, bench: str) -> str:
    """Return the line below a table: its file, day, versions, commit and command."""
    loaded = results.load(bench)
    versions = {name: version.split("+")[0] for name, version in loaded["versions"].items()}
    software = f"torch {versions['torch']}, Triton {versions['triton']}"
    path = f"../benchmarks/results/{loaded['device']}/{bench}.json"
    made = (
        f"[{bench}.json]({path}), {loaded['date'][:10]}, {software}, commit {loaded['commit'][:7]}"
    )
    return f"{made}: `{loaded['command']}`"


def _section(results: Results, bench: str, *parts: str) -> str:
    """Return the parts with the source of the result below; a sentence where there is none."""
    if not any(parts):
        return f"There is no result of `benchmarks/{bench}.py` yet."
    return "\n\n".join(filter(None, [*parts, _source(results, bench)]))


# --------------------------------------------------------------------------- README

HEADLINES = (
    Line(
        "tuning_time",
        "first call, 72 matmul configs, empty caches",
        ("first_call_s_cold_triton", "first_call_s_cold_safetune"),
    ),
    Line(
        "unmodified",
        "first forward and backward of three FLA layers, empty caches",
        ("unmodified_first_step_s_triton_cold", "unmodified_first_step_s_safetune_cold"),
    ),
    Line(
        "launch_overhead",
        "host time of a launch with 13 arguments, config known",
        ("us_autotune_13", "us_safetune_13"),
        "{:.1f} us",
    ),
    Line(
        "argument_size",
        "a further key of 8 configs, a row softmax on 768 MiB",
        ("seconds_768MiB_softmax_triton", "seconds_768MiB_softmax_safetune"),
        "{:.2f} s",
    ),
)

MORE = (
    Line(
        "startup",
        "60 small tunings in a row, empty caches",
        ("startup_60_s_triton", "startup_60_s_safetune"),
    ),
    Line(
        "choice_quality",
        "choices within 2% of the best config by a long, exhaustive measurement",
        ("share_within_2pct_triton", "share_within_2pct"),
        "{:.0%}",
    ),
    Line(
        "soak",
        "wrong answers in 300 tunings with 600 configs that crash, hang or compute something else",
        ("", "wrong_answers"),
        "{:.0f}",
    ),
    Line(
        "first_tuning",
        "first call of a kernel with tensor descriptors, 4 configs, Triton's cache warm",
        ("s_warm_4_described_triton", "s_warm_4_described_safetune"),
        "{:.2f} s",
    ),
    Line(
        "argument_size",
        "a further key, a row softmax on 6 GiB on a card with 10 GiB free",
        ("seconds_6GiB_short_softmax_triton", "seconds_6GiB_short_softmax_safetune"),
        "{:.1f} s",
    ),
)


def headlines(results: Results) -> str:
    """Return README's first table."""
    table = _compared(results, HEADLINES)
    return "\n\n".join(filter(None, [table, machine(results, [line.bench for line in HEADLINES])]))


def more(results: Results) -> str:
    """Return README's second table; what takes longer with safetune says so."""
    return _compared(results, [_marked(line, results) for line in MORE])


def _marked(line: Line, results: Results) -> Line:
    found = results.figures(line.bench)
    stock, ours = (found.get(name) for name in line.figures)
    if line.form.endswith(" s") and stock is not None and ours is not None and ours > stock:
        return dataclasses.replace(line, words=f"slower: {line.words}")
    return line


# --------------------------------------------------------------------------- docs/benchmarks.md


def matmul(results: Results) -> str:
    """Return the tuning of 72 configs."""
    lines = [
        Line(
            "tuning_time",
            f"first call in a fresh process, {words}",
            (f"first_call_s_{state}_triton", f"first_call_s_{state}_safetune"),
        )
        for state, words in (("cold", "empty caches"), ("warm", "Triton's cache warm"))
    ]
    lines.append(
        Line(
            "tuning_time",
            'the same, empty caches, `isolation="config"`: a process for each config',
            ("", "first_call_s_cold_isolated"),
        )
    )
    return _section(results, "tuning_time", _compared(results, lines))


def first_tunings(results: Results) -> str:
    """Return the first tuning of a process, for each kernel, number of configs and cache."""
    kernels = {"add": "vector add", "norm": "norm", "described": "tensor descriptors"}
    caches = {"cold": "empty caches", "warm": "Triton's cache warm"}
    lines = [
        Line(
            "first_tuning",
            f"{kernel}, {count} configs, {words}",
            (f"s_{state}_{count}_{name}_triton", f"s_{state}_{count}_{name}_safetune"),
            "{:.2f} s",
        )
        for name, kernel in kernels.items()
        for count in (4, 16)
        for state, words in caches.items()
    ]
    return _section(results, "first_tuning", _compared(results, lines))


def first_tunings_h200(results: Results) -> str:
    """Return the same on an H200."""
    return first_tunings(_of_h200(results))


def first_tunings_newest(results: Results) -> str:
    """Return the same with the newest Triton, on the same kind of card."""
    return first_tunings(Results("triton_3.9.0", results.folder))


def arguments(results: Results) -> str:
    """Return the tuning of a further key by the size of its arguments."""
    kernels = {"add": "vector add", "softmax": "row softmax", "in_place": "in place"}
    sizes = ("12MiB", "192MiB", "768MiB", "3GiB", "6GiB", "6GiB_short")
    lines = [
        Line(
            "argument_size",
            f"{words}, {size.replace('_short', ', 10 GiB free')}",
            (f"seconds_{size}_{kernel}_triton", f"seconds_{size}_{kernel}_safetune"),
            "{:.2f} s",
        )
        for kernel, words in kernels.items()
        for size in sizes
    ]
    return _section(results, "argument_size", _compared(results, lines))


def sweep(results: Results) -> str:
    """Return the sweep of 1,920 configs."""
    found = results.figures("sweep")
    rows = [
        [f"{key} key", f"{found[f'{key}_key_s']:.1f} s", f"{found[f'{key}_key_regret_worst']:.1%}"]
        for key in ("first", "further")
        if f"{key}_key_s" in found
    ]
    heads = ("1,920 matmul configs, empty caches", "safetune", "slower than the best, at worst")
    return _section(results, "sweep", _table(heads, rows))


def fused_moe(results: Results) -> str:
    """Return what a search takes for all batch sizes of SGLang's fused mixture of experts."""
    found, every = results.figures("fused_moe_sweep"), _of_h200(results)
    whole, rows = every.figures("fused_moe_exhaustive"), []
    for name in ("bf16", "fp8"):
        key = f"fused_moe_{name}"
        if f"{key}_wall_s" in found:
            row = [name, f"{found[f'{key}_wall_s']:.0f} s", f"{found[f'{key}_configs']:.0f}"]
            regrets = [found.get(f"{key}_regret_{part}") for part in ("median", "worst")]
            row += ["" if regret is None else f"{regret:.1%}" for regret in regrets]
            rows.append([*row, f"{found.get(f'{key}_regret_keys', 0):.0f}"])
        if f"{key}_exhaustive_wall_s" in whole:
            taken = f"{whole[f'{key}_exhaustive_wall_s']:.0f} s"
            configs = f"{whole[f'{key}_exhaustive_configs']:,.0f}"
            rows.append([f"{name}, all configs", taken, configs, "", "", ""])
    heads = ("dtype", "time in all", "configs measured", "slower than the best: median", "at worst")
    table = _table((*heads, "batch sizes of these"), rows)
    source = _source(every, "fused_moe_exhaustive") if whole else ""
    return _section(results, "fused_moe_sweep", table, source)


def _of_h200(results: Results) -> Results:
    return Results("NVIDIA_H200", results.folder.parent)


def searches(results: Results) -> str:
    """Return how good the choices of searches are, with chance beside them."""
    return _searches(results, "search_replay", {"matmul": "matmul, 1,920"})


def sweep_searches(results: Results) -> str:
    """Return the same where a search knows of other keys what their searches measured."""
    return _searches(results, "search_replay_sweeps", {"matmul": "matmul, 1,920"})


def other_searches(results: Results) -> str:
    """Return the same of the kernels on which the search was not tried when it was made."""
    bench, every = "search_replay_others", _of_h200(results)
    moe = {"fused_moe_bf16": "SGLang's fused MoE, bf16, 1,920"}
    spaces = {
        "attention": "attention, 328",
        "norm_backward": "layer norm backward, 288",
        "chunk": "chunk of GLA, 256",
    }
    rows = _search_rows(every, bench, moe)
    source = _source(every, bench) if rows else ""
    rows += _search_rows(results, bench, spaces)
    return _section(results, bench, _table(_SEARCH_HEADS, rows), source)


_SEARCH_HEADS = (
    *("configs of", "tried", "chosen by"),
    *("slower than the best: median", "90th percentile"),
)


def _searches(results: Results, bench: str, spaces: Mapping[str, str]) -> str:
    return _section(results, bench, _table(_SEARCH_HEADS, _search_rows(results, bench, spaces)))


def _search_rows(results: Results, bench: str, spaces: Mapping[str, str]) -> list[list[str]]:
    found = results.figures(bench)
    words = {
        "random": "random subset",
        "search": "search",
        "search_neighbours": "search, two neighbouring keys measured",
        "search_sweep": "search, in a sweep; 100 for the first two keys",
    }
    return [
        [space, f"{budget}", strategy, *(f"{found[f'{name}_{part}']:.1%}" for part in parts)]
        for key, space in spaces.items()
        for budget in (32, 100)
        for known, strategy in words.items()
        for name, parts in [(f"{key}_{known}_{budget}", ("median", "p90"))]
        if f"{name}_median" in found
    ]


def start(results: Results) -> str:
    """Return many small tunings in one process."""
    lines = [
        Line(
            "startup",
            f"60 small tunings in a row, {words}",
            (f"startup_60_s_triton{state}", f"startup_60_s_safetune{state}"),
        )
        for state, words in (("", "empty caches"), ("_warm", "Triton's cache warm"))
    ]
    return _section(results, "startup", _compared(results, lines))


def libraries(results: Results) -> str:
    """Return FLA's first step."""
    lines = [
        Line(
            "unmodified",
            f"first forward and backward, {words}",
            tuple(f"unmodified_first_step_s_{tuner}_{state}" for tuner in ("triton", "safetune")),
            "{:.2f} s",
        )
        for state, words in (
            ("cold", "empty caches"),
            ("warm", "an earlier process's caches: Triton's, and safetune's choices"),
        )
    ]
    return _section(results, "unmodified", _compared(results, lines))


def libraries_stored(results: Results) -> str:
    """Return FLA's first step with stored choices, in turn."""
    names = tuple(f"unmodified_first_step_s_{tuner}_warm" for tuner in ("triton", "safetune"))
    words = "first forward and backward, an earlier process's caches"
    return _section(
        _of_h200(results),
        "unmodified_stored",
        _compared(_of_h200(results), [Line("unmodified_stored", words, names, "{:.2f} s")]),
    )


def choices(results: Results) -> str:
    """Return how good the choices are."""
    words = {
        "share_within_1pct": "choices within 1% of the best config",
        "share_within_2pct": "choices within 2% of it",
        "mean_regret": "slower than the best config, on average",
        "worst_regret": "slower than the best config, at worst",
        "most_common_share": "tunings that made the most common choice of their problem",
    }
    lines = [
        Line("choice_quality", text, (f"{name}_triton", name), "{:.1%}")
        for name, text in words.items()
    ]
    return _section(results, "choice_quality", _compared(results, lines))


def choices_h200(results: Results) -> str:
    """Return the same on an H200."""
    return choices(_of_h200(results))


def launches(results: Results) -> str:
    """Return the host time of known launches."""
    ways = ("jit", "autotune", "safetune", "run")
    lines = [
        Line(
            "launch_overhead",
            f"{count} arguments",
            tuple(f"us_{way}_{count}" for way in ways),
            "{:.1f} us",
        )
        for count in (3, 13, 24)
    ]
    heads = ("", "triton.jit", "triton.autotune", "safetune", "the launcher alone")
    return _section(results, "launch_overhead", _compared(results, lines, *heads))


def stored(results: Results) -> str:
    """Return what a stored choice costs a new process."""
    names = ("first_launch_ms_jit", "first_launch_ms_safetune")
    line = Line("store", "first launch of a fresh process, imports included", names, "{:.0f} ms")
    heads = ("", "triton.jit", "safetune, with a stored choice")
    return _section(results, "store", _compared(results, [line], *heads))


def installed(results: Results) -> str:
    """Return what `install` adds to an import."""
    names = ("import_fla_s_stock", "import_fla_s_safetune")
    line = Line("install_time", "import of every module of FLA", names, "{:.2f} s")
    heads = ("", "without", "after `safetune.install()`")
    return _section(results, "install_time", _compared(results, [line], *heads))


def _norms(results: Results, bench: str, operations: Sequence[tuple[str, str]]) -> str:
    rows = []
    found = results.figures(bench)
    for columns in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768):
        cells = []
        for norm in ("ln", "rms"):
            for operation, _ in operations:
                name = f"{{}}_D{columns}_{norm}"
                share = found.get(name.format(f"{operation}_share"))
                peer = found.get(name.format(f"{operation}_vs_best_peer"))
                if share is not None and peer is not None:
                    cells.append(f"{share:.0%}, {peer:.2f}x")
        if len(cells) == 2 * len(operations):
            rows.append([f"{columns}", *cells])
    heads = [f"{norm}, {words}" for norm in ("LayerNorm", "RMSNorm") for _, words in operations]
    return _table(["columns", *heads], rows)


def norms(results: Results) -> str:
    """Return the norms' device time."""
    operations = (("forward", "forward"), ("backward", "backward"))
    return _section(results, "norms", _norms(results, "norms", operations))


def residual(results: Results) -> str:
    """Return the norms' device time with a residual."""
    operations = (("prenorm", "forward"), ("dresidual", "backward"))
    return _section(results, "norms_residual", _norms(results, "norms_residual", operations))


def host(results: Results) -> str:
    """Return the norms' host time."""
    systems = ("torch", "fla", "ours")
    lines = [
        Line(
            "norms_host",
            f"{words}, {op}",
            tuple(f"host_us_{op}_{system}_{norm}" for system in systems),
            "{:.0f} us",
        )
        for norm, words in (("ln", "LayerNorm"), ("rms", "RMSNorm"))
        for op in ("forward", "backward")
    ]
    heads = ("", "torch.nn", "FLA", "safetune.kernels")
    return _section(results, "norms_host", _compared(results, lines, *heads))


def small(results: Results) -> str:
    """Return norms of few rows, against torch.compile's max-autotune."""
    found = results.figures("norms_small")
    shapes = ("1x4096", "8x4096", "64x4096", "450x256")
    rows = [
        [f"{norm}, {shape}", f"{found[forward]:.2f}", f"{found[backward]:.2f}"]
        for short, norm in (("ln", "LayerNorm"), ("rms", "RMSNorm"))
        for shape in shapes
        if (forward := f"forward_vs_max_autotune_{shape}_{short}") in found
        if (backward := f"backward_vs_max_autotune_{shape}_{short}") in found
    ]
    return _section(results, "norms_small", _table(("", "forward", "backward"), rows))


def soak(results: Results) -> str:
    """Return what 300 tunings with faulty configs leave behind."""
    words = {
        "tunings": "tunings in one process",
        "faulty_configs": "faulty configs among theirs",
        "wrong_answers": "wrong answers",
        "unexpected_verdicts": "verdicts other than planted",
        "leaked_processes": "processes left",
        "more_descriptors": "more open files",
        "more_resident_mib": "more memory of the process, MiB",
        "more_device_mib": "more memory on the device, MiB",
    }
    return _counts(results, "soak", words)


def judge_in_the_wild(results: Results) -> str:
    """Return what the judge says of libraries' kernels."""
    words = {
        "wild_kernels": "kernels of FLA and Liger",
        "wild_tunings": "tunings",
        "wild_configs": "configs",
        "wild_rejected_configs": "configs with another result than the others",
        "wild_disputed_choices": "disputed choices",
    }
    return _counts(results, "judge_in_the_wild", words)


def proofs(results: Results) -> str:
    """Return what libraries' own tests say under safetune, and the time of their first step."""
    found = results.figures("proofs") | results.figures("proof_steps")
    rows = []
    for proof in proof_list.PROOFS:
        passed = [found.get(f"passed {proof.name}, {way}") for way in ("stock", "run", "shim")]
        steps = [found.get(f"first_step_s {proof.name}, run {s}") for s in ("cold", "stored")]
        if passed[1] is not None:
            of = found[f"tests {proof.name}, run"]
            cells = ["" if count is None else f"{count:g} of {of:g}" for count in passed]
            times = ["" if step is None else f"{step:.1f} s" for step in steps]
            rows.append([proof.name, *cells, *times])
    heads = ("tests that pass", "triton.autotune", "`safetune run`", "the shim")
    heads += ("first step, empty caches", "stored choices")
    timed = [_source(results, "proof_steps")] if results.load("proof_steps") else []
    return _section(results, "proofs", _table(heads, rows), *timed)


def dependency(results: Results) -> str:
    """Return what safetune costs as a dependency; it is measured without a GPU."""
    here = Results("interpreter", results.folder.parent)
    found, rows = here.figures("dependency"), []
    if found:
        others = found["megabytes"] - found["megabytes_safetune"]
        rows = [
            ["safetune, unpacked", f"{found['megabytes_safetune']:.1f} MB"],
            [f"the {found['packages']:.0f} packages that it needs", f"{others:.1f} MB"],
            ["`import safetune`", f"{found['import_ms']:.0f} ms"],
            ["the first kernel that is decorated", f"{found['decorate_ms']:.0f} ms"],
        ]
    return _section(here, "dependency", _table(("besides torch and Triton", ""), rows))


def licences(results: Results) -> str:
    """Return the licences of what is installed with safetune."""
    here = Results("interpreter", results.folder.parent)
    by_licence: dict[str, list[str]] = {}
    for row in here.load("dependency").get("rows", []):
        if row["what"] == "package":
            by_licence.setdefault(row["licence"], []).append(row["name"])
    rows = [[licence, ", ".join(sorted(names))] for licence, names in sorted(by_licence.items())]
    return _section(here, "dependency", _table(("licence", "packages"), rows))


def missed(results: Results) -> str:
    """Return the bars that these results miss, or have no figure for; a word where none is."""
    known = bars.load()
    other = bars.report(known, _of_h200(results).folder)
    rows = [
        [
            line["benchmark"],
            line["figure"],
            line["value"] or "not measured",
            line["bar"],
            h200["value"],
        ]
        for line, h200 in zip(bars.report(known, results.folder), other, strict=True)
        if line["verdict"] in ("missed", "absent")
    ]
    return _table(("benchmark", "figure", "value", "bar", "on an H200"), rows) or "None."


def _counts(results: Results, bench: str, words: Mapping[str, str]) -> str:
    found = results.figures(bench)
    rows = [[text, f"{found[name]:g}"] for name, text in words.items() if name in found]
    return _section(results, bench, _table(("", ""), rows))


def picture(name: str, caption: str) -> Callable[[Results], str]:
    """Return a writer of a figure in both variants; nothing where it is not drawn."""

    def write(results: Results) -> str:
        if not figures.path(name, "light").exists():
            return ""
        dark = f'media="(prefers-color-scheme: dark)" srcset="figures/{name}-dark.svg"'
        return (
            f"<picture><source {dark}>"
            f'<img src="figures/{name}.svg" alt="{caption}" width="800"></picture>'
        )

    return write


BLOCKS: dict[str, Callable[[Results], str]] = {
    function.__name__: function
    for function in (
        *(
            headlines,
            more,
            matmul,
            *(first_tunings, first_tunings_newest, first_tunings_h200),
            arguments,
            sweep,
            *(searches, sweep_searches, other_searches, fused_moe),
            start,
            *(libraries, libraries_stored),
            *(choices, choices_h200),
            proofs,
        ),
        *(dependency, licences, missed),
        *(launches, stored, installed, norms, residual, small, host, soak, judge_in_the_wild),
    )
}
BLOCKS |= {f"picture_{name}": picture(name, drawn.caption) for name, drawn in figures.DRAWN.items()}


def written(page: Path, results: Results) -> str:
    """Return a page's text with its tables as the results have them."""
    docs = os.path.relpath(recording.ROOT / "docs", page.parent)

    def block(match: re.Match[str]) -> str:
        made = BLOCKS[match[2]](results).replace('"figures/', f'"{docs}/figures/'.replace("./", ""))
        return f"{match[1]}{made}\n{match[4]}" if made else f"{match[1]}{match[4]}"

    return _PLACE.sub(block, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page, Results()), encoding="utf-8")
        print(page)
