"""What the whole stack tells of a call: one tree of spans over all its services, log lines of that trace, metrics."""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from contracts import messages as m
from contracts import subjects
from services import telemetry as t
from services.profile import load_profile
from services.telemetry import ADMISSION, BLOCK, MOVE, QUEUE, RESULT
from tests.integration.stack import Stack, running_stack
from tests.otlp_receiver import ReceivedSpan, Receiver, receiver
from tests.processes import free_port
from tests.waiting import until, wait_until
from tools.bench.stack import ports_in_a_row

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

QUESTION: Any = [{"role": "user", "content": "What is 12 + 30?"}]
CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # trace and span
THRESHOLD = 0.9
NUM_BLOCKS = 3
MANY_BLOCKS = 8
SERVER = 2  # OTLP's number for that kind of span


METRICS_PORTS = {
    "scheduler": free_port(),
    "threshold_controller": free_port(),
    "step_predictor": free_port(),
    "worker": ports_in_a_row(2)[0],  # of the first; the second's is the next
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiver() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, profile: Path, collector: Receiver) -> Iterator[Stack]:
    with running_stack(
        tmp_path_factory.mktemp("traced"),
        profile,
        TEDISERVE_TELEMETRY_ENDPOINT=collector.url,
        TEDISERVE_TELEMETRY_SEND_EVERY_S="0.1",
        TEDISERVE_SCHEDULER_ADMISSION="reject",
        TEDISERVE_LOG_LEVEL="DEBUG",
        **{f"TEDISERVE_{name.upper()}_METRICS_PORT": str(port) for name, port in METRICS_PORTS.items()},
    ) as stack:
        asyncio.run(stack.until_whole())
        yield stack


@pytest.fixture
def client(traced: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{traced.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def block_size(profile: Path) -> int:
    return load_profile(profile).decoding.block_size


def tree_of(collector: Receiver, trace_id: str, *names: str) -> tuple[ReceivedSpan, list[ReceivedSpan]]:
    """The call's span, and those below it in the order of their beginning, once they are the named ones."""

    def parts() -> list[ReceivedSpan]:
        return [span for span in there() if span.kind != SERVER]

    def there() -> list[ReceivedSpan]:
        return sorted((span for span in list(collector.spans) if span.trace_id == trace_id), key=lambda s: s.began_at)

    def is_whole() -> bool:
        return len(there()) > len(parts()) and sorted(span.name for span in parts()) == sorted(names)

    try:
        wait_until(is_whole, limit_s=20)
    except AssertionError:
        raise AssertionError(f"wanted {names}, there are {there()}") from None
    (root,) = (span for span in there() if span.kind == SERVER)
    assert {span.parent_id for span in parts()} == {root.span_id}
    return root, parts()


def named(name: str, spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def traceparent(trace_id: str) -> str:
    return f"00-{trace_id}-{CALLER[1]}-01"


def line_with(log: str, *words: str) -> str:
    return next(line for line in log.splitlines() if all(word in line for word in words))


def test_a_streamed_call_is_one_tree_below_its_callers_span(
    client: OpenAI, traced: Stack, collector: Receiver, profile: Path, block_size: int
) -> None:
    model = client.models.list().data[0].id
    called_at = time.time()
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            seed=7,
            max_tokens=NUM_BLOCKS * block_size,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"traceparent": traceparent(CALLER[0])},
            extra_body={"ignore_eos": True, "threshold": THRESHOLD, "slo_ms": 60_000},
        )
    )
    ended_at = time.time()
    told: Any = chunks[-1]
    root, parts = tree_of(collector, CALLER[0], ADMISSION, QUEUE, *[BLOCK] * NUM_BLOCKS, RESULT)

    assert (root.name, root.parent_id) == (f"chat {model}", CALLER[1])
    assert not any(span.failed for span in [root, *parts])
    services = {span.name: span.resource["service.name"] for span in [root, *parts]}
    assert services == {
        root.name: "tediserve-gateway",
        ADMISSION: "tediserve-gateway",
        QUEUE: "tediserve-scheduler",
        BLOCK: "tediserve-worker",
        RESULT: "tediserve-worker",
    }

    request_id = chunks[0].id.removeprefix("chatcmpl-")
    assert root.attributes == {
        t.GEN_AI_OPERATION: "chat",
        t.GEN_AI_PROVIDER: "tediserve",
        t.GEN_AI_REQUEST_MODEL: model,
        t.GEN_AI_REQUEST_MAX_TOKENS: NUM_BLOCKS * block_size,
        t.GEN_AI_REQUEST_TEMPERATURE: 0.0,
        t.GEN_AI_REQUEST_SEED: 7,
        t.GEN_AI_REQUEST_CHOICES: 1,
        t.GEN_AI_REQUEST_STREAM: True,
        t.GEN_AI_RESPONSE_ID: chunks[0].id,
        t.GEN_AI_RESPONSE_MODEL: model,
        t.GEN_AI_FINISH_REASONS: ["length"],
        t.GEN_AI_INPUT_TOKENS: told.usage.prompt_tokens,
        t.GEN_AI_OUTPUT_TOKENS: NUM_BLOCKS * block_size,
        t.HTTP_STATUS: 200,
        t.PRIORITY: root.attributes[t.PRIORITY],
        t.SLO_S: pytest.approx(60.0, abs=1e-3),
        t.DEADLINE_MET: True,
        t.MEAN_THRESHOLD: THRESHOLD,
        t.MOVES: 0,
        t.ATTEMPT: 1,
    }
    (queue,) = named(QUEUE, parts)
    instance_id = queue.attributes[t.INSTANCE_ID]
    assert instance_id in traced.worker_pids()
    assert queue.attributes == {
        t.REQUEST_ID: request_id,
        t.ATTEMPT: 1,
        t.INSTANCE_ID: instance_id,
        t.PRIORITY: root.attributes[t.PRIORITY],
        t.REASON: "new",
    }
    blocks = named(BLOCK, parts)
    steps = [(block.attributes.pop(t.RECOMPUTE_STEPS), block.attributes.pop(t.CACHE_STEPS)) for block in blocks]
    assert sum(map(sum, steps)) == told.tediserve["steps"] >= NUM_BLOCKS
    assert all(recomputed >= 1 for recomputed, _ in steps)
    assert [block.attributes for block in blocks] == [
        {
            t.REQUEST_ID: request_id,
            t.ATTEMPT: 1,
            t.INSTANCE_ID: instance_id,
            t.TP_DEGREE: load_profile(profile).engine.tp_degree,
            t.BLOCK_INDEX: index,
            t.MEAN_THRESHOLD: pytest.approx(THRESHOLD),
        }
        for index in range(NUM_BLOCKS)
    ]
    (result,) = named(RESULT, parts)
    assert result.attributes == {
        t.REQUEST_ID: request_id,
        t.STATE: "finished",
        t.REASON: "",
        t.BLOCKS_DONE: NUM_BLOCKS,
        t.MOVES: 0,
    }

    assert called_at <= root.began_at == queue.began_at <= blocks[0].began_at
    assert root.ended_at <= ended_at + 0.1
    for earlier, later in zip(blocks, [*blocks[1:], result], strict=True):
        assert earlier.ended_at <= later.began_at + 0.02, "one thing after another"  # two clocks
    assert all(block.ended_at > block.began_at for block in blocks)
    assert "12 + 30" not in repr([root, *parts])

    log = (traced.data / "log" / "gateway.log").read_text()
    assert f"[trace {CALLER[0]}]" in line_with(log, "POST /v1/chat/completions", request_id)
    log = (traced.data / "log" / "scheduler.log").read_text()
    assert f"[trace {CALLER[0]}]" in line_with(log, "SendAssign", request_id)


def test_a_call_that_is_refused_ends_with_what_was_wrong(client: OpenAI, collector: Receiver) -> None:
    trace_id = f"{1:032x}"
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=QUESTION,
            extra_headers={"traceparent": traceparent(trace_id)},
            extra_body={"slo_ms": 1},
        )
    root, (admission,) = tree_of(collector, trace_id, ADMISSION)
    assert root.failed
    assert root.attributes["error.type"] == "slo_too_short"
    assert root.attributes[t.HTTP_STATUS] == 429
    assert root.attributes[t.DEADLINE_MET] is False
    assert not admission.failed, "it was refused later, by the scheduler"


COUNTED = {
    "gateway": {
        'tediserve_e2e_request_latency_seconds_count{tier="default"}',
        'tediserve_request_slo_total{outcome="met",tier="default"}',
        "tediserve_request_steps_count",
        "tediserve_prompt_tokens_total",
        "tediserve_generation_tokens_total",
        'tediserve_requests_ended_total{reason="length",state="finished"}',
    },
    "scheduler": {
        'tediserve_request_queue_time_seconds_count{priority="0"}',
        "tediserve_scheduler_instances",
        'tediserve_lease_held{lease="scheduler"}',
    },
    "threshold_controller": {'tediserve_lease_held{lease="threshold-controller"}'},
    "step_predictor": {"tediserve_step_predictor_error_ratio_count"},
    "worker": {"tediserve_worker_step_threshold_count", "tediserve_worker_tokens_committed_total"},
}


async def test_a_call_is_counted_by_every_service(
    client: OpenAI, traced: Stack, profile: Path, block_size: int
) -> None:
    services = COUNTED.keys() - (set() if (profile / "step_predictor.onnx").exists() else {"step_predictor"})
    before = {service: samples(traced, service) for service in services}
    for seed in range(2):  # whichever instances take them
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=QUESTION,
            seed=seed,
            max_tokens=NUM_BLOCKS * block_size,
            extra_body={"ignore_eos": True, "slo_ms": 60_000},
        )

    def uncounted() -> list[str]:
        found = []
        for service in services:
            now = samples(traced, service)
            for name in COUNTED[service]:
                least = before[service].get(name, 0) + 1 if name.partition("{")[0].endswith(("_total", "_count")) else 1
                found += [name] if now.get(name, 0) < least else []
        return found

    with contextlib.suppress(AssertionError):
        await until(lambda: not uncounted(), "all is counted", 20)
    assert uncounted() == []


def samples(stack: Stack, service: str) -> dict[str, float]:
    """What a service tells, by name and labels; over all workers, and over the labels of an error."""
    first = METRICS_PORTS.get(service, stack.port)
    found: dict[str, float] = {}
    for port in (first, first + 1) if service == "worker" else (first,):
        told = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        for name, value in re.findall(r"^(\w+(?:{[^}]*})?) (\S+)$", told, re.MULTILINE):
            name = re.sub(r"(_error_ratio_count){.*}", r"\1", name)
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def test_a_move_lies_between_the_blocks_of_two_instances(
    traced: Stack, collector: Receiver, block_size: int
) -> None:
    """The instance is told to drain while it runs the call, whose tokens are drawn too wildly for large steps."""
    trace_id = f"{2:032x}"
    async with AsyncOpenAI(base_url=f"{traced.url}/v1", api_key="none", timeout=60) as client, traced.bus() as bus:
        model = (await client.models.list()).data[0].id
        chunks = await client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=2,
            seed=7,
            max_tokens=MANY_BLOCKS * block_size,
            stream=True,
            extra_headers={"traceparent": traceparent(trace_id)},
            extra_body={"ignore_eos": True, "threshold": THRESHOLD, "watch": True},
        )
        left = ""
        told: dict[str, Any] = {}
        async for chunk in chunks:
            told = chunk.model_dump().get("tediserve") or told
            if not left and "step" in told:
                left = told["step"]["instance_id"]
                await bus.request(subjects.drain(left), m.Drain(), m.Accepted, limit_s=5)
    assert told["moves"] == 1
    root, parts = tree_of(collector, trace_id, ADMISSION, QUEUE, MOVE, *[BLOCK] * MANY_BLOCKS, RESULT)

    (move,) = named(MOVE, parts)
    taken = move.attributes[t.INSTANCE_ID]
    assert taken != left
    assert move.attributes[t.REASON] in ("moved", "released")
    blocks = named(BLOCK, parts)
    assert [block.attributes[t.BLOCK_INDEX] for block in blocks] == list(range(MANY_BLOCKS)), "each once"
    before = [block for block in blocks if block.ended_at <= move.began_at + 1e-3]
    assert {block.attributes[t.INSTANCE_ID] for block in before} == {left}
    assert {block.attributes[t.INSTANCE_ID] for block in blocks[len(before) :]} == {taken}
    assert all(block.resource["service.instance.id"] == block.attributes[t.INSTANCE_ID] for block in blocks)
    assert root.attributes[t.MOVES] == 1


async def test_every_line_about_a_call_names_its_trace(traced: Stack, block_size: int) -> None:
    """From its arrival to its cancellation; the controller's lines are about all requests of an instance."""
    trace_id = f"{3:032x}"
    request_id = ""
    async with AsyncOpenAI(base_url=f"{traced.url}/v1", api_key="none", timeout=60) as client:
        chunks = await client.chat.completions.create(
            model=(await client.models.list()).data[0].id,
            messages=QUESTION,
            temperature=2,
            max_tokens=MANY_BLOCKS * block_size,
            stream=True,
            extra_headers={"traceparent": traceparent(trace_id)},
            extra_body={"ignore_eos": True, "threshold": THRESHOLD, "watch": True},
        )
        async for chunk in chunks:
            request_id = chunk.id.removeprefix("chatcmpl-")
            if "step" in (chunk.model_dump().get("tediserve") or {}):
                break
        await chunks.close()

    def lines() -> list[str]:
        logs = [path for path in (traced.data / "log").glob("*.log") if path.stem != "threshold-controller"]
        return [line for path in logs for line in path.read_text().splitlines() if request_id in line]

    def told(*words: str) -> bool:
        return any(all(word in line for word in words) for line in lines())

    for words in ("POST /v1/chat/completions", "SendAssign", "Purge"):
        await until(lambda w=words: told(w), f"{words} is logged", 20)  # type: ignore[misc]
    # unless the worker was faster than we hung up
    await until(lambda: told("dropped", "cancelled") or told("Purge", "finished"), "the worker has dropped it", 20)
    assert [line for line in lines() if f"[trace {trace_id}]" not in line] == []
