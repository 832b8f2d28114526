"""`validate FOLDER`: the simulator against a live benchmark (`make bench-slo`), cell by cell.

1. The same requests: arrivals and prompts follow from a cell's seed and rate, and are checked against its rows. Each
   prompt is recorded with the weights that are served (build/recordings/live), and denoises as its recording does.
2. The same passes: what they took over what the profile says, and the time between them, was measured in each cell. The
   policies know of it as they do live, from what the instances say.
3. What a request takes beside its passes is what is missing of the live median of a request alone, measured before all
   cells. Nothing is fitted to what came of a cell.
4. Compared are attainment (mean and range over seeds), the 95th percentile of latencies, and the rate at which
   attainment falls through 90 %, in proportion between two rates.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from services.scheduler.config import SchedulerConfig
from services.settings import ConfigError
from services.threshold_controller.config import ThresholdControllerConfig
from tools.bench.serving import quantile
from tools.bench.slo.cells import Basis, Folder, Result
from tools.bench.slo.measure import prompt_number, what_is_due
from tools.bench.slo.policies import policy_of
from tools.bench.slo.work import Work
from tools.experiments.goals import Finding
from tools.experiments.recordings import ROOT, make
from tools.loadgen.asks import Ask, of_problem
from tools.simulate.run import Job, simulate
from tools.simulate.workload import Arrival
from tools.tiny_model import tasks
from tools.traces.prompts import ChatMessage, Line
from tools.traces.recorder import RecordJob

GOAL_POINTS, GOAL_P95, GOAL_RATE = 5.0, 0.15, 0.10
_KNEE = 0.9  # attainment
_MEDIUM_LOAD = 0.6  # times C, up to: where attainment and p95 are to agree (C is of the largest batches)
_ALONE_REQUESTS = 300
_Tell = Callable[[str], None]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A rate and a policy, over all seeds that were run live. Shares, milliseconds."""

    rate: float  # times C
    policy: str
    seeds: int
    requests: int
    live: tuple[float, float, float]  # attainment: lowest, mean, highest
    simulated: tuple[float, float, float]
    live_p95_ms: float
    simulated_p95_ms: float
    live_correct: float
    simulated_correct: float
    latency_ratio: float  # measured over profiled, mean of the cells


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The file that is left of it: docs/results/validation.json."""

    machine: str
    workers: int
    alone_ms: float
    slo_ms: float
    capacity_per_s: float
    beside_passes_ms: float  # rule 3
    rows: list[Row]


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("validate", help="the simulator against the cells of a live `make bench-slo`")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/slo"), help="(default: %(default)s)")
    parser.add_argument("--recording", type=Path, default=ROOT / "build/recordings/live", help="(default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="that record prompts (default: 2)")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of RESULTS.md (default: docs)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = validate(arguments.folder, arguments.recording, arguments.processes, tell)
    path = arguments.docs / "results" / "validation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(table(found))


def validate(folder: Path, recording: Path, processes: int = 2, tell: _Tell = lambda text: None) -> Validation:
    """Raises ConfigError for a folder of no cells, or of cells that do not tell what passes cost."""
    live = Folder(folder)
    basis, results = live.basis(), live.results()
    if basis is None or not results:
        raise ConfigError(f"{folder} holds no cell of a live run: `make bench-slo` makes some")
    if basis.tokens_each:
        raise ConfigError(
            f"{folder} asked for answers of several lengths, a recording has one: make bench-slo ARGS=--tokens-each=0"
        )
    problems = _Problems(basis.problems)
    make(problems.record_job(basis, recording, processes), tell)
    scene = _Scene(basis, problems, recording)
    tell(f"beside its passes a request takes {1e3 * scene.beside_s:.1f} ms")
    pairs = []
    for number, result in enumerate(results, start=1):
        pairs.append(_Pair(result, scene.simulate(result)))
        live_share, simulated = (100 * share for share in (result.attainment, pairs[-1].simulated.attainment))
        tell(
            f"{number} of {len(results)}: {result.rate:g} x C, seed {result.seed}, {result.policy}: "
            f"live {live_share:.1f} %, simulated {simulated:.1f} %"
        )
    return Validation(
        machine=basis.machine,
        workers=basis.workers,
        alone_ms=basis.alone_ms,
        slo_ms=basis.slo_ms,
        capacity_per_s=basis.capacity_per_s,
        beside_passes_ms=round(1e3 * scene.beside_s, 3),
        rows=_rows(pairs),
    )


# --- the same requests --------------------------------------------------------------------------------------------


class _Problems:
    """What the benchmark draws its prompts from (tools.loadgen.asks.built_in), each text once."""

    def __init__(self, count: int) -> None:
        rng = Random("loadgen/problems/0")
        drawn = [tasks.sample(rng, "held_out") for _ in range(count)]
        self.asks: list[Ask] = [of_problem(problem) for problem in drawn]
        self._unique = list({problem.prompt: problem for problem in drawn}.values())
        self.number_of = {
            prompt_number(of_problem(problem)): number for number, problem in enumerate(self._unique)
        }  # by what the rows say

    def record_job(self, basis: Basis, out: Path, processes: int) -> RecordJob:
        """Writes the prompts beside the recording."""
        lines = [
            Line(messages=[ChatMessage("user", p.prompt)], task=p.task, answer=p.answer, results=p.expected)
            for p in self._unique
        ]
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.with_suffix(".jsonl")
        file.write_bytes(msgspec.json.Encoder().encode_lines(lines))
        return RecordJob(ROOT / basis.profile, out, file=file, num_processes=processes)


class _Simulated(NamedTuple):
    """What came of a cell in the simulator, of the requests that were due in its window."""

    attainment: float
    latencies_ms: list[float]
    correct: float


class _Scene:
    """A benchmark, ready to be simulated."""

    def __init__(self, basis: Basis, problems: _Problems, recording: Path) -> None:
        self._basis, self._problems, self._recording = basis, problems, recording
        self.beside_s = self._beside_s()

    def _beside_s(self) -> float:
        """Rule 3."""
        basis = self._basis
        asks = self._problems.asks[:_ALONE_REQUESTS]
        apart_s = 20 * basis.alone_ms / 1e3  # so that none meets another
        asked = [Arrival(n * apart_s, self._problems.number_of[prompt_number(ask)], n) for n, ask in enumerate(asks)]
        job = self._job(f"fixed-{basis.threshold:g}", asked, basis.alone_work)._replace(gateway_s=0.0)
        alone_s = median(outcome.latency_s for outcome in simulate(job).outcomes)
        return max(0.0, basis.alone_ms / 1e3 - alone_s)

    def simulate(self, result: Result) -> _Simulated:
        """Raises ConfigError where a cell cannot be asked again."""
        due = what_is_due(self._basis, result.seed, result.rate_per_s, self._problems.asks)
        counted = {row.number: row for row in result.rows}
        for send in due:
            row = counted.get(send.number)
            if row is not None and (row.prompt, row.due_s) != (prompt_number(send.ask), round(send.due_s, 4)):
                raise ConfigError(
                    f"request {send.number} of {result.cell.file_name} had another prompt or time than it gets today: "
                    "these cells are of other code"
                )
        asked = [Arrival(s.due_s, self._problems.number_of[prompt_number(s.ask)], s.number) for s in due]
        if policy_of(result.policy).is_pinned:
            job = self._job(f"fixed-{self._basis.threshold:g}", asked, result.work)
        else:
            controller = msgspec.convert(result.settings, ThresholdControllerConfig)
            job = self._job("tedi", asked, result.work)._replace(controller=controller)
        job = job._replace(scheduler=msgspec.convert(result.scheduler, SchedulerConfig))
        outcomes = [one for one in simulate(job).outcomes if int(one.request_id.removeprefix("r")) in counted]
        done = [one for one in outcomes if one.state == "finished"]
        return _Simulated(
            attainment=fmean(one.met is True for one in outcomes),
            latencies_ms=[1e3 * one.latency_s for one in done],
            correct=fmean(one.correctness or 0.0 for one in done),
        )

    def _job(self, system: str, asked: Sequence[Arrival], work: Sequence[Work]) -> Job:
        """Rule 2. Raises ConfigError for a run that did not look."""
        if not work or not all(one.passes for one in work):
            raise ConfigError("these cells do not tell what passes took: they are of an earlier benchmark; run it anew")
        passes = sum(one.passes for one in work)
        return Job(
            profile=ROOT / self._basis.profile,
            system=system,
            workload=str(self._recording),
            phases=(),
            tp_degrees=(1,) * self._basis.workers,
            slo_s=self._basis.slo_ms / 1e3,
            forecasts="remembered",
            step_overhead_s=sum(one.between_s for one in work) / passes,
            latency_ratio=sum(one.measured_s for one in work) / sum(one.profiled_s for one in work),
            gateway_s=getattr(self, "beside_s", 0.0),
            asked=tuple(asked),
        )


# --- side by side -------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    live: Result
    simulated: _Simulated


def _rows(pairs: Sequence[_Pair]) -> list[Row]:
    groups: dict[tuple[float, str], list[_Pair]] = {}
    for pair in sorted(pairs, key=lambda p: p.live.cell):
        groups.setdefault((pair.live.rate, pair.live.policy), []).append(pair)
    return [_row(group) for group in groups.values()]


def _row(group: Sequence[_Pair]) -> Row:
    live = [pair.live.attainment for pair in group]
    simulated = [pair.simulated.attainment for pair in group]
    done = [row for pair in group for row in pair.live.rows if not row.error]
    work = [one for pair in group for one in pair.live.work]
    return Row(
        rate=group[0].live.rate,
        policy=group[0].live.policy,
        seeds=len(group),
        requests=sum(len(pair.live.rows) for pair in group),
        live=(min(live), fmean(live), max(live)),
        simulated=(min(simulated), fmean(simulated), max(simulated)),
        live_p95_ms=quantile([row.latency_ms for row in done], 0.95),
        simulated_p95_ms=quantile([ms for pair in group for ms in pair.simulated.latencies_ms], 0.95),
        live_correct=fmean(row.is_correct is True for row in done),
        simulated_correct=fmean(pair.simulated.correct for pair in group),
        latency_ratio=sum(one.measured_s for one in work) / sum(one.profiled_s for one in work),
    )


def crossing(points: Sequence[tuple[float, float]], level: float = _KNEE) -> float | None:
    """Rule 4: the lowest rate at which attainment falls through the level; None: at none of these."""
    ordered = sorted(points)
    for (rate, share), (next_rate, next_share) in pairwise(ordered):
        if share >= level > next_share:
            return rate + (share - level) / (share - next_share) * (next_rate - rate)
    return None


_HEAD = (
    "| x C | policy | seeds | in time, live | simulated | agrees | p95 ms, live | simulated | differs "
    "| correct, live | simulated | passes, measured over profiled |"
)


def table(found: Validation) -> str:
    """Markdown."""
    lines = [_HEAD, "|" + "---|" * (_HEAD.count("|") - 1)]
    for row in sorted(found.rows, key=lambda r: (r.rate, r.policy)):
        off = row.simulated_p95_ms / row.live_p95_ms - 1
        told = [
            f"{row.rate:g}",
            row.policy,
            str(row.seeds),
            _range(row.live),
            _range(row.simulated),
            "yes" if attainment_agrees(row) else "NO",
            f"{row.live_p95_ms:.0f}",
            f"{row.simulated_p95_ms:.0f}",
            f"{100 * off:+.0f} %",
            f"{100 * row.live_correct:.1f} %",
            f"{100 * row.simulated_correct:.1f} %",
            f"{row.latency_ratio:.2f}",
        ]
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join([*lines, "", *_crossings(found), "", *(f"- {line}" for line in _verdicts(found))])


def attainment_agrees(row: Row) -> bool:
    """Inside the live range, with GOAL_POINTS to spare on both sides."""
    low, _, high = row.live
    return low - GOAL_POINTS / 100 <= row.simulated[1] <= high + GOAL_POINTS / 100


def _crossings(found: Validation) -> list[str]:
    lines = [f"| policy | {_KNEE:.0%} in time up to, live, x C | simulated | differs |", "|---|---|---|---|"]
    for policy, live, simulated in crossings(found):
        off = "-" if live is None or simulated is None else f"{100 * (simulated / live - 1):+.0f} %"
        lines.append(f"| {policy} | {_rate(live)} | {_rate(simulated)} | {off} |")
    return lines


def crossings(found: Validation) -> list[tuple[str, float | None, float | None]]:
    """Of each policy, live and simulated."""
    policies = dict.fromkeys(row.policy for row in found.rows)
    of = {policy: [row for row in found.rows if row.policy == policy] for policy in policies}
    return [
        (policy, crossing([(r.rate, r.live[1]) for r in rows]), crossing([(r.rate, r.simulated[1]) for r in rows]))
        for policy, rows in of.items()
    ]


def _verdicts(found: Validation) -> list[str]:
    low = [row for row in found.rows if row.rate <= _MEDIUM_LOAD]
    inside = sum(attainment_agrees(row) for row in low)
    near = sum(abs(row.simulated_p95_ms / row.live_p95_ms - 1) <= GOAL_P95 for row in low)
    known = [(live, simulated) for _, live, simulated in crossings(found) if live is not None]
    knees = sum(simulated is not None and abs(simulated / live - 1) <= GOAL_RATE for live, simulated in known)
    up_to = f"up to {_MEDIUM_LOAD:g} x C"
    goals = (
        (f"{up_to}, in time within the live range ± {GOAL_POINTS:g} points", inside, len(low), "rows"),
        (f"{up_to}, the 95th percentile within {GOAL_P95:.0%}", near, len(low), "rows"),
        (f"the rate of {_KNEE:.0%} in time within {GOAL_RATE:.0%}", knees, len(known), "policies that have one live"),
    )
    return [Finding(goal, f"{met} of {all_} {what}", met == all_ > 0).line for goal, met, all_, what in goals]


def _range(shares: tuple[float, float, float]) -> str:
    low, mean, high = (100 * share for share in shares)
    return f"{mean:.1f} % ({low:.1f} to {high:.1f})"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
