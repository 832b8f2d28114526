"""uvicorn's HTTP/1.1 protocol, hardened.

1. Bytes that are no HTTP request are answered in OpenAI's envelope too, with a request id. So is a request
   that tells its length in two ways, as a proxy before us may believe the other one (request smuggling).
2. Who connects must send a whole request head in time, however slowly its bytes trickle in.
3. Beyond `max_connections` a connection's first request is answered 503, and it is closed.
4. What a client does wrong is no warning of ours: anybody could fill the log.
"""

import asyncio
import http
import logging
import secrets
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.gateway.openai_api import ApiError

logger = logging.getLogger(__name__)


class _ClientsFaults(logging.Filter):
    """Tells at level debug what uvicorn warns of, where a client is to blame."""

    _BEGINNINGS = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library")

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if not message.startswith(self._BEGINNINGS):
            return True
        logger.debug("%s", message)
        return False


_CLIENTS_FAULTS = _ClientsFaults()  # one, as a logger takes the same filter only once


_INVALID = ApiError(400, "This is not a valid HTTP/1.1 request.", code="invalid_http")
_TOO_MANY = ApiError(
    503,
    "This gateway has as many connections as it takes. Try again later.",
    type="server_error",
    code="too_many_connections",
    retry_after_s=1,
)


class _StrictConnection(h11.Connection):
    """h11 takes `Transfer-Encoding` for the truth where there is a `Content-Length` too; here that is an error."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event


class HardenedProtocol(H11Protocol):
    """One connection. Subclassed by `hardened_protocol` with the limits."""

    head_limit_s = 30.0
    max_connections = 4096
    _refused = False
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _StrictConnection(h11.SERVER)  # with h11's limit for a head, which is uvicorn's too

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._refused = len(self.connections) > self.max_connections
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:  # only now: closed with unread data, a client would see a reset in the answer's place
            self._answer_and_close(_TOO_MANY)
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._await_head()  # the beginning of a later request's head

    def send_400_response(self, msg: str) -> None:
        """Also where an answer has begun: then all that is left is to hang up."""
        self._answer_and_close(_INVALID)

    def _answer_and_close(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.envelope)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", secrets.token_hex(16).encode()),
            (b"connection", b"close"),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
        ]
        reason = http.HTTPStatus(error.status).phrase.encode()
        try:
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass
        self.transport.close()

    def _await_head(self) -> None:
        if not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_limit_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def hardened_protocol(limit_s: float, max_connections: int) -> type[HardenedProtocol]:
    """The protocol with this limit for a request's head, and for connections. uvicorn's log is filtered."""
    logging.getLogger("uvicorn.error").addFilter(_CLIENTS_FAULTS)
    return type("Protocol", (HardenedProtocol,), {"head_limit_s": limit_s, "max_connections": max_connections})
