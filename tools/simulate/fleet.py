"""Instances that come and go: nodes with the live agent's policy, and, where the layout follows the load, the live
workload-monitor's and reconfigurator's, with the real planner.

1. A launch takes `launch_s` from its agent's order until the instance says that it is there; those that run at the
   beginning have been launched before. Who is stopped drains, as `Instance` does.
2. Each second the agents say what they run, and the reconfigurator looks at plan, nodes and workload, as its service
   does. It alone writes the plan, and agents hear of it at once: what may go wrong there is not modelled.
3. A plan takes `plan_s`. It depends on no clock: the planner may take the time that it takes. What was planned in this
   process before, for another system, is not planned again.
4. At each time of `losses` an instance dies: the one that holds most requests; ties: the lowest id. Its agent sees it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from contracts import messages as m
from services.costs import DegreeProfile, LatencyProfile
from services.denoiser import agent_policy as a
from services.profile import Profile
from services.reconfigurator import policy as r
from services.reconfigurator.cluster import is_busy, places_of, problem_of
from services.reconfigurator.config import ReconfiguratorConfig
from services.reconfigurator.plan import Layout, Plan
from services.reconfigurator.planning import plan as make_plan
from services.reconfigurator.problem import Problem
from services.reconfigurator.rollout import adopt, advance, begin
from services.settings import ConfigError
from services.workload_monitor.config import WorkloadMonitorConfig
from services.workload_monitor.policy import RequestSeen, SnapshotDue, WorkloadMonitor
from tools.simulate.clock import Clock
from tools.simulate.instance import Instance

_BEAT_S = 1.0
_PLANNER_LIMIT_S = 600.0  # rule 3: reached on no machine that anybody has


class FleetSetting(NamedTuple):
    """The nodes, and who decides what runs on them."""

    nodes: int = 4
    devices: int = 4  # of each
    launch_s: float = 150.0
    plan_s: float = 2.0
    losses: tuple[float, ...] = ()  # seconds
    reconfigurator: ReconfiguratorConfig | None = None  # None: the layout stays
    monitor: WorkloadMonitorConfig = WorkloadMonitorConfig()

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices


class Change(NamedTuple):
    """What runs from that time on."""

    at: float
    layout: Layout


class Decision(NamedTuple):
    """What came of a plan."""

    at: float
    reason: str
    wanted: Layout  # the plan's


def layout_text(layout: Layout) -> str:
    """For people: "8 x TP-1, 2 x TP-4"."""
    return ", ".join(f"{count} x TP-{degree}" for degree, count in layout.items()) or "none"


class Ground(Protocol):
    """The cluster around it."""

    clock: Clock

    def start(self, instance_id: str, tp_degree: int) -> Instance: ...

    def end(self, instance: Instance) -> None: ...

    def announce_lost(self, instance_id: str) -> None: ...


class Fleet:
    """All nodes. `begin` it once."""

    def __init__(
        self,
        ground: Ground,
        setting: FleetSetting,
        tp_degrees: Sequence[int],
        profile: Profile,
        latency: LatencyProfile,
    ) -> None:
        """Raises ConfigError where the instances do not fit on the nodes."""
        self.setting, self.tp_degrees = setting, tp_degrees
        self.changes: list[Change] = []
        self._ground = ground
        planned = setting.reconfigurator is not None
        self.nodes = [
            _Node(node_id, self, slots, setting.devices, planned) for node_id, slots in _spread(setting, tp_degrees)
        ]
        self.layouts = _Layouts(self, setting, profile, latency) if planned else None

    @property
    def ground(self) -> Ground:
        return self._ground

    @property
    def decisions(self) -> list[Decision]:
        return [] if self.layouts is None else self.layouts.decisions

    def begin(self) -> None:
        for node in self.nodes:
            node.begin()
        for at in self.setting.losses:
            self._ground.clock.at(at, self._lose_one)
        if self.layouts is not None:
            self.layouts.begin()

    def hear_request(self, request: m.GenerateRequest) -> None:
        if self.layouts is not None:
            self.layouts.hear_request(request)

    def note_exit(self, instance: Instance, detail: str) -> None:
        """It has gone by itself."""
        for node in self.nodes:
            node.note_exit(instance, detail)

    def note_change(self) -> None:
        counts = Counter(one.settings.tp_degree for node in self.nodes for one in node.running.values())
        layout = dict(sorted(counts.items()))
        at = round(self._ground.clock.now, 6)
        if self.changes and self.changes[-1].at == at:
            self.changes.pop()
        if not self.changes or self.changes[-1].layout != layout:
            self.changes.append(Change(at, layout))

    def _lose_one(self) -> None:
        running = [(instance, node) for node in self.nodes for instance in node.running.values()]
        if running:
            instance, node = min(running, key=lambda pair: (-pair[0].num_held, pair[0].id))
            node.kill(instance, "lost")


def _spread(setting: FleetSetting, tp_degrees: Sequence[int]) -> list[tuple[str, list[m.PlannedInstance]]]:
    """The instances on the nodes, the largest first, each on the first node with room. Raises ConfigError."""
    nodes: list[tuple[str, list[m.PlannedInstance]]] = [(f"n{number}", []) for number in range(setting.nodes)]
    used = [0] * setting.nodes
    for degree in sorted(tp_degrees, reverse=True):
        number = next((n for n in range(setting.nodes) if used[n] + degree <= setting.devices), None)
        if number is None:
            raise ConfigError(
                f"{len(tp_degrees)} instances of TP degrees {sorted(set(tp_degrees))} do not fit on "
                f"{setting.nodes} nodes of {setting.devices} devices"
            )
        node_id, slots = nodes[number]
        devices = list(range(used[number], used[number] + degree))
        slots.append(m.PlannedInstance(slot_id=f"{node_id}-{len(slots)}", tp_degree=degree, devices=devices))
        used[number] += degree
    return nodes


# --- a node -------------------------------------------------------------------------------------------------------


class _Node:
    """An agent and its processes (rule 1)."""

    def __init__(
        self, node_id: str, fleet: Fleet, configured: list[m.PlannedInstance], devices: int, planned: bool
    ) -> None:
        self.id = node_id
        self.running: dict[str, Instance] = {}  # by slot
        self._fleet = fleet
        self._agent = a.AgentPolicy(
            a.Patience(),
            configured,
            node_id=node_id,
            devices=range(devices),
            device_kind="cuda",
            planned=planned,
        )
        self._starting: dict[str, str] = {}  # instance id by slot
        self._started = 0

    def begin(self) -> None:
        self._tell(a.Began())

    def status(self) -> m.NodeStatus:
        return self._agent.status(self._now)

    def hear_plan(self, plan: m.ClusterPlan) -> None:
        self._tell(a.PlanSeen(plan=plan))

    @property
    def _now(self) -> float:
        return self._fleet.ground.clock.now

    def _tell(self, event: a.AgentEvent) -> None:
        for command in self._agent.handle(event, self._now):
            match command:
                case a.Start():
                    self._start(command.wanted)
                case a.Terminate():
                    self._stop(command.slot_id)
                case a.Kill():
                    self.kill(self.running[command.slot_id], "killed")
                case a.AnnounceLost():
                    self._fleet.ground.announce_lost(command.instance_id)
                case a.WakeAt():
                    self._fleet.ground.clock.at(command.at, self._tell, a.Tick())
                case _:
                    raise RuntimeError(f"nobody carries {command} out")

    def _start(self, wanted: m.PlannedInstance) -> None:
        self._started += 1
        instance_id = f"{wanted.slot_id}-{self._started}"
        self._starting[wanted.slot_id] = instance_id
        self._tell(a.Started(slot_id=wanted.slot_id, instance_id=instance_id))
        launch_s = self._fleet.setting.launch_s if self._now > 0 else 0.0
        self._fleet.ground.clock.at(self._now + launch_s, self._ready, wanted, instance_id)

    def _ready(self, wanted: m.PlannedInstance, instance_id: str) -> None:
        if self._starting.get(wanted.slot_id) != instance_id:
            return  # it was stopped meanwhile
        del self._starting[wanted.slot_id]
        self.running[wanted.slot_id] = self._fleet.ground.start(instance_id, wanted.tp_degree)
        self._fleet.note_change()
        self._tell(a.Ready(instance_id=instance_id))

    def _stop(self, slot_id: str) -> None:
        instance_id = self._starting.pop(slot_id, None)
        if instance_id is not None:
            self._tell(a.Exited(slot_id=slot_id, instance_id=instance_id, detail="stopped"))
        else:
            self.running[slot_id].drain()

    def kill(self, instance: Instance, detail: str) -> None:
        self._fleet.ground.end(instance)
        self.note_exit(instance, detail)

    def note_exit(self, instance: Instance, detail: str) -> None:
        for slot_id, one in list(self.running.items()):
            if one is instance:
                del self.running[slot_id]
                self._fleet.note_change()
                self._tell(a.Exited(slot_id=slot_id, instance_id=instance.id, detail=detail))


# --- the layout ---------------------------------------------------------------------------------------------------

_plans: dict[bytes, Plan] = {}  # by problem


def planned(problem: Problem) -> Plan:
    """The planner's answer (rule 3)."""
    patient = replace(problem, planning=replace(problem.planning, time_limit_s=_PLANNER_LIMIT_S))
    key = msgspec.json.encode(patient)
    if key not in _plans:
        _plans[key] = replace(make_plan(patient), seconds=0.0)
    return _plans[key]


class _Layouts:
    """Workload-monitor and reconfigurator (rule 2), as services/reconfigurator/service.py."""

    def __init__(self, fleet: Fleet, setting: FleetSetting, profile: Profile, latency: LatencyProfile) -> None:
        assert setting.reconfigurator is not None
        self.decisions: list[Decision] = []
        self._fleet, self._setting, self._config = fleet, setting, setting.reconfigurator
        self._profile = profile
        self._degrees = [DegreeProfile(tp_degree=degree, cost=latency.cost(degree)) for degree in latency.degrees]
        self._clock = fleet.ground.clock
        self._monitor = WorkloadMonitor(setting.monitor, profile.model, began_at=0.0)
        config = self._config
        self._policy = r.Reconfigurator(config.period_s, config.soon_s, config.stay_periods)
        self._plan: m.ClusterPlan | None = None
        self._snapshot: m.WorkloadSnapshot | None = None
        self._busy: bool | None = None
        self._told: object = None  # what the last problem was made of

    def begin(self) -> None:
        self._clock.at(_BEAT_S, self._beat)
        self._clock.at(self._setting.monitor.snapshot_every_s, self._count)

    def hear_request(self, request: m.GenerateRequest) -> None:
        self._monitor.handle(RequestSeen(request, request.created_at), self._clock.now)

    def _count(self) -> None:
        now = self._clock.now
        for command in self._monitor.handle(SnapshotDue(now), now):
            self._snapshot = command.snapshot
        self._clock.at(now + self._setting.monitor.snapshot_every_s, self._count)

    def _beat(self) -> None:
        self._act()
        self._clock.at(self._clock.now + _BEAT_S, self._beat)

    def _act(self) -> None:
        while (after := self._next_plan()) is not None:
            self._store(after)
        self._consult()

    def _next_plan(self) -> m.ClusterPlan | None:
        """By rollout or adoption."""
        plan, nodes, now = self._plan, self._statuses(), self._clock.now
        if plan is not None and plan.rollout is not None:
            return advance(plan, nodes, now, launch_limit_s=self._config.launch_limit_s)
        return adopt(nodes.values(), now, plan)

    def _statuses(self) -> dict[str, m.NodeStatus]:
        return {node.id: node.status() for node in self._fleet.nodes}

    def _store(self, plan: m.ClusterPlan) -> None:
        self._plan = plan
        for node in self._fleet.nodes:
            node.hear_plan(plan)

    def _consult(self) -> None:
        """Tells the policy what has changed, and that time has passed."""
        assert self._plan is not None, "what runs was adopted"
        busy = is_busy(self._plan, self._clock.now, self._config.retry_pause_s)
        if busy != self._busy:
            self._busy = busy
            self._tell(r.RolloutSeen(busy))
        snapshot = self._snapshot
        if busy or snapshot is None or snapshot.covered_s < self._config.min_covered_s:
            return
        if (told := (snapshot.sent_at, self._plan.revision)) != self._told:
            self._told = told
            problem = problem_of(
                self._profile,
                self._degrees,
                self._config.planning,
                snapshot=snapshot,
                plan=self._plan,
                nodes=self._statuses(),
            )
            if problem is not None:
                self._tell(r.ProblemSeen(problem))
        self._tell(r.Tick())

    def _tell(self, event: r.Event) -> None:
        for command in self._policy.handle(event, self._clock.now):
            match command:
                case r.MakePlan():
                    self._clock.at(self._clock.now + self._setting.plan_s, self._answer, command.problem)
                case r.Adopt():
                    assert isinstance(event, r.PlanMade)
                    self._note(command.verdict, event.plan)
                    self._adopt(event, command.verdict)
                case r.Keep():
                    self._note(command.verdict, event.plan if isinstance(event, r.PlanMade) else None)
                case r.WakeAt():
                    pass  # it is told each second

    def _answer(self, problem: Problem) -> None:
        self._tell(r.PlanMade(problem, planned(problem)))

    def _note(self, verdict: r.Verdict, plan: Plan | None) -> None:
        wanted = {} if plan is None else plan.layout
        self.decisions.append(Decision(round(self._clock.now, 6), verdict.reason, wanted))

    def _adopt(self, event: r.PlanMade, verdict: r.Verdict) -> None:
        assert self._plan is not None
        places = places_of(event.plan, event.problem, self._plan)
        self._store(begin(self._plan, places, verdict.reason, self._clock.now))
        self._act()
