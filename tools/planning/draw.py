"""A followed curve as a picture and as a table."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from services.reconfigurator.report import in_words
from tools.planning.follow import Window, changes, reversals

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")


def draw(windows: Sequence[Window], path: Path) -> None:
    """Request rate, devices by TP degree, mean threshold and latency over the hours."""
    hours = [window.at_s / 3600 for window in windows]
    plt.rcParams["svg.hashsalt"] = "planning"  # the same data gives the same file
    figure, (above, middle, below) = plt.subplots(3, 1, figsize=(9, 7.5), sharex=True, layout="constrained")
    above.plot(hours, [window.rate_per_s for window in windows], color="black", linewidth=1)
    above.set_ylabel("requests / s")
    above.set_ylim(bottom=0)
    _draw_layouts(middle, hours, windows)
    _draw_figures(below, hours, windows)
    below.set_xlabel("hours")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw_layouts(axes: Axes, hours: list[float], windows: Sequence[Window]) -> None:
    degrees = sorted({degree for window in windows for degree in window.layout})
    devices = [[degree * window.layout.get(degree, 0) for window in windows] for degree in degrees]
    labels = [f"TP-{degree}" for degree in degrees]
    axes.stackplot(hours, devices, labels=labels, colors=_COLOURS, step="post")
    axes.set_ylabel("devices")
    axes.legend(loc="upper left", ncols=len(degrees))


def _draw_figures(axes: Axes, hours: list[float], windows: Sequence[Window]) -> None:
    nothing = float("nan")
    thresholds = [w.figures.mean_threshold if w.figures else nothing for w in windows]
    latencies = [w.figures.mean_latency_s if w.figures else nothing for w in windows]
    axes.plot(hours, thresholds, color=_COLOURS[0])
    axes.set_ylabel("mean threshold", color=_COLOURS[0])
    axes.set_ylim(0, 1)
    right = axes.twinx()
    right.plot(hours, latencies, color=_COLOURS[1])
    right.set_ylabel("mean latency, s", color=_COLOURS[1])
    right.set_ylim(bottom=0)


def table(windows: Sequence[Window]) -> str:
    """The first layout and each change, in Markdown, and how often it went back and forth."""
    lines = ["| hour | requests/s | layout from then on | why | threshold | latency s |", "|---|---|---|---|---|---|"]
    for window in [windows[0], *changes(windows)]:
        figures = window.figures
        reached = f"{figures.mean_threshold:.3f} | {figures.mean_latency_s:.2f}" if figures else "- | -"
        lines.append(
            f"| {window.at_s / 3600:.1f} | {window.rate_per_s:.2f} | {in_words(window.layout)} |"
            f" {window.verdict.reason} | {reached} |"
        )
    summary = f"{len(windows)} plans, {len(changes(windows))} changes, {reversals(windows)} reversals within an hour."
    return "\n".join([*lines, "", summary])
