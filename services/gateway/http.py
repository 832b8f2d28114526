"""The gateway's HTTP side: routes, errors, streams, and clients that hang up.

1. Every answer carries `x-request-id`, and every error OpenAI's envelope.
2. A stream's headers go out only after its requests are in, and where there is a deadline, after `refusal_limit_s` in
   which the scheduler may refuse it; text goes out as records come; while nothing comes, a comment every
   `ping_every_s`.
3. The client's end of the connection is watched while a call is answered, streamed or not: who hangs up, cancels.
4. Where there are API keys, every route wants one that is not marked as public. A result is its asker's alone.
5. A stream that fails ends with an error event and without `[DONE]`, so it never looks like a whole answer.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable
from typing import Any, TypeAlias

import msgspec
from litestar import Litestar, MediaType, Request, Response, get, post, route
from litestar.connection import ASGIConnection
from litestar.enums import ScopeType
from litestar.exceptions import HTTPException, InternalServerException
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest

from contracts.messages import ProgressRecord
from services import telemetry
from services.bus import Stored, trace_parent
from services.gateway.access import Access
from services.gateway.answers import DONE, PING, PREFIXES, Answer, event, extra_of, failure
from services.gateway.config import GatewayConfig
from services.gateway.keys import ApiKey
from services.gateway.openai_api import Api, ApiError, Arrival, Call, Facts, Kind
from services.gateway.page import PUBLIC, page_routes
from services.gateway.policy import (
    CallState,
    ClientGone,
    Command,
    EndCall,
    EndChoice,
    FailCall,
    SendText,
    ShowStep,
    is_answer,
)
from services.gateway.schema import ChatOperation, ObjectOperation, ResultOperation, TextOperation, openapi_config
from services.gateway.service import GatewayService, LiveCall, call_id_for_key
from services.gateway.spans import begin_call, end_call, refuse_call
from services.gateway.text import TextCodec
from services.profile import Profile

logger = logging.getLogger(__name__)

Connection: TypeAlias = ASGIConnection[Any, Any, Any, Any]

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SANE_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_CALL_ID = re.compile(r"(?:chatcmpl-|cmpl-)?([0-9a-f]{32})")
_LONG_BODY = 16_384  # bytes; tokenising more would hold up other calls, so it runs in a thread
_CALL_ROUTES = ("/v1/chat/completions", "/v1/completions")
_ROUTES = (*_CALL_ROUTES, "/v1/models", "/v1/results", "/v1/cluster", "/health", "/metrics", "/schema")

HTTP_REQUESTS = Counter("tediserve_http_requests", "HTTP requests answered", ["route", "status"])
HTTP_OPEN = Gauge("tediserve_http_open_requests", "HTTP requests being answered")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
HTTP_S = Histogram(
    "tediserve_http_request_seconds", "From request to the end of its answer", ["route"], buckets=_SECONDS
)
FIRST_BLOCK_S = Histogram(
    "tediserve_gateway_first_block_seconds", "From a call's arrival to its first text", buckets=_SECONDS
)


class Gateway:
    """What the routes need."""

    def __init__(
        self,
        config: GatewayConfig,
        profile: Profile,
        codec: TextCodec,
        api: Api,
        service: GatewayService,
        access: Access,
    ) -> None:
        self.config = config
        self.profile = profile
        self.codec = codec
        self.api = api
        self.service = service
        self.access = access
        self.started_at = int(time.time())

    async def call(self, kind: Kind, request: Request[Any, Any, Any]) -> ASGIApp:
        """Takes a call in. Raises ApiError."""
        _check_media_type(request)
        self.service.check_open()
        api_key = _key_of(request)
        self.access.check_room(api_key, 1)
        self.access.take_call(api_key)
        raw = await self._body(request)
        key, call_id = self._identify(request, api_key)
        arrival = Arrival(call_id, self.service.gateway_id, time.time(), secrets.randbits(31), key is not None, api_key)
        if len(raw) > _LONG_BODY:
            call = await asyncio.to_thread(self.api.read, kind, raw, arrival)
        else:
            call = self.api.read(kind, raw, arrival)
        request.scope["state"]["call"] = PREFIXES[kind] + call_id
        sent_parent = request.headers.get("traceparent", "")
        span = begin_call(call, sent_parent if telemetry.TRACE_PARENT.fullmatch(sent_parent) else "")
        trace_parent.set(span.traceparent)
        began_at = time.time()
        try:
            live = await (self.service.open(call) if key is None else self.service.attach(call))
        except ApiError as error:
            refuse_call(span, error.status, error.code)
            raise
        telemetry.record(telemetry.ADMISSION, began_at=began_at, ended_at=time.time())
        return CallResponse(self, live, call, self._answer(live, call), span)

    def _answer(self, live: LiveCall, call: Call) -> Answer:
        created_at = live.bases[0].created_at
        return Answer(
            call.call_id,
            call.facts,
            self.codec,
            model=self.profile.model,
            created_at=created_at,
            include_usage=call.include_usage,
        )

    async def _body(self, request: Request[Any, Any, Any]) -> bytes:
        try:
            async with asyncio.timeout(self.config.body_limit_s):
                return await request.body()
        except InternalServerException:  # Litestar's word for a client that left, or broke off in a chunk
            raise ApiError(400, "The request's body ended too early.", code="incomplete_body") from None
        except TimeoutError:
            raise ApiError(
                408, f"The request's body did not come within {self.config.body_limit_s:g} s.", retry_helps=False
            ) from None

    def _identify(self, request: Request[Any, Any, Any], api_key: ApiKey) -> tuple[str | None, str]:
        """The call's idempotency key, if it has one, and its id."""
        key = request.headers.get("idempotency-key")
        if key is None:
            return None, secrets.token_hex(16)
        if not _SANE_KEY.fullmatch(key):
            raise ApiError(400, "Invalid 'Idempotency-Key': give 1 to 255 printable ASCII characters.")
        caller = api_key.name or request.headers.get("authorization", "")
        return key, call_id_for_key(self.config.idempotency_secret, caller, key)

    # --- results ---------------------------------------------------------------------------------------------------

    async def result(self, result_id: str, api_key: ApiKey, *, cancel: bool) -> dict[str, Any]:
        """What became of a call of this key, from its records. Raises ApiError."""
        self.access.take_call(api_key)
        match = _CALL_ID.fullmatch(result_id)
        found = [] if match is None else await self.service.result(match[1])
        if match is None or not found or _owner(found) != api_key.name:
            raise ApiError(404, f"No result with the id '{result_id[:100]}'.", param="id", code="result_not_found")
        if cancel:
            found = await self.service.cancel(match[1], found)
        return self._describe(match[1], found)

    def _describe(self, call_id: str, found: list[Stored[ProgressRecord]]) -> dict[str, Any]:
        facts = Facts.decode(found[0].message.fingerprint) or Facts(body="", n=len(found))
        facts = msgspec.structs.replace(facts, n=len(found))
        state = CallState(facts, self.codec, detached=True)
        for choice, stored in zip(state.choices, found, strict=True):
            choice.take(stored.message, stored.seq, stored.message.written_at)
        failed = _cause([stored.message for stored in found])
        answer = Answer(
            call_id,
            facts,
            self.codec,
            model=self.profile.model,
            created_at=found[0].message.created_at,
            include_usage=False,
        )
        error = failure(failed.reason, failed).envelope["error"] if failed is not None else None
        return answer.whole(state) | {"state": _state(state, found, failed), "error": error}


def _key_of(request: Request[Any, Any, Any]) -> ApiKey:
    """The caller's, as the guard has found it."""
    key: ApiKey = request.scope["state"]["key"]
    return key


def _owner(found: list[Stored[ProgressRecord]]) -> str:
    facts = Facts.decode(found[0].message.fingerprint)
    return "" if facts is None else facts.owner


def _cause(records: list[ProgressRecord]) -> ProgressRecord | None:
    """Of a call with these records: the one that made it fail, not one of a choice that had to follow."""
    failed = [record for record in records if record.is_final and not is_answer(record)]
    return min(failed, key=lambda record: record.reason == "sibling_failed", default=None)


def _state(state: CallState, found: list[Stored[ProgressRecord]], failed: ProgressRecord | None) -> str:
    """Of the whole call: queued, running, finished, cancelled or failed."""
    if failed is not None:
        return failed.state
    if all(choice.finish is not None for choice in state.choices):
        return "finished"
    return "running" if any(stored.seq for stored in found) else "queued"


class CallResponse:
    """Answers one call, whole or as a stream. An ASGI app."""

    def __init__(self, gateway: Gateway, live: LiveCall, call: Call, answer: Answer, span: telemetry.Span) -> None:
        self._service = gateway.service
        self._config = gateway.config
        self._live = live
        self._call = call
        self._answer = answer
        self._span = span
        self._status = 200  # unless it fails before the first byte
        self._error = ""  # a word for what went wrong
        self._arrived_at = time.monotonic()
        self._choices_ended = 0
        self._any_text = False
        self._gone = False  # the client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch_for_hang_up(receive))
        try:
            await (self._stream(send) if self._call.stream else self._whole(send))
        except Exception:
            self._status, self._error = _INTERNAL.status, "internal_error"
            raise
        finally:
            scope["state"]["client_left"] = self._gone
            watcher.cancel()
            self._service.client_left(self._live)
            error = "client_gone" if self._gone else self._error
            end_call(self._span, self._call, self._live.state, status=self._status, error=error)

    async def _watch_for_hang_up(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._hang_up()

    def _hang_up(self) -> None:
        self._gone = True
        self._live.note(ClientGone())

    @property
    def _over(self) -> bool:
        return self._gone or self._live.state.ended

    async def _whole(self, send: Send) -> None:
        told: list[Command] = []
        while not self._over:
            told = await self._service.next_commands(self._live, self._config.ping_every_s) or []
            self._count(told)
        match told[-1] if told else None:
            case EndCall():
                await self._deliver(_send_json(send, 200, self._answer.whole(self._live.state), {}))
            case FailCall() as failed:
                await self._fail(send, failed)
            case _:
                pass  # nobody listens

    async def _fail(self, send: Send, failed: FailCall) -> None:
        error = failure(failed.reason, failed.record)
        self._status = error.status
        await self._deliver(_send_json(send, error.status, error.envelope, error.headers))

    async def _stream(self, send: Send) -> None:
        told = await self._first_news()
        self._count(told)
        if told and isinstance(told[0], FailCall):
            await self._fail(send, told[0])
            return
        await self._deliver(_send_start(send, 200, _STREAM_HEADERS))
        try:
            await self._write(send, self._opening() + b"".join(map(self._render, told)))
            while not self._over:
                news = await self._service.next_commands(self._live, self._config.ping_every_s)
                self._count(news or [])
                await self._write(send, PING if news is None else b"".join(map(self._render, news)))
        except Exception:  # the 200 is out: the stream itself must tell
            logger.exception("error while streaming %s", self._answer.id)
            self._error = "internal_error"
            await self._write(send, event(_INTERNAL.envelope))
        if not self._gone:  # left open, the server closes the connection of a client that is stuck
            await self._deliver(send({"type": "http.response.body", "body": b"", "more_body": False}))

    async def _first_news(self) -> list[Command]:
        """Of a call that may be refused for its deadline, if there is any in time: before the 200 is out."""
        if self._call.requests[0].deadline_at is None:
            return []
        return await self._service.next_commands(self._live, self._config.refusal_limit_s) or []

    async def _write(self, send: Send, data: bytes) -> None:
        if data and not self._gone:
            await self._deliver(send({"type": "http.response.body", "body": data, "more_body": True}))

    async def _deliver(self, sending: Awaitable[None]) -> None:
        """A client that takes nothing for too long has gone."""
        try:
            async with asyncio.timeout(self._config.send_limit_s):
                await sending
        except TimeoutError:
            self._hang_up()

    def _opening(self) -> bytes:
        request = self._call.requests[0]
        canvas = self._answer.canvas(request.num_blocks * request.block_size, request.block_size)
        return self._answer.opening() + (canvas if request.watch else b"")

    def _render(self, command: Command) -> bytes:
        match command:
            case SendText(index, text, tokens):
                return self._answer.text(index, text, tokens)
            case ShowStep(index, step):
                return self._answer.step(index, step)
            case EndChoice(index, finish):
                self._choices_ended += 1
                last = self._choices_ended == self._call.facts.n and not self._call.include_usage
                return self._answer.ending(index, finish, extra_of(self._live.state) if last else None)
            case EndCall():
                state = self._live.state
                return (self._answer.usage(state, extra_of(state)) if self._call.include_usage else b"") + DONE
            case FailCall(reason, record):
                return event(failure(reason, record).envelope)
            case _:
                raise AssertionError(command)

    def _count(self, told: list[Command]) -> None:
        for command in told:
            if isinstance(command, SendText) and not self._any_text:
                self._any_text = True
                FIRST_BLOCK_S.observe(time.monotonic() - self._arrived_at)
            if isinstance(command, FailCall):
                self._error = command.reason
                if failure(command.reason, command.record).status >= 500:
                    logger.warning("call %s failed: %s", self._answer.id, command.reason)


# --- the app ------------------------------------------------------------------------------------------------------


def build_app(gateway: Gateway, version: str) -> ASGIApp:
    """The routes, with request ids, metrics and a log line around them."""

    async def check_key(connection: Connection, handler: BaseRouteHandler) -> None:  # Litestar runs others in a thread
        if not handler.opt.get("public"):
            authorization = connection.headers.get("authorization", "")
            connection.scope["state"]["key"] = gateway.access.identify(authorization)

    @post("/v1/chat/completions", operation_class=ChatOperation, status_code=200)
    async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
        return await gateway.call("chat", request)

    @post("/v1/completions", operation_class=TextOperation, status_code=200)
    async def completions(request: Request[Any, Any, Any]) -> ASGIApp:
        return await gateway.call("text", request)

    @get("/v1/models", operation_class=ObjectOperation)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(gateway)]}

    @get("/v1/models/{name:path}", operation_class=ObjectOperation)
    async def model(name: FromPath[str]) -> dict[str, Any]:
        wanted = str(name).removeprefix("/")
        if wanted != gateway.profile.model:
            raise ApiError(404, f"The model '{wanted[:200]}' does not exist.", param="model", code="model_not_found")
        return _model(gateway)

    # one handler for both methods: Litestar's answer to OPTIONS tells only those of a path's first handler
    @route(
        "/v1/results/{result_id:str}", http_method=["GET", "DELETE"], operation_class=ResultOperation, status_code=200
    )
    async def result(request: Request[Any, Any, Any], result_id: FromPath[str]) -> dict[str, Any]:
        return await gateway.result(result_id, _key_of(request), cancel=request.method == "DELETE")

    @get("/health/live", operation_class=ObjectOperation, opt=PUBLIC)
    async def live() -> dict[str, Any]:
        return {"status": "ok"}

    @get("/health/ready", operation_class=ObjectOperation, opt=PUBLIC)
    async def ready() -> dict[str, Any]:
        service = gateway.service
        lacking = None
        if service.draining:
            lacking = "it is shutting down"
        elif not service.connected:
            lacking = "it has no connection to NATS"
        elif not service.live_instances:
            lacking = f"no instance of {gateway.profile.model} is alive"
        if lacking is not None:
            raise ApiError(503, f"The gateway is not ready: {lacking}.", type="server_error", code="not_ready")
        return {"status": "ok", "instances": service.live_instances}

    @get("/v1/cluster", operation_class=ObjectOperation)
    async def cluster() -> dict[str, Any]:
        return _cluster(gateway)

    @get("/metrics", include_in_schema=False, opt=PUBLIC)
    async def metrics() -> Response[bytes]:
        return Response(generate_latest(), headers={"content-type": CONTENT_TYPE_LATEST}, media_type=MediaType.TEXT)

    app = Litestar(
        [
            *(chat_completions, completions, models, model, result, cluster, live, ready),
            *([metrics] if gateway.config.public_metrics else []),
            *page_routes(),
        ],
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_exception, Exception: _on_exception},
        guards=[check_key],
        request_max_body_size=gateway.config.max_body_bytes,
        openapi_config=openapi_config(
            version, _no_page, model=gateway.profile.model, needs_key=gateway.access.needs_key
        ),
        logging_config=None,
        debug=False,
    )
    return _Front(app)


def _model(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.profile.model,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "tediserve",
        "max_model_len": gateway.profile.limits.max_context_tokens,
    }


def _cluster(gateway: Gateway) -> dict[str, Any]:
    """What the page shows: the model's limits, and the cluster as this gateway hears of it."""
    profile = gateway.profile
    return {
        "model": profile.model,
        "thresholds": profile.decoding.thresholds,
        "max_output_tokens": profile.limits.max_output_tokens,
    } | gateway.service.cluster.describe(time.time())


class _Front:
    """Around the app: `x-request-id` on every answer, metrics, a log line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == ScopeType.WEBSOCKET:
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})  # what the app tells of the call, for the log
        # HEAD is answered as GET is; uvicorn leaves out the body, as it looks at the scope that it made
        inner: Any = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = sent_id if _SANE_ID.fullmatch(sent_id) else secrets.token_hex(16)
        route = next((route for route in _ROUTES if scope["path"].startswith(route)), "other")
        status = 0
        started_at = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = map(_allow_head, message.get("headers", []))
                message["headers"] = [*headers, (b"x-request-id", request_id.encode())]
            await send(message)

        HTTP_OPEN.inc()
        try:
            await self._app(inner, receive, send_with_id)
        except Exception:
            logger.exception("error in %s %s", scope["method"], route)
            if status == 0:
                await _send_json(send_with_id, 500, _INTERNAL.envelope, {})
        finally:
            seconds = time.monotonic() - started_at
            HTTP_OPEN.dec()
            HTTP_REQUESTS.labels(route, status or "none").inc()
            HTTP_S.labels(route).observe(seconds)
            level = logging.INFO if route in _CALL_ROUTES else logging.DEBUG
            outcome = _outcome(status, state.get("client_left", False))
            told = f", call {state['call']}" if "call" in state else ""
            told += f", key {state['key'].name}" if "key" in state and state["key"].name else ""
            line = "%s %s %s after %.0f ms, id %s%s"
            logger.log(level, line, scope["method"], route, outcome, seconds * 1000, request_id, told)
        return None


def _allow_head(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """The header; where it is an `Allow` that names GET, it names HEAD too."""
    name, value = header
    return (name, value + b", HEAD") if name.lower() == b"allow" and b"GET" in value else header


def _outcome(status: int, client_left: bool) -> str:
    """How a request ended, for the log. Status 0: nothing was answered."""
    if client_left or status == 0:
        return f"{status}, client left" if status else "client left"
    return str(status)


_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy must not collect the chunks
}
_INTERNAL = ApiError(500, "The server had an error.", type="server_error", code="internal_error", retry_helps=False)
_CODES = {404: "unknown_url", 405: "method_not_allowed", 413: "request_too_large"}


def _on_api_error(_: Request[Any, Any, Any], error: ApiError) -> Response[Any]:
    return Response(error.envelope, status_code=error.status, headers=error.headers, media_type=MediaType.JSON)


def _on_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    """What Litestar refuses, in OpenAI's envelope."""
    status = error.status_code
    if status >= 500:
        return _on_exception(request, error)
    method, path = request.method, str(request.scope["path"])[:200]  # `url` would raise on a nonsensical Host
    message = {
        404: f"Unknown URL: {method} {path}",
        405: f"{method} is not allowed on {path}.",
        413: "The request's body is too large.",
    }.get(status, error.detail or "The request is not valid.")
    described = ApiError(status, message, code=_CODES.get(status))
    return Response(
        described.envelope, status_code=status, headers=dict(error.headers or {}), media_type=MediaType.JSON
    )


def _no_page(response: Response[Any]) -> Response[Any]:
    if response.status_code != 404:
        return response
    error = ApiError(404, "Unknown URL: the schema is at /schema.", code=_CODES[404])
    return Response(error.envelope, status_code=404, media_type=MediaType.JSON)


def _on_exception(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    logger.error("error in %s %s", request.method, request.scope["path"], exc_info=error)
    return _on_api_error(request, _INTERNAL)


def _check_media_type(request: Request[Any, Any, Any]) -> None:
    """Raises ApiError unless the body is said to be plain JSON; who says nothing is believed."""
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise ApiError(
            415,
            "Send the request's body as JSON, with 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(
            415, "Send the request's body as it is, without 'Content-Encoding'.", code="unsupported_media_type"
        )


async def _send_start(send: Send, status: int, headers: dict[str, str]) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def _send_json(send: Send, status: int, content: object, headers: dict[str, str]) -> None:
    body = msgspec.json.encode(content)
    described = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await _send_start(send, status, described)
    await send({"type": "http.response.body", "body": body, "more_body": False})
