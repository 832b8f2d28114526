"""The layout of a real stack changes under load, and parts of it die meanwhile: it gets there, and no request is lost.

What changes it is the stored plan, as the reconfigurator's policy would have left it; what follows is all real.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import pytest
import pytest_asyncio

from contracts import messages as m
from contracts import subjects
from services.reconfigurator.rollout import Place, begin
from tests.integration import random_model
from tests.integration.stack import Stack, running_stack
from tests.integration.test_faults import calls_in_flight, until_purged
from tests.waiting import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif(len(psutil.Process().cpu_affinity() or [0]) < 2, reason="needs two cores"),
]

CORES = sorted(psutil.Process().cpu_affinity() or [0, 1])[:2]
WIDE = [tuple(CORES)]
NARROW = [(core,) for core in CORES]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("reconfiguration")
    profile = random_model.write_profile(folder / "profile", degrees=(1, 2), time_limit_s=300)
    with running_stack(
        folder,
        profile,
        TEDISERVE_RECONFIGURATOR_ENABLED="true",
        TEDISERVE_RECONFIGURATOR_PERIOD_S="3600",
        TEDISERVE_RECONFIGURATOR_NODE_SILENT_S="30",
        TEDISERVE_RECONFIGURATOR_LAUNCH_LIMIT_S="200",
        TEDISERVE_AGENT_NODE_ID="n",
        TEDISERVE_AGENT_DEVICES=f"cpu:{CORES[0]},{CORES[1]}",
        TEDISERVE_AGENT_HEALTHY_AFTER_S="1",
    ) as running:
        yield running


class Watched:
    """What the plan and the node say now."""

    def __init__(self) -> None:
        self.plans: list[m.ClusterPlan] = []
        self.node: m.NodeStatus | None = None

    @property
    def plan(self) -> m.ClusterPlan | None:
        return self.plans[-1] if self.plans else None

    @property
    def wanted(self) -> list[tuple[int, ...]]:
        """Devices of the instances that the plan wants."""
        return places_in(self.plan) if self.plan else []

    @property
    def settled(self) -> list[list[tuple[int, ...]]]:
        """The layouts so far, each as it was when no rollout was under way any more."""
        layouts = [places_in(plan) for plan in self.plans if plan.rollout is None]
        return [layout for layout, _ in itertools.groupby(layouts)]

    @property
    def launching(self) -> str:
        return self.plan.rollout.launching if self.plan and self.plan.rollout else ""

    def runs(self, places: list[tuple[int, ...]]) -> bool:
        """No rollout is under way, and just this runs."""
        if self.plan is None or self.plan.rollout is not None or self.node is None:
            return False
        instances = [(tuple(i.devices), i.state) for i in self.node.instances]
        return sorted(instances) == sorted((place, "running") for place in places)


def places_in(plan: m.ClusterPlan) -> list[tuple[int, ...]]:
    return sorted(tuple(instance.devices) for node in plan.nodes for instance in node.instances)


@contextlib.asynccontextmanager
async def watching(stack: Stack) -> AsyncIterator[Watched]:
    watched = Watched()
    async with stack.bus() as bus:
        await bus.subscribe("status.node.*", m.NodeStatus, lambda node: setattr(watched, "node", node))
        follower = await bus.follow(
            subjects.CLUSTER_STREAM, subjects.PLAN, m.ClusterPlan, lambda plan, _: watched.plans.append(plan)
        )
        await follower.caught_up()
        yield watched


async def begin_rollout(stack: Stack, places: list[tuple[int, ...]]) -> None:
    async with stack.bus() as bus:
        found = await bus.last(subjects.CLUSTER_STREAM, subjects.PLAN, m.ClusterPlan)
        assert found is not None
        plan = begin(found.message, [Place("n", place) for place in places], "the test wants it", time.time())
        await bus.append(subjects.PLAN, plan, after_seq=found.seq)


@pytest_asyncio.fixture(autouse=True)
async def whole_before_and_after(stack: Stack) -> AsyncIterator[None]:
    async with watching(stack) as watched:
        await until(lambda: watched.plan is not None, "what runs is adopted")
    await stack.until_whole()
    yield
    await stack.until_whole()
    await until_purged(stack)
    assert "Traceback" not in stack.logs(), stack.logs()


def kill_service(name: str) -> Callable[[Stack, str], bool]:
    def kill(stack: Stack, _: str) -> bool:
        return stack.kill(name) > 0

    return kill


def kill_launched(stack: Stack, slot_id: str) -> bool:
    """False: its process does not run yet."""
    with contextlib.suppress(psutil.Error, KeyError):  # a process has just ended, or is not quite there
        for instance_id, pid in stack.worker_pids().items():
            if instance_id.startswith(f"{slot_id}-"):
                os.kill(pid, signal.SIGKILL)
                return True
    return False


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(kill_service("reconfigurator"), id="reconfigurator"),
        pytest.param(kill_service("agent"), id="agent"),
        pytest.param(kill_service("nats"), id="nats"),
        pytest.param(kill_launched, id="launched instance"),
    ],
)
async def test_killed_in_mid_rollout(stack: Stack, fault: Callable[[Stack, str], bool]) -> None:
    async with calls_in_flight(stack), watching(stack) as watched:
        target = WIDE if watched.wanted == NARROW else NARROW
        await begin_rollout(stack, target)
        await until(lambda: watched.launching, "a launch is under way")
        await until(lambda: fault(stack, watched.launching), "it is killed", 60)
        await until(lambda: watched.runs(target), "the layout is the target", 150)
        stack.workers = len(target)
    assert watched.plan is not None
    assert watched.plan.failures == 0
