"""docs/RESULTS.md and its plots, from the files of the experiments. The text between the tables is written by hand,
here and in plan.py; every number in a table comes from a file."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec

from services.settings import ConfigError
from tools.experiments import diurnal_report, goals
from tools.experiments.cells import Cell, path_of, read_cells
from tools.experiments.compare import Paired, paired, points, verdict
from tools.experiments.goals import SIZE_POINTS
from tools.experiments.plan import EXPERIMENTS, Experiment
from tools.experiments.published import Figure, Figures, read_figures
from tools.experiments.setups import SETUPS, VARIANTS
from tools.experiments.validate import Validation, table

_HEAD = """# Results

The paper's experiments, simulated, beside what its authors published. Made by `python -m tools.experiments all`, which
can be interrupted and runs anew what is of other code than today's. Rows are in [results/](results/), a file for each
experiment; `report` instead of `all` makes this page of them. [simulator.md](simulator.md) says how it simulates, and
what that is worth. Every verdict on this page is computed from the rows.

**What counts.** Steps were measured for GSM8K on LLaDA (counted and published by the authors, every request to the end
of its 256 tokens) and for the built-in tasks (recorded by us, in two ways: every request runs its 256 tokens, so that
all systems do the same work; and requests end at EOS). MMLU-Pro, MBPP and Dream have steps that are **made up**: they
show how systems behave, and count for nothing.

**What was fitted.** Published latency profiles know nothing of what a step took beside the model. On H100 two numbers
stand for that, the same for all systems and known to all policies: 5.4 ms a pass and 2.4 ms a step in it. They are
fitted to two published figures of GSM8K on LLaDA: a request alone takes 1.9 s, and INFaaS keeps up with about the rate
it did.

**How to read it.** `tedi` are the policies that this repository serves with, `paper` the paper's rules of threshold
control on the same scheduler, without our openings of blocks and quality floors. *In time* is the share of all requests
that met their SLO, *accuracy* that of the finished (on GSM8K what the published accuracy at fixed thresholds lets
expect), *right in time* the share of all that were both. ± is the standard deviation over seeds. Published figures of
TeDiServe stand beside both `tedi` and `paper`. C is what instances end at threshold 0.9 while more comes than they can
do.
"""


def write(docs: Path) -> None:
    """RESULTS.md and its plots. Raises ConfigError where there is nothing to report."""
    results = docs / "results"
    found = {experiment.name: read_cells(path_of(results, experiment.name)) for experiment in EXPERIMENTS}
    two_hours = diurnal_report.section(results)
    if not any(found.values()) and not two_hours:
        raise ConfigError(f"{results} holds no rows yet: `python -m tools.experiments all` makes them")
    validation = results / "validation.json"
    text = results_text(found, read_figures(), read_validation(validation) if validation.exists() else None)
    (docs / "RESULTS.md").write_text(text + two_hours, encoding="utf-8")
    diurnal_report.draw(results)
    for experiment in EXPERIMENTS:
        if cells := found[experiment.name]:
            draw(experiment, cells, read_figures(), results / f"{experiment.name}.svg")


def read_validation(path: Path) -> Validation:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Validation)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}; `python -m tools.experiments validate` makes it anew") from None


def results_text(found: dict[str, list[Cell]], figures: Figures, validation: Validation | None) -> str:
    """The whole document."""
    parts = [_HEAD, _in_short(found), _against(found.get("rates", []), found.get("slos", []))]
    parts += [_section(one, cells, figures) for one in EXPERIMENTS if (cells := found.get(one.name))]
    if validation is not None:
        parts.append(_validation_section(validation))
    return "\n".join(parts)


# --- the paper's claims -------------------------------------------------------------------------------------------


class _Claim(NamedTuple):
    """That one system attains up to so much more than another."""

    text: str
    experiment: str
    setup: str
    system: str
    base: str
    paper_points: float
    paper_accuracy: str


_CLAIMS = (
    _Claim("TeDiServe over Llumnix, rates", "rates", "llada-gsm8k", "paper", "llumnix", 56.6, "-0.9"),
    _Claim("TeDiServe over INFaaS, rates", "rates", "llada-gsm8k", "paper", "infaas", 55.0, "-0.7"),
    _Claim("ours over Llumnix, rates", "rates", "llada-gsm8k", "tedi", "llumnix", 56.6, "-0.9"),
    _Claim("ours over INFaaS, rates", "rates", "llada-gsm8k", "tedi", "infaas", 55.0, "-0.7"),
    _Claim("deadline control over a fixed threshold", "ablations", "gh200", "no-load-control", "infaas", 88.1, "-1.6"),
    _Claim("both controls over deadline control", "ablations", "gh200", "tedi", "no-load-control", 22.4, "±0.7"),
    _Claim("TeDiServe over Proteus", "ablations", "gh200", "paper", "proteus", 70.9, "-0.8"),
    _Claim("ours over Proteus", "ablations", "gh200", "tedi", "proteus", 70.9, "-0.8"),
)

_SHORT = """## The paper's comparisons

The largest difference in *in time* of each table, in points, and what it costs there in accuracy. On GSM8K and LLaDA.
Direction: it is a gain here too. Size: it is at most {size:g} points smaller than the published one.

| what | up to, published | with accuracy | up to, here | with accuracy | at requests/s a GPU | direction | size |
|---|---|---|---|---|---|---|---|
"""

_WHY = """
Why they differ:

- **Accuracy falls further here.** The authors measured it under load and lost under one point. We take their own
  accuracy at fixed thresholds (78.6 % at 0.9, 65.9 % at 0.5) in the shares at which tokens were committed.
- **Proteus is stronger here.** Its mixture is chosen from a profile of accuracy and capacity, and ours is told the true
  capacity of the simulated instances. With that, a threshold for each rate keeps up, at the price of accuracy. What was
  published lets suppose a profile that was off.
- **A fixed threshold fails earlier and more slowly here**: two fitted costs do not make the published system's costs
  ours, which seem to grow with the load.
"""


def _in_short(found: dict[str, list[Cell]]) -> str:
    lines, met = [], []
    for claim in _CLAIMS:
        cells = [cell for cell in found.get(claim.experiment, ()) if cell.setup == claim.setup]
        pairs = paired(cells, claim.system, claim.base)
        told = ["", "", "", "", ""]
        if pairs:
            best = max(pairs, key=lambda pair: fmean(pair.attainment))
            size = fmean(best.attainment)
            reached = size > 0, size >= claim.paper_points - SIZE_POINTS
            met.append(reached)
            told = [points(best.attainment), points(best.accuracy), f"{best.rate:g}", *map(_yes, reached)]
        lines.append(_line([claim.text, f"{claim.paper_points:+.1f}", claim.paper_accuracy, *told]))
    summed = ""
    if met:
        directions, sizes = (sum(column) for column in zip(*met, strict=True))
        summed = f"\n**Direction: {directions} of {len(met)}. Size: {sizes} of {len(met)}.**\n"
    return _SHORT.format(size=SIZE_POINTS) + "\n".join(lines) + "\n" + summed + _WHY


def _yes(met: bool) -> str:
    return "yes" if met else "**no**"


# --- ours against the others --------------------------------------------------------------------------------------


_AGAINST = """## Ours against the paper's rules

Ours less `paper` in the same runs (arrivals, prompts), in points; ± over seeds. Measured workloads only. On the
built-in tasks each runs as it is served: ours with openings and quality floors, which the paper has not; `no-opening`
is `tedi` without, so that policies alone are compared; `flex` is `tedi` for requests of the tier without a quality
floor, which may run at a threshold without an opening when they would be late with one.
**better**: neither *in time* nor *accuracy* is lower by more than half a point, and one is higher by more than that;
**trade**: one is higher and the other lower; **worse**: the other way round.

| workload | ours | rate | SLO | seeds | in time | accuracy | right in time | |
|---|---|---|---|---|---|---|---|---|
"""


_OUR_SYSTEMS = ("tedi", *VARIANTS)


def _against(*tables: Sequence[Cell]) -> str:
    cells = [cell for cells in tables for cell in cells if SETUPS[cell.setup].is_measured]
    pairs = [(system, pair) for system in _OUR_SYSTEMS for pair in paired(cells, system, "paper")]
    lines = [
        _line(
            [
                SETUPS[pair.setup].title,
                system,
                _rate(pair.rate, SETUPS[pair.setup].rate_unit),
                f"x {pair.slo_factor:g}",
                str(len(pair.seeds)),
                points(pair.attainment),
                points(pair.accuracy),
                points(pair.right_in_time),
                f"**{_verdict(pair)}**" if pair.accuracy else "",
            ]
        )
        for system, pair in sorted(pairs, key=lambda one: list(SETUPS).index(one[1].setup))
    ]
    return _AGAINST + "\n".join(lines) + "\n" + _margins(pairs)


def _verdict(pair: Paired) -> str:
    return verdict(fmean(pair.attainment), fmean(pair.accuracy))


_MARGINS = """
Over all points of a workload that have {seeds} seeds or more: of each seed the mean over these points, ± over seeds.
Goal: **better** in the mean, and **worse** at no point.

| workload | ours | points | in time | accuracy | right in time | better | equal | trade | worse | goal |
|---|---|---|---|---|---|---|---|---|---|---|
"""
_SEEDS = 5


def _margins(pairs: Sequence[tuple[str, Paired]]) -> str:
    """What ours gain on each workload."""
    rows: list[str] = []
    met: dict[str, bool] = {}
    for key, system in product(SETUPS, _OUR_SYSTEMS):
        known = [pair for name, pair in pairs if (name, pair.setup) == (system, key) and _is_whole(pair)]
        if not known:
            continue
        by_seed = [_by_seed(known, name) for name in ("attainment", "accuracy", "right_in_time")]
        said = [_verdict(pair) for pair in known]
        is_met = verdict(fmean(by_seed[0]), fmean(by_seed[1])) == "better" and "worse" not in said
        met[key] = is_met or met.get(key, False)
        counts = [str(said.count(word)) for word in ("better", "equal", "trade", "worse")]
        told = [SETUPS[key].title, system, str(len(known)), *(points(values) for values in by_seed), *counts]
        rows.append(_line([*told, "met" if is_met else "**not met**"]))
    if not rows:
        return ""
    summed = f"\n**Met, by one of ours, on {sum(met.values())} of {len(met)} workloads.**\n"
    return _MARGINS.format(seeds=_SEEDS) + "\n".join(rows) + "\n" + summed


def _is_whole(pair: Paired) -> bool:
    return len(pair.seeds) >= _SEEDS and len(pair.accuracy) == len(pair.seeds)


def _by_seed(pairs: Sequence[Paired], name: str) -> list[float]:
    """Of each seed that all pairs have, the mean over the pairs."""
    seeds = sorted(set.intersection(*(set(pair.seeds) for pair in pairs)))
    return [fmean(getattr(pair, name)[pair.seeds.index(seed)] for pair in pairs) for seed in seeds]


# --- tables -------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "system", "rate", "SLO", "seeds", "in time", "published", "accuracy", "published", "right in time", "mean s",
    "p95 s", "p99 s", "threshold", "moves",
)  # fmt: skip


def _section(experiment: Experiment, cells: Sequence[Cell], figures: Figures) -> str:
    parts = [f"## {experiment.title}\n\n{experiment.text}\n"]
    for key, setup in SETUPS.items():
        ours = [cell for cell in cells if cell.setup == key]
        if not ours:
            continue
        made_up = "" if setup.is_measured else "**Made up: counts for nothing.** "
        slo = f"A request alone takes {ours[0].slo_s / ours[0].slo_factor:.3g} s."
        unit = "requests/s a GPU" if setup.rate_unit == "a GPU" else "times C"
        parts.append(
            f"### {setup.title}\n\n{made_up}{setup.about}; {ours[0].requests} requests a run; rate in {unit}. {slo}\n"
        )
        rows = [_line(_row(experiment.name, group, figures)) for group in _groups(ours)]
        parts.append("\n".join([_line(_COLUMNS), "|" + "---|" * len(_COLUMNS), *rows]) + "\n")
        if told := goals.lines(goals.of_table(experiment.name, ours, figures)):
            parts.append(told)
    if told := goals.lines(goals.of_experiment(experiment.name, cells)):
        parts.append(told)
    parts.append(f"![in time, by experiment](results/{experiment.name}.svg)\n")
    return "\n".join(parts)


def _groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that differ in nothing but the seed; by rate, SLO from loose to tight, and system."""
    found: dict[tuple[float, float, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda c: (c.rate, -c.slo_factor, c.system, c.seed)):
        found.setdefault((cell.rate, cell.slo_factor, cell.system), []).append(cell)
    return list(found.values())


def _row(experiment: str, group: Sequence[Cell], figures: Figures) -> list[str]:
    cell = group[0]
    theirs: Figure | None = figures.find(experiment, cell.setup, cell.system, cell.rate, cell.slo_factor)
    return [
        cell.system,
        f"{cell.rate:g}",
        f"x {cell.slo_factor:.3g}",
        str(len(group)),
        _percent(c.attainment for c in group),
        f"{100 * theirs.attainment:.1f}%" if theirs else "",
        _percent(c.accuracy for c in group),
        f"{100 * theirs.accuracy:.1f}%" if theirs else "",
        _percent(c.right_in_time for c in group),
        _mean((c.latency_mean_s for c in group), ".3g"),
        _mean((c.latency_p95_s for c in group), ".3g"),
        _mean((c.latency_p99_s for c in group), ".3g"),
        _mean((c.threshold_mean for c in group), ".3f"),
        _mean((c.moves_mean for c in group), ".2f"),
    ]


def _percent(values: Iterable[float | None]) -> str:
    """Mean, and the standard deviation over seeds where there are several."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return ""
    return f"{fmean(known):.1f}%" + (f" ± {stdev(known):.1f}" if len(known) > 1 else "")


def _mean(values: Iterable[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(fmean(known), form) if known else ""


def _rate(rate: float, unit: str) -> str:
    return f"{rate:g} {unit}" if unit == "a GPU" else f"{rate:g} C"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- validation ---------------------------------------------------------------------------------------------------

_VALIDATION = """## The simulator against the live stack

`python -m tools.experiments validate build/slo`, on the cells of a live `make bench-slo`: the same arrivals, prompts
and SLO, prompts recorded with the served weights. What passes took over what the profile says was measured in each
cell, live; what a request takes beside its passes ({beside_ms:.1f} ms) is what the live median of a request alone
lacks. Nothing is fitted to what came of a cell. {machine}, {workers} workers; alone {alone_ms:.1f} ms, SLO
{slo_ms:.0f} ms, C = {capacity:.2f} requests/s.

{table}
"""


def _validation_section(found: Validation) -> str:
    return _VALIDATION.format(
        beside_ms=found.beside_passes_ms,
        machine=found.machine,
        workers=found.workers,
        alone_ms=found.alone_ms,
        slo_ms=found.slo_ms,
        capacity=found.capacity_per_s,
        table=table(found),
    )


# --- plots --------------------------------------------------------------------------------------------------------


def draw(experiment: Experiment, cells: Sequence[Cell], figures: Figures, path: Path) -> None:
    """In time over the rate, or over the SLO where there is one rate; a field for each setup, published ones dashed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "tediserve"  # the same rows, the same bytes
    from matplotlib import pyplot

    keys = [key for key in SETUPS if any(cell.setup == key for cell in cells)]
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    figure, fields = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows), layout="constrained", squeeze=False
    )
    systems = list(dict.fromkeys(cell.system for cell in sorted(cells, key=lambda c: c.system)))
    colours = {system: f"C{number % 10}" for number, system in enumerate(systems)}
    for field, key in zip(fields.flat, keys, strict=False):
        _draw_field(field, experiment.name, [cell for cell in cells if cell.setup == key], figures, colours)
        field.set_title(SETUPS[key].title + ("" if SETUPS[key].is_measured else " (made up)"), fontsize=9)
    for field in list(fields.flat)[len(keys) :]:
        field.set_axis_off()
    known: dict[str, Any] = {}
    for field in fields.flat:
        known |= dict(zip(*reversed(field.get_legend_handles_labels()), strict=True))
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_field(field: Any, experiment: str, cells: Sequence[Cell], figures: Figures, colours: dict[str, str]) -> None:
    over_slo = len({cell.slo_factor for cell in cells}) > len({cell.rate for cell in cells})
    for system, colour in colours.items():
        groups = _groups([cell for cell in cells if cell.system == system])
        if not groups:
            continue
        points = sorted(
            (g[0].slo_factor if over_slo else g[0].rate, 100 * fmean(c.attainment or 0.0 for c in g)) for g in groups
        )
        field.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=system)
        theirs = [figures.find(experiment, g[0].setup, system, g[0].rate, g[0].slo_factor) for g in groups]
        dashed = sorted(
            (one.slo_factor if over_slo else one.rate, 100 * one.attainment) for one in theirs if one is not None
        )
        if dashed and system != "paper":  # TeDiServe's would be drawn twice
            name = "TeDiServe" if system == "tedi" else system
            field.plot(*zip(*dashed, strict=True), "--", linewidth=1, color=colour, label=f"{name}, published")
    field.set_ylim(-2, 103)
    field.set_xlabel("SLO over time alone" if over_slo else "rate", fontsize=8)
    field.set_ylabel("in time, %", fontsize=8)
    field.tick_params(labelsize=8)
    field.grid(alpha=0.3)
