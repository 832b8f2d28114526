"""The gateway as its own process: how it starts, how it stops."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from services.bus import Bus
from tests.conftest import NatsServer
from tests.integration.gateway_rig import MODEL, Cluster, GatewayProcess, Play, build_tokenizer, write_profile
from tests.integration.test_gateway import contents, events_of
from tests.waiting import until

pytestmark = pytest.mark.integration

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "say it"}]}
TEXT = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def gateway(nats_server: NatsServer, tmp_path: Path) -> Iterator[GatewayProcess]:
    write_profile(tmp_path / "profile")
    process = GatewayProcess(tmp_path, nats_server.url)
    yield process
    process.kill()
    assert "Traceback" not in process.log


@pytest_asyncio.fixture
async def cluster(bus: Bus) -> AsyncIterator[Cluster]:
    ids = build_tokenizer().encode(TEXT).ids
    cluster = Cluster(bus, lambda request: Play(ids, block_s=0.3))
    await cluster.start()
    yield cluster
    await cluster.stop()


async def test_asked_to_stop_it_lets_streams_finish_and_takes_no_more(
    gateway: GatewayProcess, cluster: Cluster
) -> None:
    gateway.start()
    await gateway.until_ready()
    async with httpx.AsyncClient(timeout=30) as client:
        url = gateway.url + "/v1/chat/completions"
        call = asyncio.create_task(client.post(url, json={**CHAT, "stream": True}))
        await until(lambda: cluster.seen)
        gateway.signal(signal.SIGTERM)
        events = events_of((await call).text)
        assert "".join(contents(events)) == TEXT
        assert events[-1] == "[DONE]"
        assert await gateway.exit_code() == 0
        with pytest.raises(httpx.TransportError):
            await client.get(gateway.url + "/health/live")


async def test_what_does_not_finish_in_time_is_cancelled_and_its_client_told(
    nats_server: NatsServer, gateway: GatewayProcess, cluster: Cluster, tmp_path: Path
) -> None:
    ids = build_tokenizer().encode(TEXT).ids
    cluster.script = lambda request: Play(ids, forever=True)
    impatient = GatewayProcess(tmp_path, nats_server.url, drain_limit_s=0.5)
    impatient.start()
    try:
        await impatient.until_ready()
        async with httpx.AsyncClient(timeout=30) as client:
            url = impatient.url + "/v1/chat/completions"
            streamed = asyncio.create_task(client.post(url, json={**CHAT, "stream": True}))
            whole = asyncio.create_task(client.post(url, json=CHAT))
            await until(lambda: len(cluster.seen) == 2)
            impatient.signal(signal.SIGTERM)
            assert events_of((await streamed).text)[-1]["error"]["code"] == "gateway_lost"
            assert (await whole).status_code == 503
        assert await impatient.exit_code() == 0
        await until(lambda: len(cluster.final) == 2)
        assert {record.reason for record in cluster.final.values()} == {"gateway_lost"}
        assert "Traceback" not in impatient.log
    finally:
        impatient.kill()


async def test_a_call_with_a_key_outlives_its_gateway(
    nats_server: NatsServer, gateway: GatewayProcess, cluster: Cluster, tmp_path: Path
) -> None:
    """kill -9, and a repeat at the gateway that comes after it."""
    done = asyncio.Event()
    ids = build_tokenizer().encode(TEXT).ids
    cluster.script = lambda request: Play(ids, ending=done.is_set)
    key = {"idempotency-key": "outlive"}
    gateway.start()
    await gateway.until_ready()
    async with httpx.AsyncClient(timeout=30) as client:
        lost = asyncio.create_task(client.post(gateway.url + "/v1/chat/completions", json=CHAT, headers=key))
        await until(lambda: cluster.seen)
        gateway.kill()
        with pytest.raises(httpx.TransportError):
            await lost
        gateway.start()
        await gateway.until_ready()
        again = asyncio.create_task(client.post(gateway.url + "/v1/chat/completions", json=CHAT, headers=key))
        done.set()
        assert (await again).json()["choices"][0]["message"]["content"] == TEXT
    assert len(cluster.seen) == 1


async def test_a_busy_port_is_named(gateway: GatewayProcess) -> None:
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", gateway.port)
    async with listener:
        gateway.start()
        assert await gateway.exit_code() == 1
    assert f"port {gateway.port} on 127.0.0.1 is in use" in gateway.log


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"port": 70_000}, "port: 70000"),
        ({"port": "x"}, "port"),
        ({"max_choices": 0}, "max_choices: 0"),
        ({"profile": "/nowhere"}, "/nowhere"),
        ({"key_file": "/nowhere"}, "key_file /nowhere"),
    ],
)
async def test_a_wrong_setting_is_named(
    nats_server: NatsServer, tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    write_profile(tmp_path / "profile")
    process = GatewayProcess(tmp_path, nats_server.url, **settings)
    process.start()
    assert await process.exit_code() == 2
    assert said in process.log
    assert "Traceback" not in process.log
