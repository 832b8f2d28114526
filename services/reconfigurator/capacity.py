"""Stage 1: how many instances at each TP degree (the paper's section 3.3, and 3.4 with caching).

1. First the mean threshold per token is as high as promises, stability and devices allow; then, for at most
   `threshold_tolerance` of it, the mean latency is as low as can be; then the busiest TP degree is as idle as can be,
   then no device is left over, then as many instances as possible have the TP degrees that run today.
2. Every token is committed. Steps may run at several thresholds and TP degrees, and in batches of several sizes;
   without `time_sharing` all instances of a degree use one batch size for each kind of step.
3. Stability is counted in instance-seconds a second, so a degree's number of instances stands alone on one side of the
   row, and only the product of a batch's choice and the steps in it needs its own columns.
4. With caching a request moves at block starts only: the steps that it runs at a degree commit the tokens of the blocks
   that it runs there.
5. Nodes are interchangeable: degrees that divide each other fit if and only if, for each, the devices of all that are
   at least as large fit into nodes cut to its multiples. Others are counted by ways to divide a node.
6. One objective is solved after the other; the integers are then rounded and fixed, and the steps solved again.
7. The relaxed program (time sharing, parts of instances) bounds the threshold, and the batches that it uses most are a
   guess. Where the guess reaches the bound, the threshold is settled, and nothing slower than the guess is looked at.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from services.reconfigurator.demand import Demand, Option, kinds
from services.reconfigurator.milp import Model, Solution, Solver, Status, Terms, scaled, total, value_of
from services.reconfigurator.plan import ClassFigures, DegreeFigures, Figures, Layout, StepKind
from services.reconfigurator.problem import Problem

Batches = dict[tuple[StepKind, int], int]  # of a degree's passes of a kind: tokens

_SLACK = 1e-7  # between one solve's optimum and the row that keeps it in the next
_NO_STEPS = 1e-7  # steps of a request that are none
_SETTLED = 1e-8  # between a bound of the mean threshold and one that is reached: there is none higher
_MARGIN = 1e-6  # relative, by which stability may be missed through rounding


class Capacity(NamedTuple):
    """Stage 1's answer. Without a layout: `status` says whether there is none, or none was found in time."""

    status: Status
    layout: Layout
    figures: Figures | None
    gap: float  # relative, the largest of all solves
    solver: str


def plan_capacity(problem: Problem, demands: tuple[Demand, ...], solver: Solver, time_limit_s: float) -> Capacity:
    """The best layout. Raises SolverFault."""
    return _Stage1(problem, demands, solver, time_limit_s).best_layout()


def assess(
    problem: Problem, demands: tuple[Demand, ...], layout: Layout, solver: Solver, time_limit_s: float
) -> Capacity:
    """What a given layout can reach; `infeasible` if it breaks a promise or is overloaded. Raises SolverFault."""
    return _Stage1(problem, demands, solver, time_limit_s).best_use_of(layout)


def broken_promises(
    problem: Problem, demands: tuple[Demand, ...], solver: Solver, time_limit_s: float
) -> tuple[str, ...] | None:
    """The classes whose promises must be broken, least priority first, so that the others' can be kept.

    Empty: it is not known which, time was too short. None: the load is too high even without any promise. Raises
    SolverFault.
    """
    return _Stage1(problem, demands, solver, time_limit_s).broken_promises()


def most_instances(problem: Problem, tp_degree: int) -> int:
    """Of one degree alone."""
    return sum(len(node.devices) // tp_degree for node in problem.nodes)


class _Program:
    """The rows of a problem, for all layouts and batches or for given ones."""

    def __init__(
        self,
        problem: Problem,
        demands: tuple[Demand, ...],
        layout: Layout | None = None,
        batches: Batches | None = None,
        elastic: bool = False,
        time_sharing: bool = False,
    ) -> None:
        self.model = Model()
        self.batches = batches
        self.time_sharing = time_sharing or problem.planning.time_sharing
        self.problem = problem
        self.demands = demands
        self.caching = problem.cache != "none"
        self.requests_per_s = sum(d.rate_per_s for d in demands)
        self.tokens_per_s = sum(d.rate_per_s * d.output_tokens for d in demands)
        self.most = {degree: most_instances(problem, degree) for degree in problem.usable_degrees}
        self.instances = {degree: self._instances_column(degree, layout) for degree in problem.usable_degrees}
        self.chosen: dict[tuple[StepKind, int, int], int] = {}  # kind, degree, batch -> column: is it the degree's?
        self.steps: list[dict[Option, int]] = []  # by class: option -> column
        self.committing: list[list[tuple[int, int]]] = []  # by class: (column, index of its threshold)
        self.late_s: list[int] = []  # by class: column of the seconds by which its promise is broken; if elastic
        self._add_steps(layout, batches, elastic)
        if layout is None:
            self._add_packing()
        self._add_stability()

    # --- objectives -------------------------------------------------------------------------------------------

    @property
    def mean_threshold(self) -> dict[int, float]:
        parts = (
            {
                column: self._threshold_weight(k, c) * d.rate_per_s / self.tokens_per_s
                for column, c in self.committing[k]
            }
            for k, d in enumerate(self.demands)
        )
        return total(*parts)

    def class_threshold(self, k: int) -> dict[int, float]:
        output_tokens = self.demands[k].output_tokens
        return {column: self._threshold_weight(k, c) / output_tokens for column, c in self.committing[k]}

    @property
    def minus_latency(self) -> dict[int, float]:
        """Less is worse: minus the mean latency in seconds."""
        return total(
            *(scaled(self.latency(k), -d.rate_per_s / self.requests_per_s) for k, d in enumerate(self.demands))
        )

    def latency(self, k: int) -> dict[int, float]:
        """Seconds of a request of class k."""
        return {column: option.seconds for option, column in self.steps[k].items()}

    def load(self, degree: int) -> dict[int, float]:
        """Instance-seconds a second at a degree."""
        return {
            column: d.rate_per_s * option.instance_s
            for d, steps in zip(self.demands, self.steps, strict=True)
            for option, column in steps.items()
            if option.tp_degree == degree
        }

    def _threshold_weight(self, k: int, c: int) -> float:
        """Tokens of a step of class k at threshold c, times the threshold."""
        return self.problem.thresholds[c].threshold * self.demands[k].tokens_per_step[c]

    # --- columns and rows -------------------------------------------------------------------------------------

    def _instances_column(self, degree: int, layout: Layout | None) -> int:
        if layout is None:
            return self.model.column(0, self.most[degree], integer=True)
        return self.model.column(layout.get(degree, 0), layout.get(degree, 0))

    def _add_steps(self, layout: Layout | None, batches: Batches | None, elastic: bool) -> None:
        for d in self.demands:
            options = [o for o in d.options if _is_open(o, layout, batches)]
            self.steps.append({option: self.model.column() for option in options})
            self.committing.append([])
            if self.caching:
                self._commit_by_degree(d)
            else:
                self._commit(d, list(self.steps[-1].values()), d.output_tokens)
            self._keep_promise(d, elastic)
            self._limit_to_instances(d)
        if batches is None and not self.time_sharing:
            self._add_batches(elastic)

    def _commit(self, d: Demand, steps: list[int], tokens: float | Terms) -> None:
        """Rows: these steps, at whatever thresholds, commit that many tokens (a number, or linear terms)."""
        columns = [(self.model.column(), c) for c in range(len(d.tokens_per_step))]
        self.committing[-1] += columns
        committed = {column: d.tokens_per_step[c] for column, c in columns}
        if isinstance(tokens, Mapping):
            self.model.equal(total(committed, scaled(tokens, -1)), 0)
        else:
            self.model.equal(committed, tokens)
        self.model.equal(total({column: 1.0 for column, _ in columns}, dict.fromkeys(steps, -1.0)), 0)

    def _commit_by_degree(self, d: Demand) -> None:
        """Rule 4."""
        steps = self.steps[-1]
        recomputes = [column for option, column in steps.items() if option.kind == "recompute"]
        self.model.equal(dict.fromkeys(recomputes, 1.0), d.blocks)
        for degree in {option.tp_degree: None for option in steps}:
            here = {option: column for option, column in steps.items() if option.tp_degree == degree}
            starts = [column for option, column in here.items() if option.kind == "recompute"]
            self._commit(d, list(here.values()), dict.fromkeys(starts, d.output_tokens / d.blocks))

    def _keep_promise(self, d: Demand, elastic: bool) -> None:
        late = self.model.column() if elastic else None
        if late is not None:
            self.late_s.append(late)
        if d.slo_s is None:
            return
        latency = {column: option.seconds for option, column in self.steps[-1].items()}
        self.model.row(total(latency, {late: -1.0} if late is not None else {}), upper=d.slo_s)

    def _limit_to_instances(self, d: Demand) -> None:
        """No steps where there is no instance: stability alone would let through what rounding leaves."""
        for kind in kinds(self.caching):
            most_steps = d.steps_of(kind, d.most_steps, self.caching)
            for degree, instances in self.instances.items():
                here = [
                    column
                    for option, column in self.steps[-1].items()
                    if (option.kind, option.tp_degree) == (kind, degree)
                ]
                if here:
                    self.model.row({**dict.fromkeys(here, 1.0), instances: -most_steps}, upper=0)

    def _add_batches(self, elastic: bool) -> None:
        """One batch size a degree and kind; steps in others there are none."""
        loads: dict[tuple[StepKind, int, int], dict[int, float]] = {}
        for d, steps in zip(self.demands, self.steps, strict=True):
            for option, column in steps.items():
                key = option.kind, option.tp_degree, option.batch_tokens
                if key not in self.chosen:
                    self.chosen[key] = self.model.column(0, 1, integer=True)
                most_steps = self._most_steps(d, option, elastic)
                self.model.row({column: 1.0, self.chosen[key]: -most_steps}, upper=0)
                loads.setdefault(key, {})[column] = d.rate_per_s * option.instance_s
        for chosen in self._chosen_by_degree().values():
            self.model.equal(dict.fromkeys(chosen, 1.0), 1)
        for key, load in loads.items():  # follows from stability and the rows above, but tells the solver earlier
            room = self.problem.planning.max_utilisation * self.most[key[1]]
            self.model.row({**load, self.chosen[key]: -room}, upper=0)

    def _chosen_by_degree(self) -> dict[tuple[StepKind, int], list[int]]:
        columns: dict[tuple[StepKind, int], list[int]] = {}
        for (kind, degree, _), column in self.chosen.items():
            columns.setdefault((kind, degree), []).append(column)
        return columns

    def _most_steps(self, d: Demand, option: Option, elastic: bool) -> float:
        """Of a request, by this option: a tight limit lets the solver cut."""
        limits = [d.steps_of(option.kind, d.most_steps, self.caching)]
        if d.slo_s is not None and not elastic and option.seconds > 0:
            limits.append(d.slo_s / option.seconds)
        if option.instance_s > 0:
            room = self.problem.planning.max_utilisation * self.most[option.tp_degree]
            limits.append(room / (d.rate_per_s * option.instance_s))
        return min(limits)

    def _add_stability(self) -> None:
        for degree, instances in self.instances.items():
            room = {instances: -self.problem.planning.max_utilisation}
            self.model.row(total(self.load(degree), room), upper=0)

    def _add_packing(self) -> None:
        add_packing(self.model, self.problem, self.instances)


def _is_open(option: Option, layout: Layout | None, batches: Batches | None) -> bool:
    if layout is not None and not layout.get(option.tp_degree):
        return False
    return batches is None or batches.get((option.kind, option.tp_degree)) == option.batch_tokens


def add_packing(model: Model, problem: Problem, instances: Mapping[int, int]) -> None:
    """Rows: instances (by degree, columns) fit on the nodes (rule 5)."""
    if all(larger % degree == 0 for degree, larger in pairwise(sorted(instances))):
        for degree in instances:
            held = {column: float(larger) for larger, column in instances.items() if larger >= degree}
            model.row(held, upper=degree * most_instances(problem, degree))
        return
    placed: dict[int, dict[int, float]] = {degree: {column: 1.0} for degree, column in instances.items()}
    for size, nodes in sorted(Counter(len(node.devices) for node in problem.nodes).items()):
        ways = {pattern: model.column(0, nodes, integer=True) for pattern in patterns(size, tuple(sorted(instances)))}
        model.row(dict.fromkeys(ways.values(), 1.0), upper=nodes)
        for pattern, column in ways.items():
            for degree, count in zip(sorted(instances), pattern, strict=True):
                placed[degree][column] = -float(count)
    for terms in placed.values():
        model.row(terms, upper=0)


def patterns(size: int, degrees: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every number of instances of each degree that fits on a node of that many devices."""
    if not degrees:
        yield ()
        return
    for count in range(size // degrees[0] + 1):
        for others in patterns(size - count * degrees[0], degrees[1:]):
            yield (count, *others)


class _Stage1:
    """The solves, one after the other, within one time limit."""

    def __init__(self, problem: Problem, demands: tuple[Demand, ...], solver: Solver, time_limit_s: float) -> None:
        self._problem = problem
        self._demands = demands
        self._solver = solver
        self._deadline = time.monotonic() + time_limit_s
        self._solvers: dict[str, None] = {}

    def best_layout(self) -> Capacity:
        best = self._best()
        if not isinstance(best, _Reached):
            return self._nothing(best)
        layout = _rounded(best.use.program.instances, best.use.solution)
        used = self._again(best.use, layout)
        return self._answer(self._spread(layout, used), used, best.gap)

    def best_use_of(self, layout: Layout) -> Capacity:
        best = self._best(layout)
        if not isinstance(best, _Reached):
            return self._nothing(best)
        return self._answer(layout, self._again(best.use, layout), best.gap)

    def broken_promises(self) -> tuple[str, ...] | None:
        program = _Program(self._problem, self._demands, elastic=True)
        late = {
            column: -(2.0 ** max(-20, min(20, d.priority))) / d.slo_s
            for d, column in zip(self._demands, program.late_s, strict=True)
            if d.slo_s is not None
        }
        solution = self._solve(program.model, late)
        if not solution.found:
            return None if solution.status == "infeasible" else ()
        return tuple(
            d.name
            for d, column in sorted(zip(self._demands, program.late_s, strict=True), key=lambda pair: pair[0].priority)
            if d.slo_s is not None and solution.values[column] > _MARGIN * d.slo_s
        )

    def _solve(self, model: Model, objective: Terms, share: float = 1.0) -> Solution:
        """With a share of the time that is left."""
        solution = self._solver.solve(model, objective, share * (self._deadline - time.monotonic()))
        self._solvers[solution.solver] = None
        return solution

    def _best(self, layout: Layout | None = None) -> "_Reached | Status":
        """Rules 1 and 7."""
        program = _Program(self._problem, self._demands, layout=layout)
        if program.time_sharing:
            return self._in_order(program)
        bound = self._in_order(self._relaxed(layout))
        if not isinstance(bound, _Reached):
            return bound
        guess = self._in_order(_Program(self._problem, self._demands, layout, batches=_most_used(bound.use)))
        if not isinstance(guess, _Reached):
            return self._in_order(program)
        if guess.threshold < bound.threshold - _SETTLED:
            return _better(self._in_order(program), guess, bound)
        program.model.row(program.minus_latency, lower=guess.minus_latency - _SLACK)  # what is slower need not be tried
        return _better(self._in_order(program, threshold=guess.threshold), guess, bound)

    def _relaxed(self, layout: Layout | None) -> _Program:
        """No layout is better than what this linear program reaches."""
        program = _Program(self._problem, self._demands, layout=layout, time_sharing=True)
        program.model.integer = [False] * len(program.model.integer)
        return program

    def _in_order(self, program: _Program, threshold: float | None = None) -> "_Reached | Status":
        """Threshold first, unless it is known; then latency."""
        first = None
        if threshold is None:
            first = self._solve(program.model, program.mean_threshold, share=0.5)
            if not first.found:
                return first.status
            threshold = first.objective
        tolerance = max(_SLACK, self._problem.planning.threshold_tolerance)
        program.model.row(program.mean_threshold, lower=threshold - tolerance)
        second = self._solve(program.model, program.minus_latency)
        best = second if second.found else first
        if best is None:
            return "none"
        gap = max(solution.gap for solution in (first, second) if solution is not None and solution.found)
        return _Reached(threshold, gap if second.found else math.inf, _Use(program, best))

    def _again(self, use: "_Use", layout: Layout) -> "_Use":
        """The steps once more, with layout and batches fixed (rule 6); or as they are, should rounding forbid it."""
        if use.program.time_sharing:
            return use
        fixed = _Program(self._problem, self._demands, layout=layout, batches=use.batches)
        reached = value_of(use.program.mean_threshold, use.solution.values)
        fixed.model.row(fixed.mean_threshold, lower=reached - _SLACK)
        again = self._solver.solve(fixed.model, fixed.minus_latency, max(1.0, self._deadline - time.monotonic()))
        return _Use(fixed, again) if again.found else use

    def _spread(self, layout: Layout, used: "_Use") -> Layout:
        """The layout that loads its busiest degree least, for these loads; then without devices left over; then as
        today."""
        loads = {degree: used.load(degree) for degree in layout}
        heaviest = max(loads.values(), default=0.0)
        if heaviest <= 0:
            return layout
        model = Model()
        columns = {
            degree: model.column(1 if loads.get(degree, 0.0) > 0 else 0, most, integer=True)
            for degree, most in used.program.most.items()
        }
        add_packing(model, self._problem, columns)
        shares = {degree: load / heaviest for degree, load in loads.items() if load > 0}
        so_far = min(layout[degree] / share for degree, share in shares.items())
        idleness = model.column((1 - _SLACK) * so_far)  # instances to the load of the heaviest: no fewer than before
        for degree, share in shares.items():
            model.row({columns[degree]: 1.0, idleness: -share}, lower=0)
        first = self._solve(model, {idleness: 1.0})
        if not first.found:
            return layout
        model.row({idleness: 1.0}, lower=first.objective - _SLACK)
        second = self._solve(model, self._filling(model, columns))
        return _rounded(columns, second if second.found else first)

    def _filling(self, model: Model, columns: Mapping[int, int]) -> dict[int, float]:
        """Objective: devices in use, and then instances of degrees as they are today."""
        more_than_all = 1.0 + len(self._problem.today)
        objective = {column: more_than_all * degree for degree, column in columns.items()}
        for degree, count in self._problem.layout_today.items():
            if degree in columns:
                alike = model.column(0, count)
                model.row({alike: 1.0, columns[degree]: -1.0}, upper=0)
                objective[alike] = 1.0
        return objective

    def _nothing(self, status: Status) -> Capacity:
        return Capacity(status, {}, None, math.inf, "+".join(self._solvers))

    def _answer(self, layout: Layout, used: "_Use", gap: float) -> Capacity:
        status: Status = "optimal" if gap <= _MARGIN else "feasible"
        return Capacity(status, layout, used.figures(layout), gap, "+".join(self._solvers))


class _Use(NamedTuple):
    """How a layout is used: a point of a program."""

    program: _Program
    solution: Solution

    @property
    def batches(self) -> Batches:
        """That the point has chosen, or that its program was given."""
        if self.program.batches is not None:
            return self.program.batches
        return {
            (kind, degree): batch_tokens
            for (kind, degree, batch_tokens), column in self.program.chosen.items()
            if self.solution.values[column] > 0.5
        }

    def load(self, degree: int) -> float:
        return max(0.0, value_of(self.program.load(degree), self.solution.values))

    def figures(self, layout: Layout) -> Figures:
        program, values = self.program, self.solution.values
        degrees = tuple(
            DegreeFigures(
                tp_degree=degree, instances=count, load=self.load(degree), batch_tokens=self._batch_tokens(degree)
            )
            for degree, count in layout.items()
        )
        return Figures(
            mean_threshold=value_of(program.mean_threshold, values),
            mean_latency_s=-value_of(program.minus_latency, values),
            busiest=max((degree.utilisation for degree in degrees), default=0.0),
            classes=tuple(self._class_figures(k, d) for k, d in enumerate(program.demands)),
            degrees=degrees,
        )

    def _class_figures(self, k: int, d: Demand) -> ClassFigures:
        program, values = self.program, self.solution.values
        steps: dict[int, float] = {}
        for option, column in program.steps[k].items():
            if values[column] > _NO_STEPS:
                steps[option.tp_degree] = steps.get(option.tp_degree, 0.0) + values[column]
        return ClassFigures(
            name=d.name,
            mean_threshold=value_of(program.class_threshold(k), values),
            latency_s=value_of(program.latency(k), values),
            slo_s=d.slo_s,
            share_by_degree={degree: count / sum(steps.values()) for degree, count in sorted(steps.items())},
        )

    def _batch_tokens(self, degree: int) -> dict[StepKind, int]:
        used: dict[StepKind, Counter[int]] = {}
        for d, steps in zip(self.program.demands, self.program.steps, strict=True):
            for option, column in steps.items():
                count = d.rate_per_s * self.solution.values[column]
                if option.tp_degree == degree and self.solution.values[column] > _NO_STEPS:
                    used.setdefault(option.kind, Counter())[option.batch_tokens] += count  # type: ignore[assignment]
        return {kind: counts.most_common(1)[0][0] for kind, counts in used.items()}


def _rounded(columns: Mapping[int, int], solution: Solution) -> Layout:
    counts = {degree: round(solution.values[column]) for degree, column in sorted(columns.items())}
    return {degree: count for degree, count in counts.items() if count}


def _most_used(use: _Use) -> Batches:
    """Of each degree and kind the batch with most of the load; the largest where there is none."""
    loads: dict[tuple[StepKind, int], dict[int, float]] = {}
    for d, steps in zip(use.program.demands, use.program.steps, strict=True):
        for option, column in steps.items():
            load = d.rate_per_s * option.instance_s * use.solution.values[column]
            of_batches = loads.setdefault((option.kind, option.tp_degree), {})
            of_batches[option.batch_tokens] = of_batches.get(option.batch_tokens, 0.0) + load
    return {key: max(of, key=lambda batch: (of[batch], batch)) for key, of in loads.items()}


class _Reached(NamedTuple):
    """The best point of a program."""

    threshold: float  # the highest; the point's own may be lower by what is given away
    gap: float
    use: _Use

    @property
    def minus_latency(self) -> float:
        return value_of(self.use.program.minus_latency, self.use.solution.values)


def _better(found: _Reached | Status, guess: _Reached, bound: _Reached) -> _Reached:
    """The guess, where time was too short for more; then with its distance from the bound."""
    if isinstance(found, _Reached):
        if found.gap <= _MARGIN or guess.threshold < found.threshold - _SETTLED:
            return found
        if found.minus_latency >= guess.minus_latency:
            return found._replace(gap=min(found.gap, _distance(found, bound)))
    return guess._replace(gap=max(2 * _MARGIN, _distance(guess, bound)))


def _distance(reached: _Reached, bound: _Reached) -> float:
    """Relative, of threshold or latency."""
    in_threshold = bound.threshold / reached.threshold - 1 if reached.threshold else 0.0
    in_latency = 1 - bound.minus_latency / reached.minus_latency if reached.minus_latency else 0.0
    return max(0.0, in_threshold, in_latency)
