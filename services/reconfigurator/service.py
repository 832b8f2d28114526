"""The reconfigurator's I/O around its policy and the rollout.

1. Of several, the one that holds the lease acts. One that has lost it ends with exit code 3.
2. The stored plan is what counts: everything is done to the last one that was read, by compare-and-set. A write that
   another one was ahead of, or whose answer is lost, is not repeated: what then stands is read, and looked at anew.
3. One task does everything, one thing after the other: it drops nodes that are silent, brings a rollout on, adopts
   nodes that have come, and asks the policy. The planner alone runs beside it, on a thread of its own.
4. Before it has listened for `node_silent_s` no node is taken for silent.
5. A plan that cannot be read is replaced by one that adopts what runs.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from contracts import messages as m
from contracts import subjects
from contracts.codec import MalformedMessage
from services.bus import BusTimeout, Follower, SequenceConflict, StreamFull
from services.costs import DegreeProfile, read_latency_file
from services.lease import Lease
from services.profile import Profile, load_profile
from services.reconfigurator import report
from services.reconfigurator.cluster import is_busy, places_of, problem_of
from services.reconfigurator.config import ReconfiguratorConfig
from services.reconfigurator.planning import plan as make_plan
from services.reconfigurator.policy import (
    Adopt,
    Event,
    Keep,
    MakePlan,
    PlanFailed,
    PlanMade,
    ProblemSeen,
    Reconfigurator,
    RolloutSeen,
    Tick,
    WakeAt,
)
from services.reconfigurator.problem import Problem
from services.reconfigurator.rollout import adopt, advance, begin, change
from services.runtime import Runtime, new_id

logger = logging.getLogger(__name__)

DECISIONS = Counter("tediserve_reconfigurator_decisions", "Plans that were made, by what came of them", ["reason"])
PLANNING_S = Histogram(
    "tediserve_reconfigurator_planning_seconds", "Both stages", buckets=(0.03, 0.1, 0.3, 1, 2, 5, 10, 20)
)
WRITES = Counter("tediserve_reconfigurator_plan_writes", "Plans stored, or not", ["outcome"])
CHANGES = Counter("tediserve_reconfigurator_plan_changes", "Changes of the layout, by how far they came", ["outcome"])
WANTED = Gauge("tediserve_reconfigurator_instances", "Instances that the plan wants", ["tp_degree"])
ROLLING_OUT = Gauge("tediserve_reconfigurator_rollout", "1 while the layout changes")
FAILURES = Gauge("tediserve_reconfigurator_failed_launches", "In a row")

_STORE_LIMIT_S = 2.0
_BEAT_S = 0.5
_LEASE_TTL_S = 3  # nothing waits for a layout: rather that than one that a busy machine makes lose it


def make_serve(config: ReconfiguratorConfig) -> Callable[[Runtime], Awaitable[None]]:
    """The service with its profile read. Raises ConfigError."""
    profile = load_profile(Path(config.profile))
    degrees = read_latency_file(profile.latency_file).degrees

    async def serve(runtime: Runtime) -> None:
        lease = Lease(runtime.bus, new_id("reconf"), subjects.RECONFIGURATOR_LEASE_KEY, _LEASE_TTL_S)
        logger.info("waiting for the lease")
        if not await lease.acquire_unless(runtime.stopping):
            return
        logger.info("acting, term %d", lease.epoch)
        runtime.spawn(lease.keep_or_stop(), name="lease")
        runtime.spawn(ReconfiguratorService(runtime, config, profile, degrees).run(), name="reconfigurator")
        await runtime.until_stopped()
        await runtime.cancel_tasks()
        await lease.give_up()

    return serve


class ReconfiguratorService:
    """Follows the plan and the workload, hears the nodes, and acts."""

    def __init__(
        self, runtime: Runtime, config: ReconfiguratorConfig, profile: Profile, degrees: tuple[DegreeProfile, ...]
    ) -> None:
        self._runtime, self._bus, self._config = runtime, runtime.bus, config
        self._profile, self._degrees = profile, degrees
        self._loop = asyncio.get_running_loop()
        self._policy = Reconfigurator(config.period_s, config.soon_s, config.stay_periods)
        self._listens_since = self._loop.time()
        self._changed = asyncio.Event()
        self._nodes: dict[str, m.NodeStatus] = {}
        self._heard_at: dict[str, float] = {}
        self._snapshot: m.WorkloadSnapshot | None = None
        self._plan: m.ClusterPlan | None = None  # None: there is none that can be read
        self._plan_seq = 0
        self._busy: bool | None = None  # as the policy was told
        self._problem_key: object = None  # of the problem that the policy was told
        self._said_stale = False
        self._answers: list[PlanMade | PlanFailed] = []  # of the planner

    async def run(self) -> None:
        """Raises BusTimeout where the bucket cannot be read."""
        self._bus.on_reconnected(self._listen_anew)
        await self._bus.subscribe("status.node.*", m.NodeStatus, self._on_node)
        await self._follow(subjects.WORKLOAD, m.WorkloadSnapshot, self._on_snapshot)
        await self._follow(subjects.PLAN, m.ClusterPlan, self._on_plan, self._on_malformed_plan)
        await self._bus.publish(subjects.STATUS_ASK, m.StatusAsk())
        while True:
            await self._act()
            try:
                await asyncio.wait_for(self._changed.wait(), _BEAT_S)
            except TimeoutError:
                continue
            finally:
                self._changed.clear()

    async def _follow(
        self,
        subject: str,
        wanted: type[Any],
        handler: Callable[[Any, int], None],
        on_malformed: Callable[[str, int], None] | None = None,
    ) -> None:
        follower: Follower = await self._bus.follow(
            subjects.CLUSTER_STREAM, subject, wanted, handler, on_malformed=on_malformed
        )
        try:
            await follower.caught_up()
        except TimeoutError:
            raise BusTimeout(f"{subject} could not be read") from None

    # --- what is heard --------------------------------------------------------------------------------------------

    def _listen_anew(self) -> None:
        """Nobody could be heard during the cut."""
        self._listens_since = self._loop.time()
        self._heard_at = dict.fromkeys(self._heard_at, self._listens_since)
        self._changed.set()

    def _on_node(self, status: m.NodeStatus) -> None:
        known = self._nodes.get(status.node_id)
        self._nodes[status.node_id], self._heard_at[status.node_id] = status, self._loop.time()
        if known is None or known.instances != status.instances:
            self._changed.set()

    def _on_snapshot(self, snapshot: m.WorkloadSnapshot, _: int) -> None:
        self._snapshot = snapshot
        self._changed.set()

    def _on_plan(self, plan: m.ClusterPlan, seq: int) -> None:
        if seq > self._plan_seq:
            self._take(plan, seq)
            self._changed.set()

    def _on_malformed_plan(self, _: str, seq: int) -> None:
        self._plan, self._plan_seq = None, seq
        self._changed.set()

    def _take(self, plan: m.ClusterPlan, seq: int) -> None:
        if outcome := change(self._plan, plan):
            CHANGES.labels(outcome).inc()
        self._plan, self._plan_seq = plan, seq
        degrees = [instance.tp_degree for node in plan.nodes for instance in node.instances]
        WANTED.clear()
        for degree in sorted(set(degrees)):
            WANTED.labels(str(degree)).set(degrees.count(degree))
        ROLLING_OUT.set(plan.rollout is not None)
        FAILURES.set(plan.failures)

    # --- what is done ---------------------------------------------------------------------------------------------

    @property
    def _settled(self) -> bool:
        """Rule 4."""
        return self._loop.time() - self._listens_since >= self._config.node_silent_s

    async def _act(self) -> None:
        now = self._loop.time()
        for node_id, heard_at in list(self._heard_at.items()):
            if self._bus.connected and now - heard_at > self._config.node_silent_s:
                logger.warning("node %s is silent", node_id)
                del self._nodes[node_id], self._heard_at[node_id]
        while (after := self._next_plan()) is not None and await self._store(after):
            pass
        await self._consult()

    def _next_plan(self) -> m.ClusterPlan | None:
        """By rollout or adoption."""
        plan, wall = self._plan, time.time()
        if plan is not None and plan.rollout is not None:
            limit_s = self._config.launch_limit_s
            return advance(plan, self._nodes, wall, launch_limit_s=limit_s, settled=self._settled)
        if not any(node.planned for node in self._nodes.values()):
            return None
        return adopt(self._nodes.values(), wall, plan)

    async def _store(self, plan: m.ClusterPlan) -> bool:
        """Rule 2. False: it may not be what stands."""
        try:
            seq = await self._bus.append(subjects.PLAN, plan, after_seq=self._plan_seq, limit_s=_STORE_LIMIT_S)
        except (SequenceConflict, BusTimeout, StreamFull) as error:
            WRITES.labels(type(error).__name__).inc()
            logger.warning("plan %d is not stored: %s", plan.revision, error)
            await self._read_again()
            return False
        WRITES.labels("stored").inc()
        logger.log(logging.WARNING if plan.failures else logging.INFO, "plan %d: %s", plan.revision, plan.reason)
        self._take(plan, seq)
        return True

    async def _read_again(self) -> None:
        """Of what stands now, and of a wiped store, no message tells."""
        with contextlib.suppress(BusTimeout, MalformedMessage):
            found = await self._bus.last(subjects.CLUSTER_STREAM, subjects.PLAN, m.ClusterPlan)
            if found is None:
                self._plan, self._plan_seq = None, 0
            elif found.seq != self._plan_seq:
                self._take(found.message, found.seq)

    # --- the policy -----------------------------------------------------------------------------------------------

    async def _consult(self) -> None:
        """Tells it what has changed, and that time has passed."""
        if self._plan is None:
            return
        busy = is_busy(self._plan, time.time(), self._config.retry_pause_s)
        if busy != self._busy:
            self._busy = busy
            await self._tell(RolloutSeen(busy))
        answers, self._answers = self._answers, []
        for answer in answers:
            await self._tell(answer)
        if not busy and self._knows_the_workload():
            if problem := self._new_problem():
                await self._tell(ProblemSeen(problem))
            await self._tell(Tick())

    def _knows_the_workload(self) -> bool:
        if self._snapshot is None or self._snapshot.covered_s < self._config.min_covered_s:
            return False
        age_s = time.time() - self._snapshot.sent_at
        stale = age_s > self._config.snapshot_limit_s
        if stale and not self._said_stale:
            logger.warning("keeps today's layout: the last workload snapshot is %.0f s old", age_s)
        self._said_stale = stale
        return not stale

    def _new_problem(self) -> Problem | None:
        """None: it is as it was told, or there is none."""
        assert self._plan is not None
        assert self._snapshot is not None
        devices = {node_id: tuple(status.devices) for node_id, status in sorted(self._nodes.items()) if status.planned}
        key = (self._snapshot.sent_at, self._plan_seq, devices)
        if key == self._problem_key:
            return None
        self._problem_key = key
        try:
            return problem_of(
                self._profile,
                self._degrees,
                self._config.planning,
                snapshot=self._snapshot,
                plan=self._plan,
                nodes=self._nodes,
            )
        except ValueError as error:
            logger.error("nothing can be planned: %s", error)
            return None

    async def _tell(self, event: Event) -> None:
        for command in self._policy.handle(event, self._loop.time()):
            match command:
                case MakePlan():
                    self._runtime.spawn(self._make_plan(command.problem), name="planner")
                case Adopt():
                    assert isinstance(event, PlanMade)
                    await self._adopt(event, command)
                case Keep():
                    DECISIONS.labels(command.verdict.reason).inc()
                    logger.info("%s", _explain(event, command))
                case WakeAt():
                    pass  # it is told every _BEAT_S

    async def _make_plan(self, problem: Problem) -> None:
        try:
            made = await asyncio.to_thread(make_plan, problem)
            PLANNING_S.observe(made.seconds)
            self._answers.append(PlanMade(problem, made))
        except Exception as error:
            logger.exception("the planner has failed")
            self._answers.append(PlanFailed(f"the planner has failed: {error!r}"))
        self._changed.set()

    async def _adopt(self, event: PlanMade, command: Adopt) -> None:
        assert self._plan is not None
        DECISIONS.labels(command.verdict.reason).inc()
        reason = report.explain(event.problem, event.plan, command.verdict)
        try:
            after = begin(self._plan, places_of(event.plan, event.problem, self._plan), reason, time.time())
        except ValueError as error:
            logger.error("the plan cannot be carried out: %s", error)
            return
        await self._store(after)
        self._changed.set()


def _explain(event: Event, command: Keep) -> str:
    if isinstance(event, PlanMade) and command.verdict.reason != "outdated":
        return report.explain(event.problem, event.plan, command.verdict)
    return f"keep today's layout, {command.verdict.reason}: {command.verdict.because}"
