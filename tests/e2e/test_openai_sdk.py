"""The unmodified OpenAI SDK, and curl, against the running server.

Nothing here knows what the model says: calls are compared with each other at temperature 0.
"""

import asyncio
import json
import math
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

pytestmark = pytest.mark.e2e

QUESTION: Any = [{"role": "user", "content": "What is 12 + 30? What is 7 - 2? What is 3 + 3?"}]
PROMPT = "12 + 30 ="


@pytest.fixture
def client(base_url: str, api_key: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{base_url}/v1", api_key=api_key, timeout=60) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(base_url: str, api_key: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, timeout=60) as client:
        yield client


@pytest.fixture
def model(client: OpenAI) -> str:
    (only,) = client.models.list().data
    assert client.models.retrieve(only.id).id == only.id
    return only.id


def answer_of(client: OpenAI, model: str, **options: Any) -> str:
    completion = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, **options)
    content = completion.choices[0].message.content
    assert content
    return content


# --- answers -----------------------------------------------------------------------------------------------------


def test_a_chat(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    (choice,) = completion.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert completion.usage.completion_tokens > 0


def test_a_completion(client: OpenAI, model: str) -> None:
    completion = client.completions.create(model=model, prompt=PROMPT, max_tokens=32, temperature=0)
    assert completion.object == "text_completion"
    assert completion.choices[0].finish_reason in ("stop", "length")
    assert completion.usage is not None


def test_several_prompts(client: OpenAI, model: str) -> None:
    alone = client.completions.create(model=model, prompt=PROMPT, max_tokens=32, temperature=0).choices[0].text
    both = client.completions.create(model=model, prompt=[PROMPT, PROMPT], max_tokens=32, temperature=0)
    assert [(choice.index, choice.text) for choice in both.choices] == [(0, alone), (1, alone)]


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == answer_of(client, model)
    assert "\ufffd" not in text
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason in ("stop", "length")
    assert all(part.usage is None for part in parts)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens > 0


def test_a_stream_of_a_completion(client: OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=40, temperature=0)
    chunks = list(client.completions.create(model=model, prompt=PROMPT, max_tokens=40, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_stop_string_ends_the_text_before_itself(client: OpenAI, model: str, streamed: bool) -> None:
    full = answer_of(client, model)
    stop = full[len(full) // 2 :][:3]
    expected = full[: full.index(stop)]
    if streamed:
        chunks = list(
            client.chat.completions.create(
                model=model, messages=QUESTION, temperature=0, stop=[stop, "\0never"], stream=True
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        completion = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, stop=stop)
        text, finish = completion.choices[0].message.content or "", completion.choices[0].finish_reason
    assert (text, finish) == (expected, "stop")


@pytest.mark.parametrize("length", [1, 7, 33])
def test_max_tokens_is_honoured_exactly(client: OpenAI, model: str, length: int) -> None:
    completion = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=length, extra_body={"ignore_eos": True}
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == length
    assert completion.choices[0].finish_reason == "length"


def test_two_choices(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=QUESTION, n=2, temperature=0)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.choices[0].message.content == completion.choices[1].message.content
    streamed: dict[int, str] = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model=model, messages=QUESTION, n=2, temperature=0, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.delta.content or ""
    assert list(streamed.values()) == [choice.message.content for choice in completion.choices]


def test_logprobs_of_a_chat(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=1
    )
    choice = completion.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    spoken = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spoken.decode() == choice.message.content
    assert completion.usage is not None
    assert len(choice.logprobs.content) == completion.usage.completion_tokens
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert math.isfinite(entry.logprob)


def test_logprobs_of_a_completion(client: OpenAI, model: str) -> None:
    choice = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0, logprobs=1).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)


def test_our_own_fields_go_beside_openais(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(
        model=model, messages=QUESTION, service_tier="priority", extra_body={"slo_ms": 120_000, "threshold": 0.9}
    )
    extra = (completion.model_extra or {})["tediserve"]
    assert extra["deadline_met"] is True
    assert extra["steps"] > 0
    assert completion.service_tier == "priority"


def test_a_result_is_kept(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    found = client.get(f"/results/{completion.id}", cast_to=object)
    assert isinstance(found, dict)
    assert found["state"] == "finished"
    assert found["choices"][0]["message"]["content"] == completion.choices[0].message.content


def test_a_repeat_with_the_same_key_is_the_same_call(client: OpenAI, model: str) -> None:
    headers = {"Idempotency-Key": "e2e-repeat"}
    first = client.chat.completions.create(model=model, messages=QUESTION, extra_headers=headers)
    again = client.chat.completions.create(model=model, messages=QUESTION, extra_headers=headers)
    assert (again.id, again.choices) == (first.id, first.choices)
    with pytest.raises(openai.UnprocessableEntityError, match="another body"):
        client.chat.completions.create(model=model, messages=QUESTION, extra_headers=headers, seed=5)


async def test_the_async_client_streams(async_client: AsyncOpenAI, model: str) -> None:
    async def text() -> str:
        stream = await async_client.chat.completions.create(model=model, messages=QUESTION, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    texts = await asyncio.gather(*(text() for _ in range(4)))
    assert len(set(texts)) == 1
    assert texts[0]


# --- errors ------------------------------------------------------------------------------------------------------


def test_an_over_long_prompt_names_both_lengths(client: OpenAI, model: str) -> None:
    long: Any = [{"role": "user", "content": "1 + 2 " * 5000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=long)
    error = caught.value
    assert (error.code, error.param, error.type) == ("context_length_exceeded", "messages", "invalid_request_error")
    assert isinstance(error.body, dict)
    has, most = (int(number) for number in re.findall(r"\d+", error.body["message"])[:2])
    assert has > most > 0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
    ],
)
def test_a_wrong_option_is_a_bad_request_that_names_it(
    client: OpenAI, model: str, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=QUESTION, **options)
    assert caught.value.param == param
    assert param in caught.value.message
    assert caught.value.request_id


def test_an_unknown_model_is_a_bad_request(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="gpt-99"):
        client.chat.completions.create(model="gpt-99", messages=QUESTION)


def test_an_unknown_url_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Unknown URL"):
        client.get("/nowhere", cast_to=object)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-99")


# --- watching ----------------------------------------------------------------------------------------------------


def test_a_watched_canvas_shows_each_step_beside_the_usual_chunks(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 64, "stream": True}
    ours = {"watch": True, "threshold": 0.9, "ignore_eos": True}
    chunks = list(client.chat.completions.create(**options, extra_body=ours))
    plain = list(client.chat.completions.create(**options, extra_body=ours | {"watch": False}))

    def text(chunks: list[Any]) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    assert text(chunks) == text(plain)
    extras = [chunk.tediserve for chunk in chunks if getattr(chunk, "tediserve", None)]
    assert extras[0] == {"canvas": {"tokens": 64, "block_size": 32}}
    steps = [extra["step"] for extra in extras if "step" in extra]
    assert [step["step"] for step in steps] == list(range(1, extras[-1]["steps"] + 1))
    commits = [commit for step in steps for commit in step["commits"]]
    assert sorted(commit["position"] for commit in commits) == list(range(64))
    assert all(0 < commit["confidence"] <= 1 for commit in commits)
    assert not any(getattr(chunk, "tediserve", {}).get("step") for chunk in plain if hasattr(chunk, "tediserve"))


# --- curl --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_shows_well_formed_events(base_url: str, client_environment: dict[str, str], model: str) -> None:
    body = {"model": model, "messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}}
    command = ["curl", "-sN", "-i", "--max-time", "60", f"{base_url}/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    command += ["-H", f"Authorization: Bearer {client_environment['OPENAI_API_KEY']}"]
    done = subprocess.run(command, env=client_environment, capture_output=True, check=True, text=True)
    head, _, events = done.stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "content-type: text/event-stream" in head
    assert "x-request-id: " in head
    *chunks, done, nothing = events.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    for chunk in chunks:
        assert json.loads(chunk.removeprefix("data: "))["object"] == "chat.completion.chunk"
