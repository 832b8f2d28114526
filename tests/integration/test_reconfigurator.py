"""A real reconfigurator and a real workload-monitor on a real nats-server; the nodes are played, by the real policy."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from contracts import messages as m
from contracts import subjects
from services.bus import Bus
from services.costs import DegreeProfile, PassCost, dump_latency
from services.denoiser.agent_policy import (
    AgentEvent,
    AgentPolicy,
    AnnounceLost,
    Began,
    Exited,
    Kill,
    Patience,
    PlanSeen,
    Ready,
    Start,
    Started,
    Terminate,
    Tick,
    divide,
)
from services.reconfigurator.rollout import Place, begin
from tests.builders import BLOCK, MODEL, make_request
from tests.conftest import NatsServer
from tests.processes import ServiceProcess
from tests.waiting import until

pytestmark = pytest.mark.integration

PROFILE = f"""
model = "{MODEL}"
[decoding]
block_size = {BLOCK}
[limits]
max_context_tokens = 768
max_output_tokens = 256
"""
# twice the devices make a pass faster, but not twice as fast
COSTS = {1: PassCost(curve=((32, 100.0), (512, 130.0))), 2: PassCost(curve=((32, 60.0), (512, 80.0)))}


class Node:
    """A node whose processes are timers: they load for `load_s`, drain at once, and fail if they are to."""

    def __init__(self, bus: Bus, node_id: str, devices: int, workers: int) -> None:
        self.bus, self.node_id = bus, node_id
        numbers = range(devices)
        self.policy = AgentPolicy(
            Patience(backoff_limit_s=0.2, backoff_first_s=0.1),
            divide(node_id, workers, 1, numbers),
            node_id=node_id,
            devices=numbers,
            device_kind="cpu",
            planned=True,
        )
        self.load_s = 0.1
        self.fails = False
        self.plans: list[m.ClusterPlan] = []
        self.most_launching = 0
        self.starts = 0
        self.ids: dict[str, str] = {}  # by slot id, of processes

    async def begin(self) -> None:
        follower = await self.bus.follow(subjects.CLUSTER_STREAM, subjects.PLAN, m.ClusterPlan, self._on_plan)
        await follower.caught_up()
        self.handle(Began())
        while True:
            self.handle(Tick())
            await self.bus.publish(subjects.node_status(self.node_id), self.status)
            await asyncio.sleep(0.1)

    @property
    def status(self) -> m.NodeStatus:
        return self.policy.status(time.time())

    @property
    def running(self) -> list[tuple[int, ...]]:
        """Devices of the instances that run, in order."""
        return sorted(tuple(i.devices) for i in self.status.instances if i.state == "running")

    @property
    def plan(self) -> m.ClusterPlan | None:
        return self.plans[-1] if self.plans else None

    def _on_plan(self, plan: m.ClusterPlan, _: int) -> None:
        self.plans.append(plan)
        self.handle(PlanSeen(plan=plan))

    def handle(self, event: AgentEvent) -> None:
        loop = asyncio.get_running_loop()
        for command in self.policy.handle(event, loop.time()):
            match command:
                case Start():
                    self._start(command.wanted.slot_id)
                case Terminate() | Kill():
                    self._exit(command.slot_id, self.ids[command.slot_id])
                case AnnounceLost():
                    pass
        self.policy.check_invariants()
        self.most_launching = max(self.most_launching, sum(i.state == "starting" for i in self.status.instances))

    def _start(self, slot_id: str) -> None:
        self.starts += 1
        self.ids[slot_id] = instance_id = f"{slot_id}-{self.starts}"
        self.handle(Started(slot_id=slot_id, instance_id=instance_id))
        loop = asyncio.get_running_loop()
        if self.fails:
            loop.call_later(self.load_s, self._exit, slot_id, instance_id)
        else:
            loop.call_later(self.load_s, self.handle, Ready(instance_id=instance_id))

    def _exit(self, slot_id: str, instance_id: str) -> None:
        self.handle(Exited(slot_id=slot_id, instance_id=instance_id, detail="exit code 1 (failed)"))


class Stage:
    """The nodes, the services, and a gateway's requests."""

    def __init__(self, bus: Bus, server: NatsServer, folder: Path) -> None:
        self.bus, self.server, self.folder = bus, server, folder
        self.processes: list[ServiceProcess] = []
        self.tasks: list[asyncio.Task[None]] = []
        (folder / "profile").mkdir()
        (folder / "profile" / "profile.toml").write_text(PROFILE)
        degrees = [DegreeProfile(tp_degree=degree, cost=cost) for degree, cost in COSTS.items()]
        dump_latency(folder / "profile" / "latency.json", "test", degrees)

    async def node(self, node_id: str = "n", devices: int = 2, workers: int = 2) -> Node:
        node = Node(self.bus, node_id, devices, workers)
        self.tasks.append(asyncio.create_task(node.begin()))
        await until(lambda: len(node.running) == workers, "what it is configured to runs")
        return node

    def start(self, service: str, **settings: object) -> ServiceProcess:
        log = self.folder / f"{service}-{len(self.processes)}.log"
        process = ServiceProcess(
            f"services.{service}", log, self.server.url, profile=self.folder / "profile", **settings
        )
        process.start()
        self.processes.append(process)
        return process

    def reconfigurator(self, **settings: object) -> ServiceProcess:
        """Its periods are the test's to shorten."""
        values = {"period_s": 3600, "node_silent_s": 1.0, "min_covered_s": 0, "launch_limit_s": 30} | settings
        return self.start("reconfigurator", **values)

    async def store(self, plan: m.ClusterPlan) -> None:
        """In the place of what is stored."""
        found = await self.bus.last(subjects.CLUSTER_STREAM, subjects.PLAN, m.ClusterPlan)
        await self.bus.append(subjects.PLAN, plan, after_seq=found.seq if found else 0)

    async def requests(self, count: int, prefix: str, slo_s: float) -> None:
        now = time.time()
        for number in range(count):
            request = make_request(f"{prefix}-{number}", created_at=now, expires_at=now + 60, deadline_at=now + slo_s)
            await self.bus.append(subjects.request(request.request_id), request)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            assert "Traceback" not in process.log, process.log


@pytest_asyncio.fixture
async def stage(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(bus, nats_server, tmp_path)
    try:
        yield stage
    finally:
        await stage.end()


def settled(node: Node, *places: tuple[int, ...]) -> bool:
    """No rollout is under way, and the node runs just that."""
    return node.plan is not None and node.plan.rollout is None and node.running == sorted(places)


async def adopted(stage: Stage, node: Node) -> m.ClusterPlan:
    await until(lambda: node.plan is not None, "what runs is adopted", 60)
    assert node.plan is not None
    return node.plan


async def move(stage: Stage, plan: m.ClusterPlan, *places: tuple[int, ...]) -> None:
    """As the policy would."""
    await stage.store(begin(plan, [Place("n", place) for place in places], "the test wants it", time.time()))


async def test_what_runs_is_adopted_and_stays_without_requests(stage: Stage) -> None:
    node = await stage.node(devices=2, workers=1)
    first = node.status.instances[0].instance_id
    stage.start("workload_monitor", snapshot_every_s=0.2)
    reconfigurator = stage.reconfigurator(period_s=0.3)
    plan = await adopted(stage, node)
    assert [(i.slot_id, i.devices) for i in plan.nodes[0].instances] == [("n-0", [0])]
    await until(lambda: reconfigurator.log.count("no_requests") >= 2, "it plans, and keeps what runs", 60)
    other = await stage.node("late", devices=1, workers=1)
    await until(lambda: node.plan is not None and len(node.plan.nodes) == 2, "a node that comes later is adopted", 60)
    assert [node.status.instances[0].instance_id, node.starts, other.starts] == [first, 1, 1]


async def test_killed_in_mid_rollout_it_goes_on_where_it_was(stage: Stage) -> None:
    node = await stage.node(devices=4, workers=4)
    process = stage.reconfigurator()
    plan = await adopted(stage, node)
    node.load_s = 1.0
    await move(stage, plan, (0, 1), (2, 3))
    await until(lambda: node.plan and node.plan.rollout and node.plan.rollout.launching, "a launch is under way")
    process.kill()
    stage.reconfigurator()
    await until(lambda: settled(node, (0, 1), (2, 3)), "it is where it should be", 60)
    assert node.starts == 4 + 2, "nothing was started twice"
    assert node.plan is not None
    assert node.plan.revision == 1 + 1 + 2 + 1, "each step was stored once"


async def test_another_one_takes_over_and_no_step_is_done_twice(stage: Stage) -> None:
    node = await stage.node(devices=4, workers=4)
    acting = stage.reconfigurator()
    plan = await adopted(stage, node)
    standing_by = stage.reconfigurator()
    await until(lambda: "waiting for the lease" in standing_by.log, "the other stands by", 60)
    node.load_s = 1.0
    await move(stage, plan, (0, 1), (2, 3))
    await until(lambda: node.plan and node.plan.rollout and node.plan.rollout.launching, "a launch is under way")
    acting.signal(signal.SIGSTOP)
    await until(lambda: settled(node, (0, 1), (2, 3)), "it is where it should be", 60)
    acting.signal(signal.SIGCONT)
    assert await acting.exit_code() == 3
    assert node.starts == 4 + 2


async def test_nats_killed_in_mid_rollout(stage: Stage) -> None:
    node = await stage.node(devices=4, workers=4)
    process = stage.reconfigurator(node_silent_s=3.0)
    plan = await adopted(stage, node)
    node.load_s = 1.0
    await move(stage, plan, (0, 1), (2, 3))
    await until(lambda: node.plan and node.plan.rollout and node.plan.rollout.launching, "a launch is under way")
    stage.server.kill()
    await asyncio.sleep(1.0)
    stage.server.start()

    def there() -> bool:
        if not process.runs:  # its lease has run out: its supervisor starts it again
            process.start()
        return settled(node, (0, 1), (2, 3))

    await until(there, "it is where it should be", 60)
    assert node.starts == 4 + 2
    assert node.plan is not None
    assert node.plan.failures == 0


async def test_a_launch_that_fails_brings_back_what_ran_and_nothing_is_tried_for_a_while(stage: Stage) -> None:
    node = await stage.node()
    stage.start("workload_monitor", snapshot_every_s=0.2)
    process = stage.reconfigurator(period_s=0.3)
    await adopted(stage, node)
    node.fails = True
    await stage.requests(1, "calm", slo_s=60)
    await until(lambda: node.plan and node.plan.failures == 1, "it is given up", 60)
    node.fails = False
    assert node.plan is not None
    assert node.plan.reason == "gives up: launch of n-2 on n has failed: exit code 1 (failed)"
    await until(lambda: settled(node, (0,), (1,)), "what ran runs again")
    assert [i.slot_id for i in node.plan.nodes[0].instances] == ["n-0", "n-1"]
    assert process.log.count("launches n-") == 1


async def test_a_plan_that_cannot_be_read_is_replaced_by_what_runs(stage: Stage) -> None:
    node = await stage.node()
    await stage.bus.append(subjects.PLAN, {"type": "ClusterPlan", "revision": "garbage"})
    stage.reconfigurator()
    plan = await adopted(stage, node)
    assert (plan.revision, plan.reason) == (1, "adopts n")
    assert node.starts == 2
