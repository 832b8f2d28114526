"""Garbage on every subject: counted, logged once by each process that hears it, and nothing else comes of it."""

import re
from collections import Counter
from pathlib import Path
from random import Random

import httpx
import msgspec
import nats
import pytest

from contracts import codec, subjects
from contracts import messages as m
from contracts.subjects import CHANNELS, Channel, channels_heard_by
from tests.integration import random_model
from tests.integration.stack import Stack, chat_body, open_client, running_stack
from tests.waiting import until

pytestmark = pytest.mark.integration

EACH = 25  # messages on each subject


def garbage(rng: Random) -> list[bytes]:
    """No one of them is a message of any channel."""
    deep = b"\x91" * 10_000 + b"\xc0"
    wrong_type = codec.encode({"type": "StatusAsk", "request_id": 7, "instance_id": None})
    hostile_id = codec.encode({"type": "Cancel", "request_id": "../*.>", "instance_id": ">"})
    unknown = codec.encode({"type": "NoSuchMessage"})
    fixed = [b"", b"\xc1", b"{}", b"not msgpack", deep, unknown, codec.encode([1, 2, 3]), codec.encode("StatusAsk")]
    fixed += [msgspec.msgpack.encode({"type": ["Report"]}), wrong_type[:-3], hostile_id[:-1]]
    return fixed + [rng.randbytes(rng.randint(1, 200)) + b"\xc1" for _ in range(EACH - len(fixed))]


def concrete(channel: Channel, gateway_id: str, instance_id: str) -> str:
    """A subject of the channel that its hearers really listen to."""
    match channel.pattern:
        case "prog.*.*":
            return subjects.progress(gateway_id, "nobody")
        case pattern if pattern.startswith("inst."):
            return pattern.replace("*", instance_id)
        case pattern:
            return pattern.replace("*", "nobody")


async def ids_of(stack: Stack) -> tuple[str, str]:
    """The gateway's, and one instance's."""
    gateways: set[str] = set()
    async with stack.bus() as bus:
        await bus.subscribe("status.gateway.*", m.GatewayStatus, lambda status: gateways.add(status.gateway_id))
        await bus.publish(subjects.STATUS_ASK, m.StatusAsk())
        await until(lambda: bool(gateways), "a gateway's status")
    return gateways.pop(), min(stack.worker_pids())


def logged(stack: Stack, process: str) -> Counter[str]:
    """How often the process's log tells of malformed messages, by subject."""
    text = (stack.data / "log" / f"{process}.log").read_text(errors="replace")
    return Counter(re.findall(r"malformed message on (\S+) ignored", text))


async def test_garbage_on_every_subject_is_counted_logged_once_and_ignored(tmp_path: Path) -> None:
    profile = random_model.write_profile(tmp_path / "profile")
    with running_stack(tmp_path, profile, TEDISERVE_RECONFIGURATOR_ENABLED="true") as stack:
        await stack.until_whole()
        gateway_id, instance_id = await ids_of(stack)
        raw = await nats.connect(stack.nats_url)
        sent = {channel: concrete(channel, gateway_id, instance_id) for channel in CHANNELS}
        for subject in sent.values():
            for payload in garbage(Random(subject)):
                await raw.publish(subject, payload)
        await raw.flush()

        async with open_client(stack.url) as client:
            body = chat_body("random", "hello", max_tokens=16)
            body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            await check_counts(client)

        # two workers and their agent write into one log
        single: tuple[subjects.Service, ...] = (
            *("gateway", "scheduler", "threshold-controller"),
            *("workload-monitor", "reconfigurator"),
        )
        heard = {service: Counter(sent[c] for c in channels_heard_by(service)) for service in single}
        worker = {sent[c]: 1 if sent[c].startswith("inst.") else 2 for c in channels_heard_by("worker")}
        agent = {sent[c]: 1 for c in channels_heard_by("agent")}
        heard["agent"] = Counter(worker) + Counter(agent)
        for process, expected in heard.items():
            await until(lambda p=process, e=expected: logged(stack, p).keys() >= e.keys(), f"{process} tells of each")  # type: ignore[misc]
            assert logged(stack, process) == expected

        await until_no_request_is_left(raw)
        await raw.close()
        assert "Traceback" not in stack.logs()


async def check_counts(client: httpx.AsyncClient) -> None:
    """The gateway counts every one that it hears."""
    metrics = (await client.get("/metrics")).text
    counted = dict(re.findall(r'tediserve_bus_malformed_messages_total\{subject="([^"]+)"\} (\S+)', metrics))
    assert float(counted["status.instance.*"]) == EACH
    assert float(counted["status.ask"]) == EACH


async def until_no_request_is_left(raw: nats.NATS) -> None:
    """Unreadable requests are removed from the set of open ones, or they would fill it for ever."""
    js = raw.jetstream()
    left = 1

    for _ in range(300):
        left = (await js.stream_info(subjects.REQUESTS)).state.messages
        if not left:
            return
        await raw.flush()
    assert not left, "unreadable requests are left in REQUESTS"
