"""Real workers whose model is shared by two processes: they answer as one does, and live and die as one."""

import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from contracts import messages as m
from services.bus import Bus
from services.denoiser.engine import Engine, Job, Threshold
from services.denoiser.instance import build_engine
from services.profile import load_profile
from services.progress import write_record
from tests.conftest import NatsServer
from tests.integration import random_model
from tests.integration.worker_stage import Served, Stage, ended
from tests.processes import ServiceProcess, is_gone
from tests.waiting import until

pytestmark = pytest.mark.integration

AT_ONCE_S = 3.0  # a second, and time for a busy machine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """By one process: it says what is right."""
    return Served(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, shared by two."""
    return random_model.write_profile(tmp_path_factory.mktemp("shared"), tp_degree=2)


@pytest_asyncio.fixture
async def stage(bus: Bus, nats_server: NatsServer, tmp_path: Path, served: Served) -> AsyncIterator[Stage]:
    stage = Stage(bus, nats_server.url, tmp_path, served)
    await stage.begin()
    with ended(stage):
        yield stage


def other_rank(worker: ServiceProcess | psutil.Process) -> psutil.Process:
    (rank,) = psutil.Process(worker.pid).children()
    assert "rank" in rank.cmdline()
    return rank


async def test_it_answers_as_one_process_does_and_stops_as_one(stage: Stage, shared: Path) -> None:
    worker = await stage.worker("w-0", profile=shared)
    assert stage.statuses["w-0"].tp_degree == 2
    rank = other_rank(worker)
    requests = [stage.served.request(number, temperature=temperature_of(number), seed=number) for number in range(6)]
    for request in requests:
        assert await stage.assign("w-0", request) == m.Accepted()
    await stage.until_blocks(requests[0], 1)
    rank.send_signal(signal.SIGINT)  # a terminal says it to all; it is rank 0's to act on it
    rank.send_signal(signal.SIGTERM)
    worker.signal(signal.SIGTERM)
    engine = build_engine(load_profile(stage.served.folder))
    for request in requests:
        record = await stage.until_state(request, "finished")
        assert record.token_ids == answer_alone(engine, request)
        assert {block.tp_degree for block in record.blocks} == {2}
    assert await worker.exit_code() == 0
    assert is_gone(rank.pid)


def temperature_of(number: int) -> float:
    return 0.8 * (number % 2)


def answer_alone(engine: Engine, request: m.GenerateRequest) -> list[int]:
    engine.admit(
        Job(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            max_tokens=request.max_tokens,
            block_size=request.block_size,
            choice=Threshold(0.9),
            temperature=request.temperature,
            seed=request.seed,
        )
    )
    while engine.progress(request.request_id).finished is None:
        engine.step()
    answer = engine.output_ids(request.request_id)
    engine.remove(request.request_id)
    return answer


async def test_a_rank_killed_in_a_step_ends_the_instance_and_its_request_goes_on_elsewhere(
    stage: Stage, shared: Path
) -> None:
    worker = await stage.worker("w-0", profile=shared)
    await stage.worker("w-1")
    request = stage.served.request(0)
    await stage.assign("w-0", request)
    await stage.until_blocks(request, 1)
    rank = other_rank(worker)
    killed_at = time.monotonic()
    rank.kill()
    assert await worker.exit_code() == 1
    assert time.monotonic() - killed_at < AT_ONCE_S
    assert f"stopping: rank 1 (process {rank.pid}) has ended: killed by SIGKILL" in worker.log
    seq, record = stage.records[request.request_id][-1]
    lost = replace(record, attempt=2, state="released", holder="", reason="worker_lost")
    seq = await write_record(stage.bus, lost, after_seq=seq, limit_s=5)
    assert await stage.assign("w-1", request, attempt=2, resume=(seq, lost)) == m.Accepted()
    record = await stage.until_state(request, "finished")
    stage.check_answer(0, record)
    assert {block.tp_degree for block in record.blocks} == {1, 2}


async def test_a_rank_that_hangs_ends_the_instance_at_the_limit_and_is_named(stage: Stage, shared: Path) -> None:
    worker = await stage.worker("w-0", profile=shared, rank_limit_s=1)
    rank = other_rank(worker)
    rank.suspend()
    stopped_at = time.monotonic()
    await stage.assign("w-0", stage.served.request(0))
    assert await worker.exit_code() == 1
    assert 1.0 <= time.monotonic() - stopped_at < 1.0 + 2.0 + AT_ONCE_S, "the limit, and two seconds to find out who"
    assert f"stopping: rank 1 (process {rank.pid}) has not taken part in a step for 1 s" in worker.log
    await until(lambda: is_gone(rank.pid), "it is gone, though it was stopped", AT_ONCE_S)


async def test_no_rank_outlives_the_worker(stage: Stage, shared: Path) -> None:
    worker = await stage.worker("w-0", profile=shared)
    rank = other_rank(worker)
    rank.suspend()
    worker.signal(signal.SIGKILL)
    await until(lambda: is_gone(rank.pid), "it is gone, though it was stopped", AT_ONCE_S)


async def test_an_agent_starts_an_instance_anew_when_an_idle_rank_dies_and_takes_all_with_it(
    stage: Stage, shared: Path
) -> None:
    agent = stage.start("agent", node_id="node", profile=shared, workers=1)

    def running() -> list[str]:
        node = stage.nodes.get("node")
        return [i.instance_id for i in node.instances if i.state == "running"] if node else []

    await until(running, "it runs", 60)
    (first,) = running()
    (worker,) = psutil.Process(agent.pid).children()
    killed_at = time.monotonic()
    other_rank(worker).kill()
    await until(lambda: stage.lost, "it is announced")
    assert time.monotonic() - killed_at < AT_ONCE_S
    assert stage.lost == [m.InstanceLost(instance_id=first, detail="exit code 1 (failed)")]
    await until(lambda: running() not in ([], [first]), "another runs", 60)
    request = stage.served.request(1)
    assert await stage.assign(running()[0], request) == m.Accepted()
    stage.check_answer(1, await stage.until_state(request, "finished"))
    everybody = psutil.Process(agent.pid).children(recursive=True)
    assert len(everybody) == 2
    agent.signal(signal.SIGKILL)
    await until(lambda: all(is_gone(process.pid) for process in everybody), "all are gone", AT_ONCE_S)


async def test_a_degree_that_was_not_profiled_is_refused_at_start(stage: Stage, tmp_path: Path) -> None:
    folder = random_model.write_profile(tmp_path / "three", tp_degree=3)
    toml = (folder / "profile.toml").read_text()
    (folder / "profile.toml").write_text(toml.replace("tp_degree = 3", "tp_degree = 2"))
    process = stage.start("worker", profile=folder)
    assert await process.exit_code(60) == 2
    assert "the latency profile holds TP degree 3, not 2" in process.log


async def test_a_model_that_so_many_ranks_cannot_share_is_refused_at_start(stage: Stage, tmp_path: Path) -> None:
    process = stage.start("worker", profile=random_model.write_profile(tmp_path / "three", tp_degree=3))
    assert await process.exit_code(60) == 2
    assert "cannot load the model" in process.log
    assert "3 ranks" in process.log
