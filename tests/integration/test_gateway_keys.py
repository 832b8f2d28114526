"""API keys, TLS and limits of the gateway, over HTTP and a real nats-server; the cluster is played by script."""

import asyncio
import json
import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from openai import AsyncOpenAI

from services import telemetry
from services.gateway.keys import hash_key
from tests.certificates import write_certificate
from tests.integration.gateway_rig import MODEL, Rig
from tests.integration.test_gateway import (
    CHAT,
    StartRig,
    check_error,
    client,
    contents,
    events_of,
    says,
    start,
)
from tests.otlp_receiver import receiver
from tests.waiting import until

__all__ = ["client", "start"]  # fixtures

pytestmark = pytest.mark.integration

MESSAGES: Any = CHAT["messages"]


def key_of(name: str) -> str:
    return f"tds-of-{name}"


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(name)}"}


def write_keys(path: Path, **tables: dict[str, Any]) -> Path:
    """A key for each name, with these settings."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", f'sha256 = "{hash_key(key_of(name))}"']
        lines += [
            f"{key} = {value if isinstance(value, datetime) else json.dumps(value)}" for key, value in table.items()
        ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys.toml", alice={}, bob={})


@pytest.fixture
async def secured(start: StartRig, key_file: Path) -> Rig:
    return await start(key_file=str(key_file))


def sdk(rig: Rig, name: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=key_of(name), max_retries=0, timeout=30)


async def ask(client: httpx.AsyncClient, rig: Rig, name: str, **fields: Any) -> httpx.Response:
    return await client.post(rig.url + "/v1/chat/completions", json={**CHAT, **fields}, headers=bearer(name))


# --- who may call ------------------------------------------------------------------------------------------------


async def test_calls_want_a_key_and_the_rest_is_public(secured: Rig, client: httpx.AsyncClient) -> None:
    for path in ("/", "/page.js", "/page.css", "/schema", "/health/live", "/health/ready", "/metrics"):
        response = await client.get(secured.url + path)
        assert response.status_code == 200, path
    private = [
        ("GET", "/v1/models"), ("HEAD", "/v1/models"), ("GET", "/v1/models/"), ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/v1/cluster"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
        ("GET", "/v1/results/" + "0" * 32), ("DELETE", "/v1/results/" + "0" * 32),
    ]  # fmt: skip
    for method, path in private:
        response = await client.request(method, secured.url + path)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
        if method != "HEAD":
            assert check_error(response, 401)["code"] == "invalid_api_key"
    for path in ("//v1/models", "/v1//models", "/%76%31/models", "/./v1/models", "/V1/models"):
        assert (await client.get(secured.url + path)).status_code in (401, 404), path
    assert (await client.get(secured.url + "/v1/models", headers=bearer("alice"))).status_code == 200
    assert (await client.get(secured.url + "/v1/cluster", headers=bearer("bob"))).status_code == 200
    assert not secured.cluster.seen
    schema = (await client.get(secured.url + "/schema")).json()
    assert schema["components"]["securitySchemes"]["ApiKey"]["scheme"] == "bearer"
    wanted = {
        path: operation.get("security") for path, methods in schema["paths"].items() for operation in methods.values()
    }
    assert {path for path, security in wanted.items() if security == [{"ApiKey": []}]} == {
        path for path in wanted if path.startswith("/v1/")
    }


async def test_the_sdk_meets_its_own_errors(start: StartRig, key_file: Path) -> None:
    past, future = (datetime.now(UTC).replace(microsecond=0) + timedelta(days=days) for days in (-1, 1))
    write_keys(
        key_file,
        alice={"expires": future},
        old={"expires": past},
        flex={"tiers": ["flex"]},
        quick={"calls_per_s": 0.01, "burst": 1},
        pinner={"pin": True, "tiers": ["default", "priority"]},
    )
    rig = await start(key_file=str(key_file))
    says(rig, "hello")

    async def complete(name: str, **fields: Any) -> Any:
        async with sdk(rig, name) as client:
            return await client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)

    for name in ("nobody", "old"):
        with pytest.raises(openai.AuthenticationError) as refused:
            await complete(name)
        assert (refused.value.code, refused.value.status_code) == ("invalid_api_key", 401)
        assert key_of(name) not in refused.value.message
    for fields in ({"service_tier": "priority"}, {"extra_body": {"threshold": 0.7}}):
        with pytest.raises(openai.PermissionDeniedError):
            await complete("alice", **fields)
    assert not rig.cluster.seen
    assert (await complete("alice")).choices[0].message.content == "hello"
    assert (await complete("pinner", service_tier="priority", extra_body={"threshold": 0.7})).choices[0].message.content
    assert (await complete("flex")).choices[0].message.content == "hello"
    assert [r.priority for r in rig.cluster.seen.values()] == [0, 1, -1]
    await complete("quick")
    with pytest.raises(openai.RateLimitError) as limited:
        await complete("quick")
    assert limited.value.code == "rate_limit_exceeded"
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 100
    await complete("alice")  # has a bucket of its own


async def test_without_a_key_file_everybody_may_call(start: StartRig, client: httpx.AsyncClient) -> None:
    rig = await start()
    says(rig, "hello")
    for headers in ({}, bearer("anybody")):
        response = await client.post(
            rig.url + "/v1/chat/completions",
            json={**CHAT, "threshold": 0.7, "service_tier": "priority"},
            headers=headers,
        )
        assert response.status_code == 200
    schema = (await client.get(rig.url + "/schema")).json()
    assert schema["paths"]["/v1/models"]["get"]["security"] == [{}, {"ApiKey": []}]


# --- shares ------------------------------------------------------------------------------------------------------


async def test_a_key_has_so_many_requests_open_and_others_still_get_in(
    start: StartRig, client: httpx.AsyncClient, key_file: Path
) -> None:
    rig = await start(key_file=str(key_file), key_max_open=3)
    says(rig, "hello", forever=True)
    held = [asyncio.create_task(ask(client, rig, "alice", n=n)) for n in (1, 2)]
    await until(lambda: len(rig.cluster.seen) == 3)
    refused = await ask(client, rig, "alice")
    assert check_error(refused, 429)["code"] == "too_many_open_requests"
    assert refused.headers["retry-after"] == "1"
    assert check_error(await ask(client, rig, "bob", n=4), 400)["param"] == "n"
    assert len(rig.cluster.seen) == 3, "nothing of what was refused was put in"
    says(rig, "hello")
    assert (await ask(client, rig, "bob", n=3)).status_code == 200
    held[1].cancel()  # its client hangs up
    await until(lambda: len(rig.gateway.service._open) == 1)
    assert (await ask(client, rig, "alice", n=2)).status_code == 200
    held[0].cancel()
    await until(lambda: not rig.gateway.service._open)
    assert rig.gateway.access._limiter._open == {}


async def test_a_call_that_runs_on_without_its_client_counts_until_its_end(
    start: StartRig, client: httpx.AsyncClient, key_file: Path
) -> None:
    rig = await start(key_file=str(key_file), key_max_open=1)
    done = asyncio.Event()
    says(rig, "hello", ending=done.is_set)
    call = asyncio.create_task(
        client.post(
            rig.url + "/v1/chat/completions", json=CHAT, headers={**bearer("alice"), "idempotency-key": "detached"}
        )
    )
    await until(lambda: rig.cluster.seen)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert check_error(await ask(client, rig, "alice"), 429)["code"] == "too_many_open_requests"
    done.set()
    await until(lambda: not rig.gateway.service._open)
    assert (await ask(client, rig, "alice")).status_code == 200


async def test_results_and_idempotency_keys_are_those_of_who_asked(secured: Rig, client: httpx.AsyncClient) -> None:
    done = asyncio.Event()
    says(secured, "hello", ending=done.is_set)
    calls = {
        name: asyncio.create_task(
            client.post(
                secured.url + "/v1/chat/completions", json=CHAT, headers={**bearer(name), "idempotency-key": "same"}
            )
        )
        for name in ("alice", "bob")
    }
    await until(lambda: len(secured.cluster.seen) == 2)
    owners = {json.loads(request.fingerprint)["owner"]: rid for rid, request in secured.cluster.seen.items()}
    url = f"{secured.url}/v1/results/{owners['alice']}"
    assert check_error(await client.get(url, headers=bearer("bob")), 404)["code"] == "result_not_found"
    assert check_error(await client.delete(url, headers=bearer("bob")), 404)["code"] == "result_not_found"
    assert check_error(await client.delete(url), 401)["code"] == "invalid_api_key"
    assert (await client.get(url, headers=bearer("alice"))).json()["state"] in ("queued", "running")
    done.set()
    answers = {name: (await call).json() for name, call in calls.items()}
    assert answers["alice"]["id"] == f"chatcmpl-{owners['alice']}" != answers["bob"]["id"]
    assert (await client.get(url, headers=bearer("alice"))).json()["state"] == "finished"
    assert (await client.get(url, headers=bearer("bob"))).status_code == 404


# --- changes of the file -----------------------------------------------------------------------------------------


async def status_becomes(client: httpx.AsyncClient, rig: Rig, name: str, status: int) -> None:
    async def is_so() -> bool:
        return (await client.get(rig.url + "/v1/models", headers=bearer(name))).status_code == status

    await until(is_so, f"{name} is answered {status}")


async def test_a_changed_key_file_counts_and_a_broken_one_does_not(
    secured: Rig, client: httpx.AsyncClient, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = asyncio.Event()
    says(secured, "hello world", ending=done.is_set)
    running = asyncio.create_task(ask(client, secured, "alice", stream=True))
    await until(lambda: secured.cluster.seen)
    write_keys(key_file, bob={}, carol={})
    await status_becomes(client, secured, "carol", 200)
    await status_becomes(client, secured, "alice", 401)
    done.set()
    assert "".join(contents(events_of((await running).text))) == "hello world", "what runs is not dropped"
    write_keys(key_file, carol={"sha": 1})
    await until(lambda: "[carol] Object contains unknown field `sha`" in caplog.text)
    await status_becomes(client, secured, "carol", 200)
    write_keys(key_file, alice={})
    await status_becomes(client, secured, "alice", 200)
    await status_becomes(client, secured, "carol", 401)


# --- what is not told --------------------------------------------------------------------------------------------


async def test_no_key_and_no_text_in_logs_or_traces(
    start: StartRig, client: httpx.AsyncClient, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    prompt, answer = "zebra-crossing-prompt", "quagga answer"
    with receiver() as collector:
        telemetry.set_up("gateway", telemetry.TelemetrySettings(endpoint=collector.url))
        try:
            rig = await start(key_file=str(key_file), key_calls_per_s=0.001, key_burst=6)
            says(rig, answer)
            asked = {"messages": [{"role": "user", "content": prompt}]}
            assert (await ask(client, rig, "alice", **asked)).status_code == 200
            assert (await ask(client, rig, "alice", **asked, stream=True, watch=True)).status_code == 200
            assert (await ask(client, rig, "alice", **asked, threshold=0.7)).status_code == 403
            assert (await ask(client, rig, "alice", **asked, service_tier="gold")).status_code == 400
            assert (await ask(client, rig, "nobody", **asked)).status_code == 401
            says(rig, answer, fail="worker_lost")
            assert (await ask(client, rig, "alice", **asked)).status_code == 500
            headers = {**bearer("alice"), "idempotency-key": "an-idempotency-key"}
            says(rig, answer)
            call = await client.post(rig.url + "/v1/chat/completions", json={**CHAT, **asked}, headers=headers)
            assert answer in call.text
            assert (await ask(client, rig, "alice", **asked)).status_code == 429
            await until(lambda: caplog.text.count("POST /v1/chat/completions 429"))
        finally:
            telemetry.shut_down()
    assert len([span for span in collector.spans if span.name == f"chat {MODEL}"]) >= 4
    told = caplog.text + repr(collector.spans)
    assert "key alice" in told, "which key it was, by its name"
    for secret in (
        prompt,
        *answer.split(),
        key_of("alice"),
        key_of("nobody"),
        hash_key(key_of("alice")),
        *headers.values(),
    ):
        assert secret not in told


# --- TLS ---------------------------------------------------------------------------------------------------------


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_tls_serves_streams_and_takes_a_renewed_certificate(
    start: StartRig, tmp_path: Path, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = trustme.CA(), trustme.CA()
    rig = await start(**write_certificate(tmp_path, before))
    assert rig.url.startswith("https://")
    says(rig, "hello world")
    async with httpx.AsyncClient(verify=trusting(before), timeout=30) as trusted:
        response = await trusted.post(rig.url + "/v1/chat/completions", json={**CHAT, "stream": True})
        assert "".join(contents(events_of(response.text))) == "hello world"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get(rig.url + "/health/live")
        with pytest.raises(httpx.TransportError):
            await client.get(rig.url.replace("https", "http") + "/health/live")
        (tmp_path / "cert.pem").write_text("no certificate")
        await until(lambda: "what it said before stays" in caplog.text)
        write_certificate(tmp_path, after)

        async def is_renewed() -> bool:
            try:
                async with httpx.AsyncClient(verify=trusting(after)) as fresh:
                    return (await fresh.get(rig.url + "/health/live")).status_code == 200
            except httpx.ConnectError:
                return False

        await until(is_renewed, "a new connection gets the new certificate")
        assert (await trusted.get(rig.url + "/health/live")).status_code == 200, "an open connection goes on"


# --- limits ------------------------------------------------------------------------------------------------------


async def test_too_long_a_prompt_and_one_connection_too_many_are_refused(
    start: StartRig, client: httpx.AsyncClient
) -> None:
    rig = await start(max_prompt_tokens=20, max_connections=3, public_metrics=False)
    error = check_error(await client.post(rig.url + "/v1/completions", json={"model": MODEL, "prompt": "x" * 21}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "at most 20" in error["message"]
    assert (await client.get(rig.url + "/metrics")).status_code == 404
    port = int(rig.url.rsplit(":", 1)[1])
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    async with httpx.AsyncClient(timeout=30) as other:
        refused = await other.get(rig.url + "/health/live")
        assert check_error(refused, 503)["code"] == "too_many_connections"
        assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
        assert (await client.get(rig.url + "/health/live")).status_code == 200, "who is in stays in"
        idle[0][1].close()

        async def is_served() -> bool:
            return (await other.get(rig.url + "/health/live")).status_code == 200

        await until(is_served, "there is room again")
    idle[1][1].close()
