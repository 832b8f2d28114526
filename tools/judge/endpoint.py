"""Asks the judge for a verdict on one answer, over HTTP.

1. Temperature 0. The strictest `response_format` that the endpoint takes: one that refuses it is asked for less from
   then on (json_schema, json_object, none).
2. A malformed reply is asked for again with a reminder, as the same question would only get the same reply.
3. What may pass (429, 408, 409, 5xx, no connection, no answer in time) is tried again after twice the time each, with
   jitter; a `Retry-After` is kept. No wait is longer than `max_backoff_s`, and there are `attempts` in all.
4. An endpoint that refuses us altogether (401, 403, 404) ends the run; one that refuses this question only ends it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple

import aiohttp
import msgspec

from services.settings import ConfigError
from tools.judge.rubric import REMINDER, RESPONSE_FORMATS, Verdict, messages, read_verdict

_MAY_PASS = (408, 409, 429, 500, 502, 503, 504, 529)
_REFUSES_US = (401, 403, 404)


class NoVerdict(Exception):
    """The judge has not given one; says why."""


class Policy(NamedTuple):
    """How often and how long an answer's verdict is tried for."""

    attempts: int = 6
    first_backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    timeout_s: float = 120.0  # of one attempt


class _Again(Exception):
    """This attempt failed, another may not."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s  # as the endpoint wishes


class Judge:
    """See `open_judge`."""

    def __init__(self, session: aiohttp.ClientSession, model: str, policy: Policy, response_format: str) -> None:
        self._session = session
        self._model = model
        self._policy = policy
        names = list(RESPONSE_FORMATS)
        self._formats = names[names.index(response_format) :] if response_format != "auto" else names
        self._rng = Random()
        self.retries = 0  # so far, of all answers

    async def ask(self, question: str, answer: str, reference: str | None) -> Verdict:
        """Raises NoVerdict, and ConfigError where there is no use in asking on."""
        asked = messages(question, answer, reference)
        talk = asked
        for attempt in range(self._policy.attempts):
            try:
                reply = await self._reply(talk)
            except _Again as failed:
                why, talk = str(failed), asked
                wait_s = self._wait_s(attempt, failed.after_s)
            else:
                if (verdict := read_verdict(reply)) is not None:
                    return verdict
                why = f"malformed: {reply[:120]!r}"
                talk = [*asked, {"role": "assistant", "content": reply}, {"role": "user", "content": REMINDER}]
                wait_s = 0.0
            if attempt + 1 < self._policy.attempts:
                self.retries += 1
                await asyncio.sleep(wait_s)
        raise NoVerdict(f"no verdict in {self._policy.attempts} attempts, the last was {why}")

    def _wait_s(self, attempt: int, wished_s: float | None) -> float:
        most = self._policy.max_backoff_s
        backoff_s = min(most, self._policy.first_backoff_s * 2.0**attempt) * self._rng.uniform(0.5, 1.0)
        return backoff_s if wished_s is None else min(most, max(backoff_s, wished_s))

    async def _reply(self, talk: list[dict[str, str]]) -> str:
        """Raises _Again, NoVerdict, ConfigError."""
        while True:
            name = self._formats[0]
            body: dict[str, Any] = {"model": self._model, "messages": talk, "temperature": 0}
            if (response_format := RESPONSE_FORMATS[name]) is not None:
                body["response_format"] = response_format
            status, after_s, content = await self._post(body)
            if status == 200:
                return _text(content)
            told = f"{status}: {content[:200].decode(errors='replace')}"
            if status in (400, 422) and name != "none" and b"response_format" in content:
                if self._formats[0] == name:  # others may have found out meanwhile
                    self._formats = self._formats[1:] or ["none"]
                continue
            if status in _MAY_PASS:
                raise _Again(told, after_s)
            if status in _REFUSES_US:
                raise ConfigError(f"the judge refuses to answer, {told}")
            raise NoVerdict(told)

    async def _post(self, body: dict[str, Any]) -> tuple[int, float | None, bytes]:
        """Status, `Retry-After` and content. Raises _Again."""
        try:
            async with self._session.post("chat/completions", json=body) as response:
                return response.status, _seconds(response.headers.get("retry-after")), await response.read()
        except TimeoutError:
            raise _Again(f"no answer within {self._policy.timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise _Again(f"{type(error).__name__}: {error}") from None


def _text(content: bytes) -> str:
    """Of a chat completion. Raises _Again where it is none."""
    try:
        return msgspec.json.decode(content)["choices"][0]["message"]["content"] or ""
    except (LookupError, TypeError, ValueError):
        raise _Again(f"no chat completion: {content[:120]!r}") from None


def _seconds(retry_after: str | None) -> float | None:
    """Of a `Retry-After` header; None where it has none, or a date."""
    try:
        return max(0.0, float(retry_after or ""))
    except ValueError:
        return None


@asynccontextmanager
async def open_judge(
    url: str, model: str, policy: Policy, *, concurrency: int, api_key: str = "", response_format: str = "auto"
) -> AsyncIterator[Judge]:
    """`url`: up to and including /v1. `response_format`: a key of RESPONSE_FORMATS, or auto. Raises ConfigError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=concurrency)
    timeout = aiohttp.ClientTimeout(total=policy.timeout_s)
    try:
        session = aiohttp.ClientSession(url.rstrip("/") + "/", connector=connector, timeout=timeout, headers=headers)
    except (ValueError, AssertionError):
        await connector.close()
        raise ConfigError(f"url: {url!r} is not like http://127.0.0.1:8000/v1") from None
    async with session:
        yield Judge(session, model, policy, response_format)
