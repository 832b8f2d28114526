"""One request to the endpoint, and what came of it. Nothing is tried twice.

aiohttp, as the client shares the machine with what it measures: a call cost 0.3 ms of processor time with it, and with
httpx 2.9 ms at 10 calls in flight and 11.5 ms at 200.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec

from services.settings import ConfigError
from tools.loadgen.asks import Ask

# Servers end connections that are idle; ours (uvicorn) after 5 s. Sooner, so that none ends as a request goes out.
_KEEP_ALIVE_S = 2.0
_MODELS_LIMIT_S = 10.0
_OTHER_FORM = (LookupError, TypeError, AttributeError, ValueError, msgspec.DecodeError)


class Failed(Exception):
    """The request has no answer. `kind`: what errors are counted by."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Answer(NamedTuple):
    """What the endpoint told. Endpoints other than ours tell nothing of steps, thresholds and moves."""

    text: str
    tokens: int
    first_text_s: float | None  # from sending to the first text; None: not streamed, or no text
    steps: int | None
    mean_threshold: float | None
    moves: int | None


class Endpoint:
    """A connection to the server; see `open_endpoint`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, stream: bool) -> None:
        self._url = url
        self._session = session
        self._stream = stream

    async def choose_model(self, wanted: str | None) -> str:
        """The model to ask: `wanted`, or the first that is served. Raises ConfigError."""
        try:
            async with self._session.get("/v1/models", timeout=aiohttp.ClientTimeout(_MODELS_LIMIT_S)) as response:
                served = [str(model["id"]) for model in (await _json(response))["data"]]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConfigError(f"nothing answers at {self._url}: {error or 'no answer in time'}") from None
        except (Failed, *_OTHER_FORM) as error:
            raise ConfigError(f"{self._url}/v1/models does not answer as OpenAI's API does: {error}") from None
        if not served or (wanted is not None and wanted not in served):
            offered = ", ".join(served) or "none"
            raise ConfigError(f"model: {wanted!r} is not served at {self._url}, which has: {offered}")
        return wanted or served[0]

    async def ask(self, ask: Ask, options: dict[str, Any]) -> Answer:
        """Sends it with `options` beside the prompt. Raises Failed."""
        body = ask.content | options
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        started = time.perf_counter()
        try:
            async with self._session.post(ask.path, json=body) as response:
                if self._stream and response.status == 200:
                    return await _streamed(response, started)
                return _answer(await _json(response))
        except TimeoutError:
            raise Failed("timeout") from None
        except aiohttp.ClientConnectorError:
            raise Failed("not connected") from None
        except aiohttp.ClientError:
            raise Failed("connection lost") from None
        except _OTHER_FORM:
            raise Failed("200 in another form than OpenAI's") from None


@asynccontextmanager
async def open_endpoint(
    url: str, *, max_in_flight: int, timeout_s: float, stream: bool = False, api_key: str | None = None
) -> AsyncIterator[Endpoint]:
    """`timeout_s`: of a whole request, from its sending on."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=max_in_flight, keepalive_timeout=_KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        session = aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=headers)
    except (ValueError, AssertionError):
        await connector.close()
        raise ConfigError(f"url: {url!r} is not like http://127.0.0.1:8000") from None
    async with session:
        yield Endpoint(url, session, stream=stream)


async def _json(response: aiohttp.ClientResponse) -> Any:
    """Raises Failed."""
    content = await response.read()
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        raise Failed(f"{response.status} without JSON") from None
    if response.status != 200:
        raise Failed(f"{response.status} {_code(body)}")
    return body


def _code(body: Any) -> str:
    """Of an error in OpenAI's envelope."""
    error = body.get("error") if isinstance(body, dict) else None
    return str((error.get("code") or error.get("type")) if isinstance(error, dict) else error)


async def _streamed(response: aiohttp.ClientResponse, started: float) -> Answer:
    """Puts the chunks together into one body. Raises Failed, or one of _OTHER_FORM."""
    texts: list[str] = []
    first_text_s = None
    told: dict[str, Any] = {}
    async for chunk in _chunks(response):
        if "error" in chunk:
            raise Failed(f"stream {_code(chunk)}")
        told |= {name: chunk[name] for name in ("usage", "tediserve") if chunk.get(name)}
        for choice in chunk["choices"]:
            if text := choice.get("text") or choice.get("delta", {}).get("content"):
                texts.append(text)
                first_text_s = first_text_s or time.perf_counter() - started
    return _answer(told | {"choices": [{"text": "".join(texts)}]})._replace(first_text_s=first_text_s)


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The events of a stream that ends in [DONE]. Raises Failed where it does not."""
    async for line in response.content:
        if line.startswith(b"data: "):
            if line.strip() == b"data: [DONE]":
                return
            yield msgspec.json.decode(line.removeprefix(b"data: "))
    raise Failed("stream cut")


def _answer(body: Any) -> Answer:
    """Raises one of _OTHER_FORM."""
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    tokens = int((body.get("usage") or {}).get("completion_tokens", 0))
    ours = body.get("tediserve") or {}
    return Answer(text or "", tokens, None, ours.get("steps"), ours.get("mean_threshold"), ours.get("moves"))
