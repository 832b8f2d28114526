"""The `tediserve` command against a real nats-server, a real agent and its workers. The test plays the scheduler."""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from typing import Any, NamedTuple

import pytest

from contracts import messages as m
from contracts import subjects
from services.lease import Lease
from tests.conftest import NatsServer
from tests.integration.worker_stage import Stage
from tests.processes import ROOT, free_port, plain_environment
from tests.waiting import until

pytestmark = pytest.mark.integration


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


async def tediserve(nats_url: str, *words: str, **environment: str) -> Said:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tools.cli",
        *words,
        cwd=ROOT,
        env=plain_environment(TEDISERVE_NATS_URL=nats_url, COLUMNS="200", **environment),
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    assert b"Traceback" not in err, err.decode()
    return Said(process.returncode, out.decode(), err.decode())


async def test_it_tells_what_runs_and_an_instance_that_is_told_to_drain_ends_and_is_replaced(stage: Stage) -> None:
    """One story, since an agent with its workers takes seconds to start."""
    bus = stage.bus

    def instances() -> list[m.InstanceState]:
        return stage.nodes["node"].instances

    stage.start("agent", node_id="node", workers=1)
    await until(lambda: stage.statuses, "the worker is ready", 60)
    (instance_id,) = stage.statuses
    lease = Lease(bus, "sched-test")
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    request = stage.served.request(0, deadline_at=time.time() + 60)
    for stored in (request, stage.served.request(1)):
        await bus.append(subjects.request(stored.request_id), stored, after_seq=0)
    drains: list[m.DrainNotice] = []

    async def on_drain(notice: m.DrainNotice) -> m.Accepted:
        drains.append(notice)
        return m.Accepted()

    await bus.respond(subjects.DRAIN, m.DrainNotice, on_drain)
    await stage.assign(instance_id, request)
    await stage.until_state(request, "finished")

    said, table, listed = await asyncio.gather(
        tediserve(stage.nats_url, "status", "--json"),
        tediserve(stage.nats_url, "status", "--once"),
        tediserve(stage.nats_url, "requests", "--json"),
    )
    assert said.code == 0, said.err
    status = said.json
    assert [(i["instance_id"], i["state"], i["tp_degree"]) for i in status["instances"]] == [
        (instance_id, "serving", 1)
    ]
    assert status["instances"][0]["kv_tokens"] == stage.statuses[instance_id].kv_tokens
    assert (status["scheduler"], status["epoch"], status["open_requests"]) == ("sched-test", 3, 2)
    assert (status["load"], status["gateways"], status["nodes"][0]["node_id"]) == (None, [], "node")
    assert instance_id in table.out
    assert "2 open" in table.out

    rows = {row["request_id"]: row for row in listed.json}
    assert rows.keys() == {"request-0", "request-1"}
    finished, waits = rows["request-0"], rows["request-1"]
    assert (finished["state"], finished["attempt"]) == ("finished", 1)
    assert finished["blocks_done"] == len(stage.history(request)[-1].blocks) > 0
    assert 0 < finished["slack_s"] < 60
    assert (waits["state"], waits["instance_id"], waits["slack_s"]) == ("waiting", "", None)

    drained = await tediserve(stage.nats_url, "drain", "node-0", "--limit", "30")
    assert drained.code == 0, drained.err
    assert f"{instance_id} drains; it holds 0 requests" in drained.out
    assert f"{instance_id} is gone" in drained.out
    await until(lambda: stage.lost, "the agent tells of it")
    assert [(lost.instance_id, lost.detail[:11]) for lost in stage.lost] == [(instance_id, "exit code 0")]
    await until(lambda: instances()[0].restarts == 1, "another one is started in its place")
    assert instances()[0].instance_id != instance_id
    keeping.cancel()


async def test_a_worker_that_drains_hands_over_what_it_holds(stage: Stage) -> None:
    worker = await stage.worker("a", drain_limit_s=20)
    requests = [stage.served.request(number) for number in range(2)]
    for request in requests:
        await stage.assign("a", request)

    async def on_drain(notice: m.DrainNotice) -> m.Accepted:
        asking.extend(asyncio.create_task(stage.release("a", request.request_id)) for request in requests)
        return m.Accepted()

    asking: list[asyncio.Task[m.Accepted | m.Refused]] = []
    await stage.bus.respond(subjects.DRAIN, m.DrainNotice, on_drain)
    said = await tediserve(stage.nats_url, "drain", "a", "--json")
    assert (said.code, said.json["instance_id"], said.json["gone"]) == (0, "a", True)
    assert await worker.exit_code() == 0
    for request in requests:
        record = stage.newest(request)
        assert record is not None
        assert record.state in ("released", "finished")


async def test_the_plan_is_what_the_bucket_holds(stage: Stage) -> None:
    none = await tediserve(stage.nats_url, "plan")
    assert none.out.startswith("There is no plan")
    nodes = [m.NodePlan(node_id="n1", instances=[m.PlannedInstance(slot_id="s1", tp_degree=1, devices=[0])])]
    plan = m.ClusterPlan(revision=4, written_at=1.0, nodes=nodes, reason="as a test wants it")
    await stage.bus.append(subjects.PLAN, plan, after_seq=0)
    shown, found = await asyncio.gather(tediserve(stage.nats_url, "plan"), tediserve(stage.nats_url, "plan", "--json"))
    assert "plan 4: as a test wants it" in shown.out
    assert found.json["plan"]["nodes"][0]["instances"][0]["devices"] == [0]
    assert [(row["slot_id"], row["wanted"], row["state"]) for row in found.json["slots"]] == [("s1", True, "")]


async def test_what_is_missing_is_said_with_an_exit_code_of_its_own(nats_server: NatsServer) -> None:
    """No streams yet, no instance, no NATS, wrong settings: all at once, since most of the time they wait."""
    nowhere = f"nats://127.0.0.1:{free_port()}"
    no_stream, no_instance, no_nats, wrong, no_command = await asyncio.gather(
        tediserve(nats_server.url, "status"),
        tediserve(nats_server.url, "drain", "a"),
        tediserve(nowhere, "status", TEDISERVE_NATS_CONNECT_LIMIT_S="1"),
        tediserve(nowhere, "status", TEDISERVE_NATS_REPLICAS="2"),
        tediserve(nowhere, "stats"),
    )
    assert (no_stream.code, no_instance.code, no_nats.code, wrong.code, no_command.code) == (1, 3, 1, 2, 2)
    assert no_stream.err.startswith("tediserve: there is no stream REQUESTS. Is the stack up?")
    assert no_instance.err == "tediserve: no instances are named a; no instance has spoken\n"
    assert no_nats.err.startswith(f"tediserve: no NATS at {nowhere} within 1 s. Is the stack up?")
    assert "[nats] replicas: 2 is not 1, 3 or 5" in wrong.err
    assert "invalid choice: 'stats'" in no_command.err
