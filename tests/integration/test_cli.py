"""The `tediserve` command against a real nats-server: a whole stack, a worker alone, nothing at all."""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from contracts import messages as m
from contracts import subjects
from services.lease import Lease
from tests.conftest import NatsServer
from tests.integration import random_model
from tests.integration.stack import Streamed, open_client, running_stack, stream
from tests.integration.worker_stage import Stage
from tests.processes import ROOT, free_port, plain_environment

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


@pytest.mark.timeout(180)
async def test_on_a_whole_stack_all_are_told_of_and_a_drain_under_load_loses_no_answer(tmp_path: Path) -> None:
    with running_stack(tmp_path, random_model.write_profile(tmp_path / "profile")) as stack:
        await stack.until_whole()
        victim = min(stack.worker_pids())
        async with open_client(stack.url) as client, asyncio.TaskGroup() as group:
            drained = asyncio.Event()
            calls = [group.create_task(call_on(client, number, drained)) for number in random_model.STABLE_PROMPTS[:4]]
            said, table = await asyncio.gather(
                tediserve(stack.nats_url, "status", "--json"), tediserve(stack.nats_url, "status")
            )
            drain = await tediserve(stack.nats_url, "drain", victim)
            drained.set()
        status = said.json
        ids = {instance["instance_id"] for instance in status["instances"]}
        assert len(ids) == 2
        assert victim in ids
        assert all(instance_id in table.out for instance_id in ids)
        assert {instance["state"] for instance in status["instances"]} == {"serving"}
        assert status["scheduler"].startswith("sched-")
        assert status["threshold_controller"].startswith("control-")
        assert status["epoch"] > 0
        assert status["load"]["capacity_s"] > 0
        assert [gateway[:3] for gateway in status["gateways"]] == ["gw-"]
        assert drain.code == 0, drain.err
        assert f"{victim} is gone" in drain.out
        assert all(len(texts) == 1 for texts in await asyncio.gather(*calls)), "one prompt, one answer, drain or not"
        await stack.until_whole()
        assert victim not in stack.worker_pids()


async def call_on(client: httpx.AsyncClient, number: int, enough: asyncio.Event) -> set[str]:
    """What the prompt is answered, asked again and again until it is enough; at least once."""
    texts = set()
    body = random_model.body_of(number)
    while not (texts and enough.is_set()):
        told = await stream(client, body, Streamed())
        assert (told.finishes, told.errors, told.num_done) == (["length"], [], 1)
        texts.add(told.text)
    return texts


async def test_requests_are_listed_with_who_holds_them_and_what_is_left(stage: Stage) -> None:
    await stage.worker("a")
    held = stage.served.request(0, deadline_at=time.time() + 60)
    for stored in (held, stage.served.request(1)):
        await stage.bus.append(subjects.request(stored.request_id), stored, after_seq=0)
    lease = Lease(stage.bus, "sched-test")
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    await stage.assign("a", held)
    await stage.until_state(held, "finished")
    listed, said = await asyncio.gather(
        tediserve(stage.nats_url, "requests", "--json"), tediserve(stage.nats_url, "status", "--json")
    )
    keeping.cancel()
    assert [row["request_id"] for row in listed.json] == ["request-0", "request-1"]
    finished, waits = listed.json
    assert (finished["state"], finished["attempt"]) == ("finished", 1)
    assert finished["blocks_done"] == len(stage.history(held)[-1].blocks) > 0
    assert 0 < finished["slack_s"] < 60
    assert (waits["state"], waits["instance_id"], waits["slack_s"]) == ("waiting", "", None)
    assert said.json["instances"][0]["kv_tokens"] == stage.statuses["a"].kv_tokens
    assert (said.json["scheduler"], said.json["epoch"], said.json["open_requests"]) == ("sched-test", 3, 2)


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
    assert no_nats.err.startswith(f"tediserve: no NATS at {nowhere} within 1 s (")
    assert "Is the stack up?" in no_nats.err
    assert "[nats] replicas: 2 is not 1, 3 or 5" in wrong.err
    assert "invalid choice: 'stats'" in no_command.err
