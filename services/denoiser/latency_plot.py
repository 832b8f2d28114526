"""`plot`: draws `latency.json`: what was measured, what was fitted to it, and how far the two are apart."""

from pathlib import Path
from typing import Any

from services.costs import DegreeProfile, PassKind, StepKind, read_latency_file, step_load
from services.denoiser.latency_fit import relative_error
from services.profile import load_profile
from services.settings import ConfigError

_KINDS: tuple[tuple[PassKind, str, str], ...] = (
    ("recompute", "o", "tab:blue"),
    ("cache", "s", "tab:orange"),
    ("mixed", "^", "tab:green"),
)
_CURVE_POINTS = 100


def plot_latency(folder: str | Path, out: str | Path | None = None) -> Path:
    """Writes an image of the profile's `latency.json` and returns its path. Raises ConfigError.

    `out` says by its ending what kind of image; `docs/latency-<profile>.svg` by default.
    """
    profile = load_profile(folder)
    path = Path(out or Path("docs") / f"latency-{Path(profile.folder).resolve().name}.svg")
    file = read_latency_file(profile.latency_file)
    degrees = [degree for degree in file.degrees if degree.passes]
    if not degrees:
        raise ConfigError(f"{profile.latency_file} holds no measured passes to draw")
    pyplot = _pyplot()
    with pyplot.rc_context({"svg.hashsalt": "latency"}):  # the same file for the same data
        figure, axes = pyplot.subplots(
            len(degrees), 2, figsize=(11, 4.2 * len(degrees)), squeeze=False, layout="constrained"
        )
        figure.suptitle(f"{profile.model} on {file.hardware}")
        for degree, (times, errors) in zip(degrees, axes, strict=True):
            _draw_times(times, degree, profile.decoding.block_size)
            _draw_errors(errors, degree)
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(figure, path)
        pyplot.close(figure)
    return path


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('plots need matplotlib: pip install "tediserve[dev]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except ValueError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _draw_times(axes: Any, degree: DegreeProfile, block_size: int) -> None:
    axes.set_title(f"TP {degree.tp_degree}: median and quartiles, and the fit")
    axes.set_ylabel("milliseconds")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    _rows_axis(axes)
    for kind, marker, colour in _KINDS:
        ours = [measured for measured in degree.passes if measured.load.kind == kind]
        if not ours:
            continue
        tokens, ms = [measured.load.tokens for measured in ours], [measured.ms for measured in ours]
        bars = [
            [measured.ms - measured.low_ms for measured in ours],
            [measured.high_ms - measured.ms for measured in ours],
        ]
        axes.errorbar(tokens, ms, bars, fmt="none", ecolor=colour, alpha=0.5)
        points = axes.scatter(tokens, ms, marker=marker, s=18, c=colour, label=kind)
        points.set_gid(f"measured-{degree.tp_degree}-{kind}")
    _draw_fit(axes, degree, "recompute", block_size, "tab:blue")
    _draw_fit(axes, degree, "cache", block_size, "tab:orange")
    axes.legend()


def _rows_axis(axes: Any) -> None:
    axes.set_xlabel("rows in the pass")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def _draw_fit(axes: Any, degree: DegreeProfile, kind: StepKind, block_size: int, colour: str) -> None:
    """One request's recompute step over more and more rows, or cache steps of more and more requests."""
    ours = [measured.load for measured in degree.passes if measured.load.kind == kind]
    if not ours:
        return
    first = min(load.tokens for load in ours)
    last = max(load.tokens for load in ours if kind == "cache" or load.recompute_steps == 1)
    tokens = [first * (last / first) ** (i / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)]
    if kind == "recompute":
        label = "fit: one request"
        loads = [step_load(kind, count, count) for count in tokens]
    else:
        canvas = sorted(load.pairs / load.tokens for load in ours)[len(ours) // 2]
        label = f"fit: requests of {block_size} rows in {canvas:.0f}"
        loads = [step_load(kind, block_size, canvas, count / block_size) for count in tokens]
    axes.plot(tokens, [degree.cost.ms(load) for load in loads], color=colour, linewidth=1, label=label)


def _draw_errors(axes: Any, degree: DegreeProfile) -> None:
    axes.set_title("error of the fit (median and 95th percentile, unseen)")
    axes.set_ylabel("fitted over measured, %")
    _rows_axis(axes)
    axes.axhline(0.0, color="grey", linewidth=0.8)
    axes.margins(y=0.2)
    said = {error.kind: f" ({error.unseen_median:.1%}, {error.unseen_p95:.1%})" for error in degree.errors}
    for kind, marker, colour in _KINDS:
        ours = [measured for measured in degree.passes if measured.load.kind == kind]
        if ours:
            tokens = [measured.load.tokens for measured in ours]
            errors = [100 * relative_error(degree.cost, measured) for measured in ours]
            axes.scatter(tokens, errors, marker=marker, s=18, c=colour, label=kind + said.get(kind, ""))
    axes.legend()
