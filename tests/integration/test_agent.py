"""A real agent and its real workers on a real nats-server."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from contracts import messages as m
from tests.integration.worker_stage import Stage
from tests.processes import ServiceProcess, is_gone
from tests.waiting import until

pytestmark = pytest.mark.integration


def states(stage: Stage) -> list[tuple[str, str]]:
    node = stage.nodes.get("node")
    return [(instance.instance_id, instance.state) for instance in node.instances] if node else []


def children(process: ServiceProcess) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


async def running_agent(stage: Stage, **settings: object) -> tuple[ServiceProcess, list[str]]:
    """An agent whose workers are ready, and their ids by slot."""
    agent = stage.start("agent", node_id="node", **settings)
    await until(lambda: [s for _, s in states(stage)] == ["running"] * 2, "both workers are ready", 60)
    ids = [instance_id for instance_id, _ in states(stage)]
    assert all(instance_id in stage.statuses for instance_id in ids)
    return agent, ids


async def test_it_runs_its_workers_announces_a_killed_one_and_starts_another(stage: Stage) -> None:
    agent, ids = await running_agent(stage)
    assert [instance_id[:7] for instance_id in ids] == ["node-0-", "node-1-"]
    request = stage.served.request(0)
    await stage.assign(ids[0], request)
    assert len(children(agent)) == 2
    victim = next(child for child in children(agent) if ids[0] in child.environ().values())
    killed_at = time.monotonic()
    victim.kill()
    await until(lambda: stage.lost, "it is announced")
    assert time.monotonic() - killed_at < 0.5
    assert stage.lost == [m.InstanceLost(instance_id=ids[0], detail="killed by SIGKILL")]
    await until(lambda: [s for _, s in states(stage)] == ["running"] * 2, "another runs", 60)
    (replacement, _), (untouched, _) = states(stage)
    assert replacement not in ids
    assert untouched == ids[1]
    assert stage.nodes["node"].instances[0].restarts == 1
    await stage.assign(replacement, request)
    stage.check_answer(0, await stage.until_state(request, "finished"))


async def test_its_death_takes_the_workers_with_it_even_stopped_ones(stage: Stage) -> None:
    agent, _ = await running_agent(stage)
    workers = children(agent)
    workers[0].suspend()
    agent.signal(signal.SIGKILL)
    await until(lambda: all(is_gone(worker.pid) for worker in workers), "they are gone", 10)


async def test_with_a_run_folder_they_outlive_it_and_the_next_agent_adopts_them(stage: Stage, tmp_path: Path) -> None:
    agent, ids = await running_agent(stage, run_folder=tmp_path)
    workers = {child.environ()["TEDISERVE_WORKER_INSTANCE_ID"]: child for child in children(agent)}
    second = stage.start("agent", node_id="node", run_folder=tmp_path)
    assert await second.exit_code(60) == 2
    assert "an agent of this node runs already" in second.log
    request, another = stage.served.request(0), stage.served.request(1)
    assert await stage.assign(ids[0], request) == m.Accepted()
    agent.kill()
    stage.nodes.clear()
    agent, again = await running_agent(stage, run_folder=tmp_path)
    assert again == ids
    assert children(agent) == []
    stage.check_answer(0, await stage.until_state(request, "finished"))
    assert len({record.holder for record in stage.history(request)}) == 1

    workers[ids[1]].kill()
    await until(lambda: stage.lost, "an adopted one that ends is announced")
    assert [lost.instance_id for lost in stage.lost] == [ids[1]]
    await until(lambda: [s for _, s in states(stage)] == ["running"] * 2, "another runs", 60)
    assert states(stage)[0][0] == ids[0]
    started = children(agent)
    assert len(started) == 1

    assert await stage.assign(ids[0], another) == m.Accepted()
    agent.signal(signal.SIGTERM)
    stage.check_answer(1, await stage.until_state(another, "finished"))
    assert await agent.exit_code() == 0
    assert all(is_gone(worker.pid) for worker in [*workers.values(), *started])


async def test_what_is_left_running_with_other_settings_drains_and_starts_anew(stage: Stage, tmp_path: Path) -> None:
    settings = {"run_folder": tmp_path, "workers": 1}
    agent = stage.start("agent", node_id="node", **settings)
    await until(lambda: [s for _, s in states(stage)] == ["running"], "it runs", 60)
    ((first, _),) = states(stage)
    agent.kill()
    stage.start("agent", node_id="node", orphan_limit_s=50, **settings)
    await until(lambda: [i for i, s in states(stage) if s == "running"] not in ([], [first]), "another runs", 60)
    assert [lost.instance_id for lost in stage.lost] == [first]


async def test_asked_to_stop_it_drains_the_workers_and_leaves_nothing_behind(stage: Stage) -> None:
    agent, ids = await running_agent(stage)
    request = stage.served.request(1)
    await stage.assign(ids[1], request)
    workers = children(agent)
    agent.signal(signal.SIGTERM)
    stage.check_answer(1, await stage.until_state(request, "finished"))
    assert await agent.exit_code() == 0
    assert all(is_gone(worker.pid) for worker in workers)
    assert {lost.detail for lost in stage.lost} == {"exit code 0 (stopped)"}


async def test_a_worker_that_does_not_stop_is_killed(stage: Stage) -> None:
    agent, _ = await running_agent(stage, stop_limit_s=1)
    workers = children(agent)
    workers[0].suspend()
    agent.signal(signal.SIGTERM)
    assert await agent.exit_code() == 0
    assert all(is_gone(worker.pid) for worker in workers)


async def test_a_worker_that_cannot_start_is_tried_again_and_it_says_why(stage: Stage, tmp_path: Path) -> None:
    settings = {"profile": tmp_path / "nowhere", "workers": 1, "backoff_limit_s": 0.5}
    stage.start("agent", node_id="node", **settings)
    await until(lambda: states(stage) == [("node-0", "backing_off")], "it backs off", 60)
    (instance,) = stage.nodes["node"].instances
    assert instance.detail.startswith("exit code 2 (wrong configuration): its log says what is wrong")
    await until(lambda: stage.nodes["node"].instances[0].restarts >= 2, "it is tried again", 60)
