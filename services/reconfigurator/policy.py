"""When the layout changes.

1. A plan is made every `period_s`, and soon after a node has come or gone; never while one is being made or a rollout
   is under way.
2. A plan for a cluster that has changed since is dropped, and another is made soon.
3. Without requests, or without an answer in time, today's layout stays; so does one that is the plan's.
4. It is left where it cannot keep the promises or carry the load. It stays where it just can and the plan, which is
   made for more, could not.
5. It is left for a clear gain: a mean threshold higher by more than `min_gain`; or one no lower (but for what the
   planner may give away for latency) and a mean latency lower by at least `min_gain`.
6. It grows where nothing has to stop: every instance runs on, and others start on idle devices.
7. For lower latency alone it is not left in its first `stay_periods` periods: after a peak the next one may follow.
"""

import math
from typing import Literal

import msgspec

from services.reconfigurator.plan import Plan
from services.reconfigurator.problem import Problem

Reason = Literal[
    # keep
    "no_requests",
    "out_of_time",
    "same_layout",
    "no_clear_gain",
    "too_soon",
    "overload",  # so it is, and no other layout is known to do better
    "outdated",
    "failed",
    # change
    "nothing_runs",
    "today_infeasible",
    "threshold_gain",
    "latency_gain",
    "idle_devices",
]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a plan is to be carried out."""

    change: bool
    reason: Reason
    because: str


# --- events and commands ------------------------------------------------------------------------------------------


class ProblemSeen(msgspec.Struct, frozen=True):
    """The workload or the cluster has changed: what would have to be planned now."""

    problem: Problem


class PlanMade(msgspec.Struct, frozen=True):
    """The planner's answer to MakePlan."""

    problem: Problem
    plan: Plan


class PlanFailed(msgspec.Struct, frozen=True):
    """The planner has raised an error."""

    because: str


class RolloutSeen(msgspec.Struct, frozen=True):
    """A rollout has begun or ended."""

    under_way: bool


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class MakePlan(msgspec.Struct, frozen=True):
    """Solve it, off the event loop; answer with PlanMade or PlanFailed."""

    problem: Problem


class Adopt(msgspec.Struct, frozen=True):
    """The plan becomes the cluster's desired state."""

    plan: Plan
    verdict: Verdict


class Keep(msgspec.Struct, frozen=True):
    """Today's layout stays. For the log."""

    verdict: Verdict


class WakeAt(msgspec.Struct, frozen=True):
    """Send a Tick then."""

    at: float


Event = ProblemSeen | PlanMade | PlanFailed | RolloutSeen | Tick
Command = MakePlan | Adopt | Keep | WakeAt


# --- decisions ----------------------------------------------------------------------------------------------------


def judge(problem: Problem, plan: Plan) -> Verdict:
    """Whether to leave today's layout for a plan's (rules 3 to 6)."""
    if plan.outcome in ("no_requests", "out_of_time"):
        return _keep("no_requests" if plan.outcome == "no_requests" else "out_of_time", plan.because)
    if plan.layout == problem.layout_today:
        return _keep("same_layout", "today's layout is the plan's")
    if not problem.today:
        return _change("nothing_runs", "no instance runs")
    if not plan.today_is_known:
        return _keep("out_of_time", "time ran out before it was known what today's layout could do")
    if plan.today is None:
        return _change("today_infeasible", "today's layout cannot keep the promises or carry the load")
    if plan.outcome != "planned" or plan.figures is None:
        return _keep("overload", f"today's layout just carries the load; {plan.because}")
    return _compare(problem, plan)


def _compare(problem: Problem, plan: Plan) -> Verdict:
    """Rules 5 and 6."""
    new, today = plan.figures, plan.today
    assert new is not None, "a plan that was found has figures"
    assert today is not None, "today's layout could do something"
    gain, tolerance = problem.planning.min_gain, problem.planning.threshold_tolerance
    figures = (
        f"mean threshold {today.mean_threshold:.3f} -> {new.mean_threshold:.3f}, "
        f"mean latency {today.mean_latency_s:.2f} -> {new.mean_latency_s:.2f} s"
    )
    if new.mean_threshold > (1 + gain) * today.mean_threshold:
        return _change("threshold_gain", figures)
    if new.mean_threshold >= today.mean_threshold - tolerance and _is_faster(
        new.mean_latency_s, today.mean_latency_s, gain
    ):
        return _change("latency_gain", figures)
    if plan.kept == len(problem.today):
        return _change("idle_devices", f"nothing has to stop for it; {figures}")
    return _keep("no_clear_gain", figures)


def _is_faster(new_s: float, today_s: float, gain: float) -> bool:
    return new_s <= (1 - gain) * today_s


def _keep(reason: Reason, because: str) -> Verdict:
    return Verdict(change=False, reason=reason, because=because)


def _change(reason: Reason, because: str) -> Verdict:
    return Verdict(change=True, reason=reason, because=because)


class Reconfigurator:
    """Asks for plans and decides on them (rules 1, 2 and 7)."""

    def __init__(self, period_s: float, soon_s: float = 5.0, stay_periods: int = 6) -> None:
        self._period_s = period_s
        self._soon_s = soon_s
        self._stay_s = stay_periods * period_s
        self._leave_at = -math.inf  # for lower latency, not before
        self._problem: Problem | None = None
        self._due_at: float | None = None  # none: until a problem is known
        self._is_planning = False
        self._is_rolling_out = False

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case ProblemSeen():
                return self._note(event.problem, now)
            case PlanMade():
                self._is_planning = False
                return self._decide(event, now)
            case PlanFailed():
                self._is_planning = False
                return [Keep(_keep("failed", event.because)), *self._wake()]
            case RolloutSeen():
                self._is_rolling_out = event.under_way
                return self._ask(now)
            case Tick():
                return self._ask(now)

    def _note(self, problem: Problem, now: float) -> list[Command]:
        """Rule 1: soon, where nodes have changed."""
        before, self._problem = self._problem, problem
        if before is None or self._due_at is None:
            self._due_at = now + self._period_s
        elif before.nodes != problem.nodes:
            self._due_at = min(self._due_at, now + self._soon_s)
        else:
            return self._ask(now)
        return self._ask(now) or self._wake()

    def _ask(self, now: float) -> list[Command]:
        if self._problem is None or self._due_at is None or now < self._due_at:
            return []
        if self._is_planning or self._is_rolling_out:
            return []
        self._is_planning = True
        self._due_at = now + self._period_s
        return [MakePlan(self._problem), *self._wake()]

    def _decide(self, event: PlanMade, now: float) -> list[Command]:
        assert self._problem is not None, "a plan follows a problem"
        assert self._due_at is not None, "a problem makes a plan due"
        if self._is_rolling_out or _cluster(event.problem) != _cluster(self._problem):
            self._due_at = min(self._due_at, now + self._soon_s)
            return [Keep(_keep("outdated", "the cluster has changed since the plan was asked for")), *self._wake()]
        verdict = judge(event.problem, event.plan)
        if verdict.reason == "latency_gain" and now < self._leave_at:
            verdict = _keep("too_soon", f"the layout has changed within the last {self._stay_s:g} s; {verdict.because}")
        if not verdict.change:
            return [Keep(verdict), *self._ask(now)]
        self._leave_at = now + self._stay_s
        return [Adopt(event.plan, verdict), *self._ask(now)]

    def _wake(self) -> list[Command]:
        return [] if self._due_at is None else [WakeAt(self._due_at)]


def _cluster(problem: Problem) -> object:
    """What a placement depends on."""
    return problem.nodes, sorted(problem.today, key=lambda instance: instance.instance_id)
