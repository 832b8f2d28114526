"""The message bus: NATS behind a thin typed layer. This module, `runtime.py` and `lease.py` alone know NATS.

What it promises:
1. Connections are pinged every second, closed after two missed answers, and re-made for ever.
2. Ephemeral messages (`publish`, `request`) are dropped while there is no connection, and counted: a stale threshold or
   report is worth less than none. Requests say so at once or at their time limit.
3. Durable messages (`append`) are stored when the call returns. `after_seq` makes them compare-and-set.
4. `follow` delivers every stored message once, in order, through cuts and server restarts. Its queue in this process
   is unbounded on purpose: nats-py drops messages of an ordered consumer whose queue is full and then never fetches
   them again. The stream's own bound and the server's flow control limit what can lie in it.
5. Malformed messages are counted, logged once for each subject pattern, and ignored. Core subscribers that lag lose
   messages; that is counted and logged, and nothing that must not be lost travels that way.
6. With `nkeys` each service proves who it is with a key of its own, and may say and hear what
   `contracts/permissions.py` lists. With a `tls://` address or `tls_ca` nothing is said before the server has proved
   who it is. One that refuses us when we start will do so again: `connect` says why and does not try on (ConfigError).
"""

import asyncio
import contextlib
import contextvars
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api
from nats.js.client import JetStreamContext
from prometheus_client import Counter

from contracts import codec, subjects
from contracts.codec import MalformedMessage
from contracts.permissions import inbox_of
from services.settings import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MALFORMED = Counter(
    "tediserve_bus_malformed_messages", "Messages that were no valid message of their subject", ["subject"]
)
SLOW = Counter("tediserve_bus_slow_consumer_drops", "Core messages dropped because this process lagged", ["subject"])
DROPPED = Counter("tediserve_bus_unsent_messages", "Ephemeral messages not sent for lack of a connection")
RECONNECTS = Counter("tediserve_bus_reconnects", "Times the connection to NATS was re-made")

_WRONG_LAST_SEQUENCE = 10071
_STREAM_FULL = (10077, 10122)  # maximum messages exceeded; maximum bytes exceeded
_PENDING_MESSAGES = 65_536  # of a core subscription, before it drops
_PENDING_BYTES = 64 * 2**20

trace_parent: contextvars.ContextVar[str] = contextvars.ContextVar("trace_parent", default="")


class BusTimeout(Exception):
    """No answer within the limit, or no connection. The message may or may not have arrived."""


class NoResponder(Exception):
    """Nobody listens on the subject: the message was certainly not delivered."""


class SequenceConflict(Exception):
    """A compare-and-set append found another last message than the one that it continues from."""


class StreamFull(Exception):
    """The stream holds as many messages as its bound allows."""


class NatsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach NATS and how the streams are kept. Table `[nats]`."""

    url: str = "nats://127.0.0.1:4222"  # several, separated by commas, for a cluster
    nkeys: str = ""  # folder with a file <service>.nk for each service that runs here: its secret key (an nkey's seed)
    tls_ca: str = ""  # PEM file of who signs the servers' certificates; empty with a tls:// address: the system's
    tls_certificate: str = ""  # PEM files of our own, for servers that ask for a certificate
    tls_key: str = ""
    user: str = ""  # for servers that want a password in place of a key
    password: str = ""
    replicas: int = 1  # of each stream; 3 on a cluster
    storage: str = "file"  # or "memory": prompts then never touch a disk
    max_open_requests: int = 4096  # one more is answered 429
    result_retention_s: float = 900.0  # how long the record of a request is kept; longer than any time limit
    connect_limit_s: float = 30.0  # how long a service waits for NATS when it starts

    def __post_init__(self) -> None:
        if self.storage not in ("file", "memory"):
            raise ValueError(f'storage: {self.storage!r} is neither "file" nor "memory"')
        if self.replicas not in (1, 3, 5):
            raise ValueError(f"replicas: {self.replicas} is not 1, 3 or 5")
        if self.max_open_requests < 1:
            raise ValueError(f"max_open_requests: {self.max_open_requests} is not positive")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate, tls_key: give both, or none for no certificate of our own")
        if self.nkeys and self.user:
            raise ValueError("nkeys, user: give one of them, a server takes either a key or a password")

    @property
    def servers(self) -> list[str]:
        return [url.strip() for url in self.url.split(",")]

    def tls(self) -> ssl.SSLContext | None:
        """How connections are made safe; None: they are not. Raises ConfigError."""
        if not (self.tls_ca or self.tls_certificate or any(url.startswith("tls://") for url in self.servers)):
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
            if self.tls_certificate:
                context.load_cert_chain(self.tls_certificate, self.tls_key, password="")  # or it asks at the terminal
        except OSError as error:  # ssl.SSLError is one
            names = ", ".join(name for name in (self.tls_ca, self.tls_certificate, self.tls_key) if name)
            raise ConfigError(f"[nats] {names}: no certificates and unencrypted key, both in PEM ({error})") from None
        return context

    def seed_of(self, service: str) -> str | None:
        """The service's secret key; None: there are no keys. Raises ConfigError."""
        if not self.nkeys:
            return None
        path = Path(self.nkeys) / f"{service}.nk"
        try:
            seed = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"[nats] nkeys: {path}, the key of {service}, cannot be read ({error})") from None
        if not seed.startswith("SU"):
            raise ConfigError(f"[nats] nkeys: {path} holds no user's nkey seed: it would begin with SU")
        return seed


class Stored(NamedTuple, Generic[T]):
    """A message in a stream and its sequence there."""

    message: T
    seq: int


class Follower:
    """A running `follow`. `caught_up()` waits until all that was stored when it began has been handled."""

    def __init__(self) -> None:
        self._caught_up = asyncio.Event()
        self._subscription: JetStreamContext.PushSubscription | None = None
        self.last_seq = 0

    async def caught_up(self, limit_s: float = 30.0) -> None:
        """Raises TimeoutError after `limit_s` seconds."""
        await asyncio.wait_for(self._caught_up.wait(), limit_s)

    async def stop(self) -> None:
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()


class Bus:
    """One process's connection. Made by `connect`, ended by `close`."""

    def __init__(self, client: Client, settings: NatsSettings) -> None:
        self._client = client
        self._js = client.jetstream(timeout=2.0)
        self._settings = settings
        self._logged: set[str] = set()
        self._on_reconnected: list[Callable[[], None]] = []
        self._streams: set[str] = set()  # that are known to be there
        self._closed = asyncio.Event()

    @classmethod
    async def connect(cls, settings: NatsSettings, name: str) -> "Bus":
        """Connects as the service that `name` begins with, waiting up to `connect_limit_s`.

        Raises BusTimeout, and ConfigError where the server refuses us or is not the one that it should be.
        """
        service = name.partition(" ")[0]
        client = Client()
        bus = cls(client, settings)
        tls, seed = settings.tls(), settings.seed_of(service)
        connected = False
        last_error: Exception | None = None

        async def on_error(error: Exception) -> None:
            nonlocal last_error
            last_error = error
            refusal = _refusal(error, service)
            if refusal and not connected:
                raise ConfigError(f"NATS at {settings.url}: {refusal}")  # out of client.connect, which else tries on
            if isinstance(error, nats.errors.SlowConsumerError):
                SLOW.labels(_pattern(error.subject)).inc()
                logger.error("slow consumer: a message on %s was dropped", error.subject)
            elif refusal or "permissions violation" in str(error).lower():
                bus._log_once(f"NATS: {refusal or error}")
            elif isinstance(error, (OSError, nats.errors.Error, asyncio.TimeoutError)):
                logger.debug("nats: %r", error)  # disconnected and reconnected tell the story
            else:
                logger.error("error in a handler", exc_info=error)

        async def on_disconnected() -> None:
            if not client.is_closed:  # by ourselves
                logger.warning("connection to NATS lost")

        async def on_closed() -> None:
            bus._closed.set()

        async def on_reconnected() -> None:
            RECONNECTS.inc()
            logger.warning("connection to NATS re-made")
            for handler in bus._on_reconnected:
                handler()

        try:
            async with asyncio.timeout(settings.connect_limit_s):
                await client.connect(
                    servers=settings.servers,
                    name=name,
                    user=settings.user or None,
                    password=settings.password or None,
                    nkeys_seed_str=seed,
                    tls=tls,
                    tls_handshake_first=tls is not None,  # else a server that has no TLS would get everything in clear
                    inbox_prefix=inbox_of(service),
                    error_cb=on_error,
                    disconnected_cb=on_disconnected,
                    closed_cb=on_closed,
                    reconnected_cb=on_reconnected,
                    ping_interval=1,
                    max_outstanding_pings=2,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,  # type: ignore[arg-type]  # seconds; a float works and is meant
                    connect_timeout=1,
                    pending_size=16 * 2**20,
                )
        except TimeoutError:
            why = f" ({last_error})" if last_error and str(last_error) else ""
            raise BusTimeout(f"no NATS at {settings.url} within {settings.connect_limit_s:g} s{why}") from None
        except ConfigError:
            await bus.close(drain=False)
            raise
        connected = True
        return bus

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.error("%s (logged once)", text)

    @property
    def result_retention_s(self) -> float:
        """How long the record of a request is kept."""
        return self._settings.result_retention_s

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    def on_reconnected(self, handler: Callable[[], None]) -> None:
        """Calls `handler` each time after a lost connection has been re-made."""
        self._on_reconnected.append(handler)

    async def watch(self) -> None:
        """Raises BusTimeout when NATS has ended the connection for good, as when our key is taken from it."""
        await self._closed.wait()
        raise BusTimeout(f"NATS has ended the connection: {self._client.last_error}")

    async def close(self, drain: bool = True) -> None:
        """Delivers what is buffered and handled, within 5 s, then closes. Raises nothing of what may go wrong.

        Without `drain`, at once: for a process whose word no longer counts, or whose server does not answer.
        """
        try:
            async with asyncio.timeout(5 if drain else 0.5):
                await (self._client.drain() if drain else self._client.close())
        except asyncio.CancelledError:
            # nats-py cancels its reading task while both wait for one future, which then is cancelled for us too
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        except (TimeoutError, OSError, nats.errors.Error):
            with contextlib.suppress(OSError, nats.errors.Error):
                await self._client.close()

    # --- ephemeral -------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, message: object) -> bool:
        """Sends, without knowing whether anybody listens. False: there was no connection."""
        if not self._client.is_connected:
            DROPPED.inc()
            return False
        try:
            await self._client.publish(subject, codec.encode(message), headers=_trace_headers())
        except nats.errors.Error:
            DROPPED.inc()
            return False
        return True

    async def request(self, subject: str, message: object, reply_type: type[T], *, limit_s: float) -> T:
        """The one answer to the message. Raises NoResponder, BusTimeout, MalformedMessage."""
        try:
            answer = await self._client.request(
                subject, codec.encode(message), timeout=limit_s, headers=_trace_headers()
            )
        except nats.errors.NoRespondersError:
            raise NoResponder(subject) from None
        except (nats.errors.Error, TimeoutError) as error:
            raise BusTimeout(f"{subject}: no answer within {limit_s:g} s ({error!r})") from None
        return codec.decode(answer.data, reply_type)

    async def subscribe(self, subject: str, wanted: type[T], handler: Callable[[T], None]) -> None:
        """Calls `handler` with each message, in order."""

        async def on_message(msg: Msg) -> None:
            message = self._decode(msg, wanted)
            if message is not None:
                _enter_trace(msg)
                handler(message)

        await self._client.subscribe(
            subject, cb=on_message, pending_msgs_limit=_PENDING_MESSAGES, pending_bytes_limit=_PENDING_BYTES
        )

    async def respond(self, subject: str, wanted: type[T], handler: Callable[[T], Awaitable[object]]) -> None:
        """Answers each message with what `handler` returns, in order. Malformed messages get no answer."""

        async def on_message(msg: Msg) -> None:
            message = self._decode(msg, wanted)
            if message is not None:
                _enter_trace(msg)
                answer = await handler(message)
                if msg.reply:
                    with contextlib.suppress(nats.errors.Error):
                        await msg.respond(codec.encode(answer))

        await self._client.subscribe(
            subject, cb=on_message, pending_msgs_limit=_PENDING_MESSAGES, pending_bytes_limit=_PENDING_BYTES
        )

    async def flush(self) -> None:
        """Returns once the server has seen all that was sent, subscriptions included, or after 4 s."""
        with contextlib.suppress(nats.errors.Error):
            for _ in range(2):  # nats-py sends the first one's ping ahead of what is buffered
                await self._client.flush(timeout=2)

    # --- durable ---------------------------------------------------------------------------------------------------

    async def ensure_streams(self) -> None:
        """Creates the streams that are missing; waits for JetStream up to `connect_limit_s`. Raises BusTimeout.

        The scheduler does (contracts/subjects.py, STREAM_MAKER); who follows one waits for it.
        """
        s = self._settings
        storage = api.StorageType.MEMORY if s.storage == "memory" else api.StorageType.FILE
        shared: dict[str, Any] = {"storage": storage, "num_replicas": s.replicas, "allow_direct": True}
        wanted = (
            api.StreamConfig(
                name=subjects.REQUESTS,
                subjects=["req.*"],
                discard=api.DiscardPolicy.NEW,
                max_msgs=s.max_open_requests,
                max_msgs_per_subject=1,
                **shared,
            ),
            api.StreamConfig(
                name=subjects.PROGRESS,
                subjects=["prog.*.*"],
                max_msgs_per_subject=1,
                max_age=s.result_retention_s,
                max_bytes=2**30,
                **shared,
            ),
            api.StreamConfig(
                name=f"KV_{subjects.CLUSTER}",
                subjects=[f"$KV.{subjects.CLUSTER}.>"],
                max_msgs_per_subject=1,
                max_bytes=64 * 2**20,
                discard=api.DiscardPolicy.NEW,
                allow_msg_ttl=True,
                allow_rollup_hdrs=True,
                deny_delete=True,
                **shared,
            ),
        )
        try:
            async with asyncio.timeout(s.connect_limit_s):
                for config in wanted:
                    await self._ensure_stream(config)
        except TimeoutError:
            raise BusTimeout(f"JetStream gave no streams within {s.connect_limit_s:g} s") from None

    async def _ensure_stream(self, config: api.StreamConfig) -> None:
        told = ""
        while True:
            try:
                try:
                    await self._js.add_stream(config)
                except nats.js.errors.BadRequestError:  # exists with other settings, e.g. another bound
                    await self._js.update_stream(config)
                return
            except nats.js.errors.APIError as error:
                if error.description and error.description != told:  # storage, replicas, room: for an operator to mend
                    told = error.description
                    logger.warning("stream %s cannot be made: %s", config.name, told)
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
                logger.debug("stream %s: %r", config.name, error)
            await asyncio.sleep(0.1)

    async def append(
        self,
        subject: str,
        message: object,
        *,
        after_seq: int | None = None,
        ttl_s: int | None = None,
        limit_s: float = 2.0,
    ) -> int:
        """Stores the message and returns its sequence.

        `after_seq`: only if the subject's last message has this sequence (0: if it has none).
        `ttl_s`: it vanishes by itself after that many seconds.
        Raises SequenceConflict, StreamFull, BusTimeout (it may have been stored).
        """
        headers = _trace_headers() or {}
        if after_seq is not None:
            headers[api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = str(after_seq)
        try:
            stored = await self._js.publish(
                subject, codec.encode(message), timeout=limit_s, headers=headers or None, msg_ttl=ttl_s
            )
        except nats.js.errors.APIError as error:
            if error.err_code == _WRONG_LAST_SEQUENCE:
                raise SequenceConflict(f"{subject}: {error.description}") from None
            if error.err_code in _STREAM_FULL:
                raise StreamFull(f"{subject}: {error.description}") from None
            raise BusTimeout(f"{subject}: {error.description}") from None
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusTimeout(f"{subject}: not stored within {limit_s:g} s ({error!r})") from None
        return int(stored.seq)

    async def last(self, stream: str, subject: str, wanted: type[T]) -> Stored[T] | None:
        """The subject's last message, or None; wildcards are allowed. Raises BusTimeout, MalformedMessage."""
        try:
            found = await self._js.get_last_msg(stream, subject)
        except nats.js.errors.NotFoundError:
            return None
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusTimeout(f"{subject}: {error!r}") from None
        return Stored(codec.decode(found.data or b"", wanted), int(found.seq or 0))

    async def stored_subjects(self, stream: str, subject: str) -> list[str]:
        """Those of the stream that match and hold a message. Raises BusTimeout."""
        try:
            info = await self._js.stream_info(stream, subjects_filter=subject)
        except nats.js.errors.NotFoundError:
            raise BusTimeout(f"there is no stream {stream}") from None
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusTimeout(f"{subject}: {error!r}") from None
        return sorted(info.state.subjects or {})

    async def purge(self, stream: str, subject: str) -> None:
        """Removes the subject's messages. Raises BusTimeout."""
        await self._purge(stream, subject=subject)

    async def purge_below(self, stream: str, seq: int) -> None:
        """Removes all messages with a lower sequence. Raises BusTimeout."""
        await self._purge(stream, seq=seq)

    async def _purge(self, stream: str, *, subject: str | None = None, seq: int | None = None) -> None:
        try:
            await self._js.purge_stream(stream, subject=subject, seq=seq)
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusTimeout(f"{subject or stream}: {error!r}") from None

    async def follow(
        self,
        stream: str,
        subject: str,
        wanted: type[T],
        handler: Callable[[T, int], None],
        *,
        on_malformed: Callable[[str, int], None] | None = None,
        subject_of: Callable[[T], str] | None = None,
    ) -> Follower:
        """Calls `handler(message, sequence)` with all that is stored on the subject, then with what comes.

        Waits up to `connect_limit_s` for the stream to be made. A message that `subject_of` would have put on another
        subject is malformed too. Raises BusTimeout.
        """
        await self._await_stream(stream)
        follower = Follower()

        async def on_message(msg: Msg) -> None:
            meta = msg.metadata
            seq = meta.sequence.stream
            if seq > follower.last_seq:  # a re-made consumer may repeat
                follower.last_seq = seq
                message = self._decode(msg, wanted, subject_of)
                if message is not None:
                    _enter_trace(msg)
                    handler(message, seq)
                elif on_malformed is not None:
                    on_malformed(msg.subject, seq)
            if meta.num_pending == 0:
                follower._caught_up.set()

        try:
            follower._subscription = await self._js.subscribe(
                subject,
                stream=stream,
                cb=on_message,
                ordered_consumer=True,
                idle_heartbeat=0.5,
                deliver_policy=api.DeliverPolicy.ALL,
                pending_msgs_limit=0,
                pending_bytes_limit=0,
            )
            info = await follower._subscription.consumer_info()
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusTimeout(f"cannot follow {subject}: {error!r}") from None
        if info.num_pending == 0 and (info.delivered is None or info.delivered.consumer_seq == 0):
            follower._caught_up.set()
        return follower

    async def _await_stream(self, name: str) -> None:
        limit_s = self._settings.connect_limit_s
        try:
            async with asyncio.timeout(limit_s):
                while not await self._has_stream(name):  # noqa: ASYNC110  # an event in another process
                    await asyncio.sleep(0.1)
        except TimeoutError:
            maker = subjects.STREAM_MAKER
            raise BusTimeout(f"no stream {name} within {limit_s:g} s: the {maker}, which makes it, must run") from None

    async def _has_stream(self, name: str) -> bool:
        if name not in self._streams:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
                await self._js.stream_info(name)
                self._streams.add(name)
        return name in self._streams

    def _decode(self, msg: Msg, wanted: type[T], subject_of: Callable[[T], str] | None = None) -> T | None:
        try:
            message = codec.decode(msg.data, wanted)
            if subject_of is not None and subject_of(message) != msg.subject:
                raise MalformedMessage(f"belongs on {subject_of(message)}")
        except MalformedMessage as error:
            pattern = _pattern(msg.subject)
            MALFORMED.labels(pattern).inc()
            if pattern not in self._logged:
                self._logged.add(pattern)
                logger.warning("malformed message on %s ignored (logged once): %s", msg.subject, error)
            return None
        return message


def new_trace_parent() -> str:
    """A fresh W3C traceparent."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def _trace_headers() -> dict[str, str] | None:
    parent = trace_parent.get()
    return {"traceparent": parent} if parent else None


def _enter_trace(msg: Msg) -> None:
    trace_parent.set((msg.headers or {}).get("traceparent", ""))


def _refusal(error: Exception, service: str) -> str:
    """What is wrong and what would be right, if the error means that trying again is of no use; else empty."""
    text = str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({error.verify_message}): [nats] tls_ca must name the file of who signed"
            " it, and it must be made out to the name in [nats] url"
        )
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "does not begin with TLS: give it `tls { handshake_first: auto }`, or use no tls:// and no [nats] tls_ca"
    if "authorization violation" in text.lower():
        return (
            f"refuses us as {service}: its key or password is missing or wrong; see [nats] nkeys, and that the server"
            " has the public key that belongs to it"
        )
    return ""


def _pattern(subject: str) -> str:
    """The channel that the subject belongs to, so that labels stay few."""
    parts = subject.split(".")
    for channel in subjects.CHANNELS:
        wanted = channel.pattern.split(".")
        if len(wanted) == len(parts) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True)):
            return channel.pattern
    return "other"
