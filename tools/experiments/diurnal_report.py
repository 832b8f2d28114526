"""The sections of RESULTS.md on the two-hour trace, and their plots. Every number in a table comes from a file."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from services.reconfigurator.plan import Layout
from tools.experiments import goals
from tools.experiments.diurnal import (
    DEVICES,
    EXTRA_STEP_MS,
    LAUNCH_S,
    LOW_MINUTES,
    NODES,
    SLO_S,
    TP_EFFECT,
    VARIANTS,
    Period,
    Published,
    Run,
    read_published,
    read_runs,
)
from tools.experiments.diurnal_layouts import Window, read_windows

RUNS, LAYOUTS = "diurnal.json", "layouts.json"
_RUNS_PLOT, _LAYOUTS_PLOT = "diurnal.svg", "layouts.svg"
_PUBLISHED_NAMES = {
    "tedi+layouts": "TeDiServe",
    "paper+layouts": "TeDiServe",
    "infaas-drop": "INFaaS",
    "llumnix-drop": "Llumnix",
}
_DEGREES = (1, 2, 4)
_GPUS = 16  # of the layouts over peak rates

_TRACE = """
## Two hours with the load of a day

The published arrivals of each minute, SLO {slo_s:g} s. The paper had 16 GPUs; here are {gpus}, with as much less of the
arrivals. `+layouts`: the layout begins as {gpus} instances at TP-1 and follows the load, by the live workload-monitor,
planner and reconfigurator; a launch takes {launch_s:g} s (the published change of eight launches took 2.5 to 3
minutes). The others stay at TP-1. `-drop`: who waits past the deadline is dropped, as in the published baselines. Low
load is minutes 0 to {low}, high load the rest. Latency is the mean of those that finished.

What the published run leaves unknown, and what stands for it here: the lengths of its requests (made up, with the means
published for ShareGPT: 161 tokens of prompt, 338 of output), its judge's scores (here: the accuracy that GSM8K has at
the same thresholds), and its latencies. Its GH200 curves with CUDA graphs are not published, so the H100 curve of TP-1
counts, with {extra:g} ms more for each step in a pass, on which INFaaS keeps up to 15 requests/s on 16 GPUs, as it
did; and at TP-2 and TP-4 the {effect} of that which the authors measured of a request alone, with CUDA graphs and a
cache. By the H100 curves, which are of before, a cache step of a few requests takes as long at TP-4 as at TP-1 (12.6
and 12.1 ms): by these the planner leaves all at TP-1.
"""

_AGAINST = """
What `{ours}` gains over the baselines, in minutes 0 to {minutes}:

"""

_WHY = """
What explains differences:

- **The load rises sixfold in five minutes** (45 to 50), on a layout made for little. The plan comes with the next
  period, and one launch is under way at a time, so the way back to TP-1 takes minutes. `tedi` beside `tedi+layouts`
  shows what that costs, and what low load gains from higher degrees.
- **Latency over `infaas` and `llumnix`, without `-drop`**, is larger than published because nobody leaves their queues;
  `-drop` is what the authors ran.
- **Accuracy**: low thresholds cost more on GSM8K than the published judge's scores say of chats (-0.09 of 10). By the
  same figures 0.8 is a little more accurate than 0.9, so `proteus` begins there, and has less to do.
"""

_PEAKS = """
## Layouts over peak rates

The same two hours, scaled to other peaks, on 16 GPUs; planner only, as in figure 12 of the paper: at the end of each
five minutes the live planner is asked, and its layout taken where the reconfigurator would take it. Costs are those of
the section above. Shares of the GPUs in instances of each TP degree, mean over the 24 windows.

"""


def section(results: Path) -> str:
    """Of the rows that there are in this folder; "" for none. Raises ConfigError."""
    runs, windows = read_runs(results / RUNS), read_windows(results / LAYOUTS)
    parts = []
    if runs:
        parts.append(_trace_section(runs, read_published()))
    if windows:
        parts.append(_peaks_section(windows, read_published()))
    return "".join(parts)


def draw(results: Path) -> None:
    """The plots of what there is. Raises ConfigError."""
    if runs := read_runs(results / RUNS):
        draw_runs(_longest(runs), read_published(), results / _RUNS_PLOT)
    if windows := read_windows(results / LAYOUTS):
        draw_layouts(windows, read_published(), results / _LAYOUTS_PLOT)


# --- the trace ----------------------------------------------------------------------------------------------------


def _longest(runs: Sequence[Run]) -> list[Run]:
    """Of each variant the run of most minutes, the lowest seed."""
    found: dict[str, Run] = {}
    for run in sorted(runs, key=lambda r: (-r.minutes, r.seed)):
        found.setdefault(run.variant, run)
    return [found[variant.name] for variant in VARIANTS if variant.name in found]


def _trace_section(runs: Sequence[Run], published: Published) -> str:
    head = _TRACE.format(
        slo_s=SLO_S,
        low=LOW_MINUTES,
        extra=EXTRA_STEP_MS,
        gpus=NODES * DEVICES,
        launch_s=LAUNCH_S,
        effect=" and ".join(f"{share:.2f}" for _, share in TP_EFFECT),
    )
    columns = ["system", "minutes", "seed", "in time", "published", "low load", "published", "high load", "published"]
    columns += ["mean s, low", "high", "threshold, low", "high", "accuracy", "layouts"]
    lines = [_line(columns), "|" + "---|" * len(columns)]
    lines += [_line(_row(run, published)) for run in runs]
    parts = [head, "\n", "\n".join(lines), "\n"]
    longest = {run.variant: run for run in _longest(runs)}
    for ours in ("tedi+layouts", "paper+layouts", "tedi"):
        if ours in longest and (rows := _gains(longest[ours], runs, published)):
            parts += [_AGAINST.format(ours=ours, minutes=longest[ours].minutes), *rows]
            if told := goals.lines(_findings(longest[ours], longest, published)):
                parts += ["\n", told]
    parts += [_WHY, f"\n![the two hours](results/{_RUNS_PLOT})\n"]
    return "".join(parts)


def _row(run: Run, published: Published) -> list[str]:
    name = _PUBLISHED_NAMES.get(run.variant)
    spans = {"all": (0, run.minutes), "low": (0, min(LOW_MINUTES, run.minutes)), "high": (LOW_MINUTES, run.minutes)}
    cells = [run.variant, str(run.minutes), str(run.seed)]
    for period, (first, last) in spans.items():
        ours = run.periods.get(period)
        cells.append(_percent(ours.attainment) if ours else "")
        cells.append(_percent(published.attainment(name, first, last)) if name and last > first else "")
    low, high = run.periods.get("low"), run.periods.get("high")
    cells += [_number(one.latency_mean_s, 2) if one else "" for one in (low, high)]
    cells += [_number(one.threshold_mean, 3) if one else "" for one in (low, high)]
    changes = len({decision.at for decision in run.decisions if decision.reason in _CHANGES})
    return [*cells, _percent(run.periods["all"].accuracy), str(changes) if run.changes else ""]


_CHANGES = ("nothing_runs", "today_infeasible", "threshold_gain", "latency_gain", "idle_devices")
_BASELINES = ("infaas-drop", "llumnix-drop", "infaas", "llumnix", "proteus")
_PAPER_SAYS = {  # attainment in points, latency in percent; of all, low, high
    "infaas": ("+21.1", "-34.7 %", "-16.6 %", "-32.2 %"),
    "llumnix": ("+30.2", "-46.0 %", "-30.0 %", "-44.0 %"),
}


def _gains(ours: Run, runs: Sequence[Run], published: Published) -> list[str]:
    columns = ["over", "points in time", "published, these minutes", "the paper, all", "latency", "the paper, all"]
    columns += ["latency, low load", "the paper", "latency, high load", "the paper"]
    lines = [_line(columns), "|" + "---|" * len(columns)]
    beside = [r for r in runs if (r.minutes, r.seed) == (ours.minutes, ours.seed) and r.variant in _BASELINES]
    for run in beside:
        name = _PUBLISHED_NAMES.get(run.variant)
        says = _PAPER_SAYS.get(run.variant.removesuffix("-drop"), ("", "", "", ""))
        theirs = ""
        if name:
            gained = published.attainment("TeDiServe", 0, ours.minutes) - published.attainment(name, 0, ours.minutes)
            theirs = f"{100 * gained:+.1f}"
        points = 100 * (ours.periods["all"].attainment - run.periods["all"].attainment)
        cells = [run.variant, f"{points:+.1f}", theirs, says[0]]
        for period, said in zip(("all", "low", "high"), says[1:], strict=True):
            cells += [_shorter(ours.periods.get(period), run.periods.get(period)), said]
        lines.append(_line(cells))
    return ["\n".join(lines), "\n"] if beside else []


def _findings(ours: Run, runs: dict[str, Run], published: Published) -> Iterator[goals.Finding]:
    """Of a system whose layout follows, over the published baselines: as much in time, as short latencies."""
    if not ours.changes:
        return
    for base, (_, *percents) in _PAPER_SAYS.items():
        run = runs.get(f"{base}-drop")
        if run is None or run.minutes != ours.minutes:
            continue
        theirs = _PUBLISHED_NAMES[run.variant]
        gained = 100 * (ours.periods["all"].attainment - run.periods["all"].attainment)
        claimed = 100 * (
            published.attainment("TeDiServe", 0, ours.minutes) - published.attainment(theirs, 0, ours.minutes)
        )
        goal = f"over `{run.variant}` {claimed:+.1f} points in time, as published of these minutes"
        yield goals.Finding(goal, f"{gained:+.1f}", gained >= claimed - goals.SIZE_POINTS)
        for period, percent in zip(("all", "low", "high"), percents, strict=True):
            change = _change(ours.periods.get(period), run.periods.get(period))
            if change is not None:
                claim = float(percent.removesuffix(" %"))
                load = "any load" if period == "all" else f"{period} load"
                goal = f"over `{run.variant}` {percent} of mean latency ({load}), as published of all 120 minutes"
                yield goals.Finding(goal, f"{change:+.1f} %", change <= claim + goals.SIZE_POINTS)


def _shorter(ours: Period | None, theirs: Period | None) -> str:
    change = _change(ours, theirs)
    return "" if change is None else f"{change:+.1f} %"


def _change(ours: Period | None, theirs: Period | None) -> float | None:
    """Of mean latency, in percent."""
    if ours is None or theirs is None or ours.latency_mean_s is None or not theirs.latency_mean_s:
        return None
    return 100 * (ours.latency_mean_s / theirs.latency_mean_s - 1)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


# --- the peaks ----------------------------------------------------------------------------------------------------


def _peaks_section(windows: Sequence[Window], published: Published) -> str:
    columns = ["peak, requests/s", *(f"TP-{degree}" for degree in _DEGREES), *(f"published TP-{d}" for d in _DEGREES)]
    lines = [_line([*columns, "changes", "published"]), "|" + "---|" * (len(columns) + 2)]
    for peak, theirs in published.peaks.items():
        if ours := [window.layout for window in windows if window.peak_rps == peak]:
            shares = [f"{_mean_share(layouts, degree):.0%}" for layouts in (ours, theirs) for degree in _DEGREES]
            lines.append(_line([str(peak), *shares, str(_num_changes(ours)), str(_num_changes(theirs))]))
    told = goals.lines(_peak_findings(windows, published))
    return _PEAKS + "\n".join(lines) + f"\n\n{told}\n![layouts over peak rates](results/{_LAYOUTS_PLOT})\n"


def _peak_findings(windows: Sequence[Window], published: Published) -> Iterator[goals.Finding]:
    ours = {
        peak: [window.layout for window in windows if window.peak_rps == peak]
        for peak in published.peaks
        if any(window.peak_rps == peak for window in windows)
    }
    low = {peak: _mean_share(layouts, 1) for peak, layouts in ours.items()}
    told = ", ".join(f"{share:.0%}" for share in low.values())
    grows = all(share <= higher + 1e-9 for share, higher in pairwise(low.values())) and len(set(low.values())) > 1
    yield goals.Finding("the higher the peak, the more GPUs at TP-1", told, grows or len(low) == 1)
    moved = [peak for peak, layouts in ours.items() if len({tuple(one.items()) for one in layouts}) > 1]
    theirs = [peak for peak in ours if len({tuple(one.items()) for one in published.peaks[peak][1:]}) > 1]
    goal = f"layouts follow the rate where the published ones do (peaks of {', '.join(map(str, theirs)) or 'none'})"
    yield goals.Finding(goal, f"peaks of {', '.join(map(str, moved)) or 'none'}", set(theirs) <= set(moved))


def _mean_share(layouts: Sequence[Layout], degree: int) -> float:
    return sum(degree * layout.get(degree, 0) for layout in layouts) / (_GPUS * len(layouts))


def _num_changes(layouts: Sequence[Layout]) -> int:
    """It begins as 16 at TP-1."""
    return sum(before != after for before, after in zip([{1: _GPUS}, *layouts], layouts, strict=False))


# --- plots --------------------------------------------------------------------------------------------------------


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "tediserve"  # the same rows, the same bytes
    from matplotlib import pyplot

    return pyplot


def draw_runs(runs: Sequence[Run], published: Published, path: Path) -> None:
    """Arrivals, attainment, thresholds, and the layout that follows."""
    pyplot = _pyplot()
    figure, (load, met, threshold, layout) = pyplot.subplots(
        4, 1, figsize=(9, 10), sharex=True, layout="constrained", height_ratios=(1, 2, 1.2, 1.2)
    )
    load.step(range(len(published.arrivals_rps)), published.arrivals_rps, where="post", color="black", linewidth=1)
    load.set(ylabel="requests/s")
    colours = {}
    for run in (
        r for r in runs if r.variant in ("tedi+layouts", "tedi", "paper+layouts", "infaas-drop", "llumnix-drop")
    ):
        at = [published.bin_minutes * (number + 0.5) for number in range(len(run.bins))]
        (line,) = met.plot(at, [100 * one.attainment for one in run.bins], label=run.variant, linewidth=1.4)
        colours[run.variant] = line.get_color()
        threshold.plot(at, [one.threshold_mean for one in run.bins], label=run.variant, color=line.get_color())
    for variant, name in _PUBLISHED_NAMES.items():
        if variant != "paper+layouts":
            percents = published.attainment_percent[name]
            at = [published.bin_minutes * (number + 0.5) for number in range(len(percents))]
            met.plot(at, percents, ":", color=colours.get(variant), label=f"{name}, published", linewidth=1)
    at = [published.bin_minutes * (number + 0.5) for number in range(len(published.threshold_mean))]
    threshold.plot(at, published.threshold_mean, ":", color="black", label="TeDiServe, published", linewidth=1)
    met.set(ylabel="in time, %", ylim=(0, 103))
    threshold.set(ylabel="mean threshold")
    _draw_layout(layout, runs, published)
    layout.set(xlabel="minutes", ylabel="GPUs in TP-2 and TP-4", xlim=(0, 120), ylim=(0, _GPUS + 0.5))
    for axes in (met, threshold, layout):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_layout(axes: Any, runs: Sequence[Run], published: Published) -> None:
    def gpus(layout: Layout) -> int:
        return sum(degree * count for degree, count in layout.items() if degree > 1)

    for run in runs:
        if run.changes:
            at = [change.at / 60 for change in run.changes]
            axes.step([*at, run.minutes], [*(gpus(c.layout) for c in run.changes), gpus(run.changes[-1].layout)],
                      where="post", label=run.variant, linewidth=1.2)  # fmt: skip
    minutes, layouts = zip(*published.layouts, strict=True)
    axes.step(minutes, [gpus(layout) for layout in layouts], ":", where="post", color="black", label="published")


def draw_layouts(windows: Sequence[Window], published: Published, path: Path) -> None:
    """GPUs by TP degree over time: ours above, the published below; a column for each peak."""
    pyplot = _pyplot()
    peaks = [peak for peak in published.peaks if any(window.peak_rps == peak for window in windows)]
    figure, rows = pyplot.subplots(
        2, len(peaks), figsize=(3 * len(peaks), 5), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for column, peak in enumerate(peaks):
        ours = [window.layout for window in windows if window.peak_rps == peak]
        for axes, layouts, whose in (
            (rows[0][column], ours, "ours"),
            (rows[1][column], published.peaks[peak], "published"),
        ):
            at = [published.window_minutes * number for number in range(len(layouts))]
            stacked = [[degree * layout.get(degree, 0) for layout in layouts] for degree in _DEGREES]
            axes.stackplot(at, *stacked, labels=[f"TP-{degree}" for degree in _DEGREES], step="post")
            axes.set_title(f"{whose}, peak {peak}/s", fontsize=9)
    rows[0][0].legend(fontsize=7, loc="lower left")
    for axes in rows[1]:
        axes.set_xlabel("minutes")
    for row in rows:
        row[0].set_ylabel("GPUs")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
