"""docs/RESULTS.md and its plots, from the files of the experiments. The text between the tables is written by hand,
here; every number in a table comes from a file."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tools.experiments.rates import MODELS, SLO_OVER_BASE, Cell, Model, PublishedRates

_PUBLISHED_NAMES = {"TeDiServe": ("paper", "tedi"), "Llumnix": ("llumnix",), "INFaaS": ("infaas",)}

_HEAD = """# Results

Made by `python -m tools.experiments rates`; the rows are in [results/](results/). How they are simulated, and what that
is worth: [simulator.md](simulator.md). The command runs what is missing and writes this page anew; what it lacks was
not run yet. Rows are of the policies as they were when they were run: remove the file after a policy has changed. With
one seed, differences of a few points are within chance.
"""

_RATES = """
## GSM8K, {name}, over the rate of arrivals

16 H100, one instance each; {requests} requests; SLO {slo_s:g} s; prompts and answers of 5-shot GSM8K that run to the
end of their 256 tokens; forecasts blurred to the published error (19 %). On top of the published latency profile a pass
takes {extra_pass_ms:g} ms and each step in it {extra_step_ms:g} ms, so that a request alone takes the published
{base_s:g} s, and on LLaDA INFaaS keeps up with about the rate that it did. Accuracy is what the published accuracy at
fixed thresholds lets expect.
{note}
"""


def results_text(cells: Sequence[Cell], published: PublishedRates) -> str:
    """The whole document."""
    parts = [_HEAD]
    for model in MODELS.values():
        ours = [cell for cell in cells if cell.model == model.name]
        if ours:
            parts.append(_rates_section(model, ours, published if model is MODELS["llada"] else None))
    return "".join(parts)


def _rates_section(model: Model, cells: Sequence[Cell], published: PublishedRates | None) -> str:
    head = _RATES.format(
        name=model.name,
        requests=cells[0].requests,
        slo_s=SLO_OVER_BASE * model.base_s,
        extra_pass_ms=model.extra_pass_ms,
        extra_step_ms=model.extra_step_ms,
        base_s=model.base_s,
        note=model.note,
    )
    columns = [
        "system",
        "requests/s a GPU",
        "seeds",
        "in time",
        "published",
        "accuracy",
        "published",
        "mean s",
        "threshold",
    ]
    lines = [_line(columns), "|" + "---|" * len(columns)]
    lines += [_line(_row(group, published)) for group in _groups(cells)]
    plot = f"\n\n![attainment over the rate](results/{plot_name(model)})\n"
    return head.rstrip() + "\n\n" + "\n".join(lines) + plot


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that differ in nothing but the seed."""
    found: dict[tuple[float, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda c: (c.rate, c.system, c.seed)):
        found.setdefault((cell.rate, cell.system), []).append(cell)
    return list(found.values())


def _row(group: Sequence[Cell], published: PublishedRates | None) -> list[str]:
    cell = group[0]
    theirs = None
    for row in published.rows if published else ():
        if row.rate == cell.rate and cell.system in _PUBLISHED_NAMES[row.system]:
            theirs = row
    return [
        cell.system,
        f"{cell.rate:g}",
        str(len(group)),
        _percent(c.attainment for c in group),
        f"{100 * theirs.attainment:.1f}%" if theirs else "",
        _percent(c.accuracy for c in group),
        f"{100 * theirs.accuracy:.1f}%" if theirs else "",
        _mean((c.latency_mean_s for c in group), "{:.2f}"),
        _mean((c.threshold_mean for c in group), "{:.3f}"),
    ]


def _percent(values: Iterable[float | None]) -> str:
    """Mean, and the standard deviation over seeds where there are several."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return ""
    return f"{fmean(known):.1f}%" + (f" ± {stdev(known):.1f}" if len(known) > 1 else "")


def _mean(values: Iterable[float | None], shape: str) -> str:
    known = [value for value in values if value is not None]
    return shape.format(fmean(known)) if known else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plot_name(model: Model) -> str:
    return f"gsm8k-rates-{model.name.lower()}.svg"


def draw(model: Model, cells: Sequence[Cell], published: PublishedRates | None, path: Path) -> None:
    """Attainment over the rate: ours as lines, the published ones dashed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "tediserve"  # the same rows, the same bytes
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    colours: dict[str, Any] = {}
    for system in dict.fromkeys(cell.system for cell in sorted(cells, key=lambda c: c.system)):
        points = [
            (group[0].rate, 100 * fmean(c.attainment or 0.0 for c in group))
            for group in _groups([cell for cell in cells if cell.system == system])
        ]
        (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=system)
        colours[system] = line.get_color()
    for name, ours in _PUBLISHED_NAMES.items() if published else ():
        rows = sorted((row.rate, 100 * row.attainment) for row in published.rows if row.system == name)  # type: ignore[union-attr]
        axes.plot(*zip(*rows, strict=True), "--", linewidth=1, color=colours.get(ours[0]), label=f"{name}, published")
    axes.set(xlabel="requests/s a GPU", ylabel="in time, %", title=f"GSM8K, {model.name}, 16 H100", ylim=(0, 103))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
