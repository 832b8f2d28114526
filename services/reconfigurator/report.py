"""Plans in words: one line for the log, a page for people, JSON for programs."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.reconfigurator.plan import Alternative, Figures, Layout, Plan
from services.reconfigurator.policy import Verdict
from services.reconfigurator.problem import Instance, Problem
from services.settings import ConfigError


def load_problem(path: Path) -> Problem:
    """Reads a problem file. Raises ConfigError, which names the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Problem)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def explain(problem: Problem, plan: Plan, verdict: Verdict) -> str:
    """One line: what was decided, and why."""
    decision = "change to" if verdict.change else "keep today's layout; the plan was"
    return (
        f"{decision} {in_words(plan.layout)} (today {in_words(problem.layout_today)}), "
        f"{verdict.reason}: {verdict.because}{_caveats(plan)}"
    )


def as_json(problem: Problem, plan: Plan, verdict: Verdict, others: tuple[Alternative, ...]) -> bytes:
    """Everything that is known about a plan."""
    stopped = [instance.instance_id for instance in _stopped(problem, plan)]
    content: dict[str, Any] = {"verdict": verdict, "plan": plan, "stopped": stopped, "alternatives": others}
    return msgspec.json.format(msgspec.json.encode(content), indent=2)


def as_text(problem: Problem, plan: Plan, verdict: Verdict, others: tuple[Alternative, ...]) -> str:
    """A page about a plan."""
    head = [
        f"{'Change' if verdict.change else 'Keep today'} ({verdict.reason}): {verdict.because}",
        f"Plan:  {in_words(plan.layout)}{_caveats(plan)}",
        f"Today: {in_words(problem.layout_today)}",
        f"Why:   {plan.because}",
    ]
    parts = ["\n".join(head)]
    if plan.solver:
        gap = f"gap {plan.gap:.2%}" if math.isfinite(plan.gap) else "gap unknown"
        proof = "proven optimal" if plan.proven else f"not proven optimal, {gap}"
        parts.append(f"Solved in {plan.seconds:.2f} s by {plan.solver}, {proof}.")
    if plan.figures is not None:
        parts += [_classes(plan.figures), _degrees(plan.figures)]
    parts += [_comparison(plan, others), _moves(problem, plan)]
    return "\n\n".join(part for part in parts if part) + "\n"


def in_words(layout: Layout) -> str:
    return " + ".join(f"{count} x TP-{degree}" for degree, count in sorted(layout.items())) or "nothing"


def _caveats(plan: Plan) -> str:
    words = ""
    if plan.softened:
        words += f"; promises that cannot be kept even alone, planned without: {', '.join(plan.softened)}"
    if plan.too_long:
        words += f"; left out, longer than any batch: {', '.join(plan.too_long)}"
    return words


def _classes(figures: Figures) -> str:
    rows = [
        (
            one.name,
            f"{one.mean_threshold:.3f}",
            f"{one.latency_s:.2f}",
            "-" if one.slo_s is None else f"{one.slo_s:g}",
            ", ".join(f"TP-{degree} {share:.0%}" for degree, share in one.share_by_degree.items()),
        )
        for one in figures.classes
    ]
    return _table(("class", "threshold", "latency s", "SLO s", "steps at"), rows)


def _degrees(figures: Figures) -> str:
    rows = [
        (
            f"TP-{one.tp_degree}",
            str(one.instances),
            f"{one.utilisation:.0%}",
            ", ".join(f"{kind} {tokens}" for kind, tokens in one.batch_tokens.items()) or "-",
        )
        for one in figures.degrees
    ]
    return _table(("degree", "instances", "busy", "tokens in a batch"), rows)


def _comparison(plan: Plan, others: tuple[Alternative, ...]) -> str:
    rows = [_figures_row("plan", plan.layout, plan.figures)]
    rows += [_figures_row(one.name, one.layout, one.figures) for one in others]
    return _table(("layout", "instances", "threshold", "latency s", "busiest"), rows)


def _figures_row(name: str, layout: Layout, figures: Figures | None) -> tuple[str, ...]:
    if figures is None:
        return name, in_words(layout), "breaks a promise, is overloaded, or has no requests", "", ""
    return (
        name,
        in_words(layout),
        f"{figures.mean_threshold:.3f}",
        f"{figures.mean_latency_s:.2f}",
        f"{figures.busiest:.0%}",
    )


def _moves(problem: Problem, plan: Plan) -> str:
    """Which instances stop and start, by node; nodes where nothing changes are counted."""
    stopped = _stopped(problem, plan)
    started = [one for one in plan.instances if not one.instance_id]
    if not stopped and not started:
        return ""
    lines = [f"{plan.kept} instances run on, {len(stopped)} stop, {len(started)} start:"]
    for node in problem.nodes:
        stops = ", ".join(one.instance_id for one in stopped if one.node_id == node.node_id)
        starts = ", ".join(
            f"TP-{one.tp_degree} on {_list(one.devices)}" for one in started if one.node_id == node.node_id
        )
        if stops or starts:
            lines.append(f"  {node.node_id}: stop {stops or 'nothing'}; start {starts or 'nothing'}")
    return "\n".join(lines)


def _stopped(problem: Problem, plan: Plan) -> list[Instance]:
    kept = {one.instance_id for one in plan.instances}
    return [instance for instance in problem.today if instance.instance_id not in kept]


def _list(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)
