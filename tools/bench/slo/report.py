"""The tables of a benchmark's folder, whatever part of its cells is finished. Every cell is in them.

1. Attainment is of all that was due. Latencies are of the finished requests of all seeds, pooled; so are steps,
   thresholds and correctness, each request counting once.
2. The gain of a policy is told for each seed, and its accuracy in pairs (pairs.py).
3. A cell where the load generator was late is marked: its numbers are worse than they would be.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

from tools.bench.serving import quantile
from tools.bench.slo.cells import Basis, Result, Row
from tools.bench.slo.pairs import Difference, Pair, difference

# what is wanted at this rate of `ours` against `fixed`
_GOAL_RATE, _GOAL_POINTS, _GOAL_LOSS, _GOAL_PAIRS, _GOAL_SEEDS = 1.15, 30.0, 2.0, 1500, 3

_HEAD = (
    "| x C | policy | seeds | SLO attainment | p50 ms | p95 ms | p99 ms | steps | threshold | correct | due | errors |"
)
_PAIR_HEAD = "| x C | policy | attainment gained, points, by seed | pairs | correct, points | 95 % interval |"


def report(basis: Basis, results: Sequence[Result]) -> str:
    """All tables, as Markdown."""
    parts = [
        f"Hardware: {basis.machine}. Profile: {basis.profile}, {basis.workers} workers. Alone: median"
        f" {basis.alone_ms:.1f} ms; SLO {basis.slo_ms:.1f} ms ({basis.slo_factor:g} times that).{_lengths(basis)} C,"
        f" threshold {basis.threshold:g} and a full queue: {basis.capacity_per_s:.2f} requests/s."
        f" {basis.seconds:g} s a cell after {basis.warmup_s:g} s of warm-up.",
        "\n".join([_HEAD, _line_under(_HEAD), *_rows(basis, results)]),
        *(_pairs_table(basis, results, base) for base in ("fixed", "paper") if base in _policies(basis, results)),
        "\n".join(_goals(results)),
        "\n".join(_late(results)),
    ]
    return "\n\n".join(part for part in parts if part)


def _lengths(basis: Basis) -> str:
    if not basis.tokens_each:
        return ""
    return f" `max_tokens`: {basis.tokens_each} for each problem that a prompt numbers."


def _rows(basis: Basis, results: Sequence[Result]) -> Iterable[str]:
    for rate in _rates(basis, results):
        for policy in _policies(basis, results):
            found = _of(results, rate, policy)
            seeds = f"{len(found)} of {len(set(basis.seeds) | {one.seed for one in found})}"
            cells = _cells(found) if found else ["-"] * 9
            yield _line([f"{rate:g}", policy, seeds, *cells])


def _cells(found: Sequence[Result]) -> list[str]:
    rows = [row for result in found for row in result.rows]
    done = [row for row in rows if not row.error]
    each = [100 * result.attainment for result in found]
    attained = f"{100 * sum(row.met for row in rows) / max(1, len(rows)):.1f} % ({min(each):.1f} to {max(each):.1f})"
    latencies = [row.latency_ms for row in done]
    told = [f"{quantile(latencies, share):.0f}" if done else "-" for share in (0.5, 0.95, 0.99)]
    return [
        attained + ("" if all(not result.why_it_does_not_count for result in found) else " (late)"),
        *told,
        _mean((row.steps for row in done), ".1f"),
        _mean((row.mean_threshold for row in done), ".3f"),
        _mean((None if row.is_correct is None else 100 * row.is_correct for row in done), ".1f", " %"),
        str(len(rows)),
        str(len(rows) - len(done)),
    ]


def _pairs_table(basis: Basis, results: Sequence[Result], base: str) -> str:
    """Rule 2, of all other policies against `base`."""
    lines = [f"Against `{base}`, on the same arrivals:\n", _PAIR_HEAD, _line_under(_PAIR_HEAD)]
    for rate in _rates(basis, results):
        for policy in _policies(basis, results):
            if policy != base:
                gains = gained(results, rate, policy, base)
                found = accuracy(results, rate, policy, base)
                lines.append(
                    _line(
                        [
                            f"{rate:g}",
                            policy,
                            ", ".join(f"{points:+.1f}" for points in gains) or "-",
                            str(found.pairs) if found else "-",
                            f"{found.points:+.2f}" if found else "-",
                            f"{found.low:+.2f} to {found.high:+.2f}" if found else "-",
                        ]
                    )
                )
    return "\n".join(lines)


def gained(results: Sequence[Result], rate: float, policy: str, base: str) -> list[float]:
    """Points of attainment more than `base`, of each seed that both have."""
    there = {result.seed: result.attainment for result in _of(results, rate, base)}
    return [
        100 * (result.attainment - there[result.seed]) for result in _of(results, rate, policy) if result.seed in there
    ]


def accuracy(results: Sequence[Result], rate: float, policy: str, base: str) -> Difference | None:
    """The difference of correctness between the two, over what both have answered."""
    there = {result.seed: result for result in _of(results, rate, base)}
    pairs: list[Pair] = []
    for result in _of(results, rate, policy):
        if other := there.get(result.seed):
            pairs += _pairs(result.rows, other.rows)
    return difference(pairs)


def _pairs(here: Sequence[Row], there: Sequence[Row]) -> Iterable[Pair]:
    others = {row.number: row for row in there if not row.error}
    for row in here:
        other = others.get(row.number)
        if row.error or other is None or row.is_correct is None or other.is_correct is None:
            continue
        assert row.prompt == other.prompt, "the same request must have the same prompt"
        yield Pair(row.prompt, row.is_correct, other.is_correct)


def _goals(results: Sequence[Result]) -> Iterable[str]:
    """Whether ours keeps what is wanted of it, as far as that can be told."""
    gains = gained(results, _GOAL_RATE, "ours", "fixed")
    if not gains:
        return
    yield (
        f"At {_GOAL_RATE} x C ours attains {_GOAL_POINTS:g} points more than fixed in every seed:"
        f" {_verdict(min(gains) >= _GOAL_POINTS, len(gains) >= _GOAL_SEEDS)} ({len(gains)} seeds,"
        f" {_GOAL_SEEDS} are wanted)"
    )
    found = accuracy(results, _GOAL_RATE, "ours", "fixed")
    if found is not None:
        yield (
            f"At {_GOAL_RATE} x C the upper 95 % bound of ours' loss of accuracy is under {_GOAL_LOSS:g} points:"
            f" {_verdict(-found.low < _GOAL_LOSS, found.pairs >= _GOAL_PAIRS)} ({-found.low:.2f}, {found.pairs} pairs,"
            f" {_GOAL_PAIRS} are wanted)"
        )


def _verdict(holds: bool, is_enough: bool) -> str:
    return ("yes" if holds else "NO") + ("" if is_enough else " so far")


def _late(results: Sequence[Result]) -> Iterable[str]:
    """Rule 3."""
    for result in results:
        for reason in result.why_it_does_not_count:
            yield f"Does not count: {result.rate:g} x C, seed {result.seed}, {result.policy}: {reason}"


def _of(results: Sequence[Result], rate: float, policy: str) -> list[Result]:
    found = (result for result in results if (result.rate, result.policy) == (rate, policy))
    return sorted(found, key=lambda result: result.seed)


def _rates(basis: Basis, results: Sequence[Result]) -> list[float]:
    return sorted({*basis.rates, *(result.rate for result in results)})


def _policies(basis: Basis, results: Sequence[Result]) -> list[str]:
    """Those of the last run in its order, then others."""
    return list(dict.fromkeys([*basis.policies, *sorted(result.policy for result in results)]))


def _mean(values: Iterable[float | None], form: str, unit: str = "") -> str:
    known = [value for value in values if value is not None]
    return format(fmean(known), form) + unit if known else "-"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _line_under(head: str) -> str:
    return "|" + "---|" * (head.count("|") - 1)
