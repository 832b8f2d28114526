"""All of a stack is real, and so is the reason to change: of a wide model two cores, together, make a step faster than
one, and two instances on a core each carry more.

What a step costs is measured here, shortly: the fastest of some passes, as other processes may take a core meanwhile.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from contracts import messages as m
from services.costs import DegreeProfile, LatencyProfile, PassCost, dump_latency, load_latency, step_load
from services.denoiser.latency_plan import Mix
from services.denoiser.profiler import pass_seconds, planned_engine
from services.profile import load_profile
from tests.integration import random_model
from tests.integration.random_model import BLOCK_SIZE, MODEL
from tests.integration.stack import Stack, Streamed, chat_body, open_client, running_stack, stream
from tests.integration.test_faults import until_purged
from tests.integration.test_reconfiguration import CORES, NARROW, WIDE, Watched, watching
from tests.waiting import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(len(psutil.Process().cpu_affinity() or [0]) < 2, reason="needs two cores"),
]

CANVAS = 4 * BLOCK_SIZE
PASSES = {  # by rows
    BLOCK_SIZE: Mix(0, 0, 1, BLOCK_SIZE, CANVAS),
    CANVAS: Mix(1, CANVAS, 0, 0, 0),
    2 * CANVAS: Mix(2, CANVAS, 0, 0, 0),
}
ROUNDS = 2
ROUNDS_LIMIT = 10  # on a busy machine
CLEARLY_FASTER = 0.85
TIMES_THE_CAPACITY = 2.0
PERIOD_S = 2.0


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured at both degrees; skipped where two busy cores are not faster than one."""
    folder = random_model.write_profile(
        tmp_path_factory.mktemp("wide"), shape=random_model.WIDE, degrees=(1, 2), tp_degree=2, time_limit_s=300
    )
    settings = (folder / "profile.toml").read_text()
    steps = f"steps_by_threshold = {[BLOCK_SIZE - 1] * 5}"  # a random model's: about a token a step, at any threshold
    (folder / "profile.toml").write_text(settings.replace("[limits]", f"{steps}\n[limits]"))
    costs = {1: measured(folder, 1)}
    costs[2] = measured(folder, 2, wanted_ms=CLEARLY_FASTER * step_ms(costs[1]))
    if step_ms(costs[2]) > CLEARLY_FASTER * step_ms(costs[1]):
        pytest.skip(f"a step takes {step_ms(costs[1]):.1f} ms on one core and {step_ms(costs[2]):.1f} ms on two")
    degrees = [DegreeProfile(tp_degree=degree, cost=cost) for degree, cost in costs.items()]
    dump_latency(folder / "latency.json", "measured by the test", degrees)
    return folder


def measured(folder: Path, tp_degree: int, wanted_ms: float = float("inf")) -> PassCost:
    """The fastest of each pass, over some rounds, and over more until a step is as fast as `wanted_ms`."""
    fastest = dict.fromkeys(PASSES, float("inf"))
    with planned_engine(load_profile(folder), tp_degree, quick=True) as (engine, _):
        for number in range(ROUNDS_LIMIT):
            for rows, mix in PASSES.items():
                fastest[rows] = min(fastest[rows], 1e3 * min(pass_seconds(engine, mix, BLOCK_SIZE)))
            if number + 1 >= ROUNDS and fastest[BLOCK_SIZE] <= wanted_ms:
                break
    curve, least = [], 0.0
    for rows, ms in fastest.items():
        curve.append((float(rows), least := max(least, ms)))
    return PassCost(curve=tuple(curve))


def step_ms(cost: PassCost) -> float:
    return cost.ms(step_load("cache", BLOCK_SIZE, CANVAS))


@pytest.fixture
def stack(profile: Path, tmp_path: Path) -> Iterator[Stack]:
    with running_stack(
        tmp_path,
        profile,
        workers=1,
        TEDISERVE_RECONFIGURATOR_ENABLED="true",
        TEDISERVE_RECONFIGURATOR_PERIOD_S=str(PERIOD_S),
        TEDISERVE_RECONFIGURATOR_STAY_PERIODS="1",
        TEDISERVE_RECONFIGURATOR_MIN_COVERED_S="1",
        TEDISERVE_RECONFIGURATOR_NODE_SILENT_S="30",
        TEDISERVE_RECONFIGURATOR_LAUNCH_LIMIT_S="200",
        TEDISERVE_WORKLOAD_MONITOR_WINDOW_S="120",
        TEDISERVE_WORKLOAD_MONITOR_BUCKETS="240",
        TEDISERVE_WORKLOAD_MONITOR_HALF_LIFE_S="1",
        TEDISERVE_WORKLOAD_MONITOR_SNAPSHOT_EVERY_S="0.5",
        TEDISERVE_AGENT_NODE_ID="n",
        TEDISERVE_AGENT_DEVICES=f"cpu:{CORES[0]},{CORES[1]}",
    ) as running:
        yield running


def most_per_s(latency: LatencyProfile, tp_degree: int) -> float:
    """Requests of one block that one instance could answer a second if all its passes were as full as can be."""
    rows = [rows for rows in PASSES if rows >= CANVAS]
    per_row_ms = min(latency.step_ms(tp_degree, step_load("recompute", n, CANVAS)) / n for n in rows)
    return 1e3 / (per_row_ms * BLOCK_SIZE * BLOCK_SIZE)


class Calls:
    """Streamed calls of one block each."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.tasks: list[asyncio.Task[Streamed]] = []

    def start(self) -> None:
        prompt = random_model.prompt(len(self.tasks))
        body = chat_body(MODEL, prompt, max_tokens=BLOCK_SIZE, threshold=0.9)
        self.tasks.append(asyncio.create_task(stream(self._client, body, Streamed())))

    async def all_end_well(self) -> None:
        async with asyncio.timeout(240):
            for told in await asyncio.gather(*self.tasks):
                assert (told.errors, told.finishes, told.num_done, len(told.text)) == ([], ["length"], 1, BLOCK_SIZE)


async def test_the_layout_follows_the_load_there_and_back_and_every_call_is_answered(stack: Stack) -> None:
    per_s = TIMES_THE_CAPACITY * most_per_s(load_latency(stack.profile / "latency.json"), 2)
    async with open_client(stack.url) as client, watching(stack) as watched:
        await until(lambda: watched.runs(WIDE), "little is asked for: one instance on both cores", 60)
        calls = Calls(client)
        calls.start()
        await calls.all_end_well()
        await more_calls_until_it_changes(calls, watched, per_s)
        await until(lambda: watched.settled[:2] == [WIDE, NARROW], "much is asked for: an instance on each", 200)
        await calls.all_end_well()
        await until(lambda: watched.settled == [WIDE, NARROW, WIDE], "and back again", 200)
        await until(lambda: watched.runs(WIDE), "it runs", 60)
        calls.start()
        await calls.all_end_well()
    await until_purged(stack)
    assert watched.plan is not None
    assert watched.plan.failures == 0
    assert degrees_told(watched) == [2, 1, 1, 2]
    assert "Traceback" not in stack.logs(), stack.logs()


async def more_calls_until_it_changes(calls: Calls, watched: Watched, per_s: float) -> None:
    """So many a second, whether earlier ones have been answered or not."""
    loop = asyncio.get_running_loop()
    began_at, sent = loop.time(), 0
    while watched.plan is None or watched.plan.rollout is None:
        assert loop.time() - began_at < 60, "the load has risen and nothing changes"
        while sent < per_s * (loop.time() - began_at):
            calls.start()
            sent += 1
        await asyncio.sleep(0.02)


def degrees_told(watched: Watched) -> list[int]:
    """TP degrees of the instances in the order in which the plans have wanted them."""
    seen: dict[str, m.PlannedInstance] = {}
    for plan in watched.plans:
        for node in plan.nodes:
            seen |= {instance.slot_id: instance for instance in node.instances}
    return [instance.tp_degree for instance in seen.values()]
