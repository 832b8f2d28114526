"""`python -m services.gateway`: serves the profile's model over HTTP."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from importlib import metadata
from typing import NamedTuple

import uvicorn

from services.gateway.access import Access
from services.gateway.config import GatewayConfig
from services.gateway.files import LOOK_EVERY_S, Watched
from services.gateway.http import Gateway, build_app
from services.gateway.openai_api import Api
from services.gateway.protocol import hardened_protocol
from services.gateway.service import GatewayService
from services.gateway.text import TextCodec, load_codec, load_special_ids
from services.gateway.tls import ServerTls
from services.profile import Profile, check_retention, load_profile
from services.runtime import Runtime, Stop, every, new_id, start

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 3.0  # for calls that could not finish to tell their clients so


class _Server(uvicorn.Server):
    """Leaves signals to the runtime."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Loaded(NamedTuple):
    """What the settings name, read before anything else is begun."""

    profile: Profile
    codec: TextCodec
    api: Api
    access: Access
    tls: ServerTls | None


def prepare(config: GatewayConfig) -> Callable[[Runtime], Awaitable[None]]:
    """Raises ConfigError."""
    loaded = load(config)
    return lambda runtime: serve(runtime, config, loaded)


def load(config: GatewayConfig) -> Loaded:
    """Raises ConfigError."""
    access = Access(config)
    access.read()
    tls = ServerTls(config.tls_certificate, config.tls_key) if config.tls_certificate else None
    if tls is not None:
        tls.read()
    profile = load_profile(config.profile)
    ids = load_special_ids(profile.weights_folder)
    mask_id = ids.get("mask_token_id")
    codec = load_codec(profile.weights_folder, mask_id)
    api = Api(
        profile,
        codec,
        max_choices=config.max_choices,
        vocab_size=ids.get("vocab_size", codec.vocab_size),
        mask_id=mask_id,
        max_prompt_tokens=config.max_prompt_tokens,
    )
    return Loaded(profile, codec, api, access, tls)


async def serve(runtime: Runtime, config: GatewayConfig, loaded: Loaded) -> None:
    """Until asked to stop; then lets running calls finish within `drain_limit_s`."""
    check_retention(loaded.profile, runtime.bus.result_retention_s)
    listener = _listen(config.host, config.port)
    try:
        gateway, server = await begin(runtime, config, loaded)
        service = gateway.service
        serving = runtime.spawn(server.serve(sockets=[listener]), name="http")
        scheme, (host, port) = "https" if loaded.tls else "http", listener.getsockname()[:2]
        logger.info("%s serves %s at %s://%s:%d", service.gateway_id, loaded.profile.model, scheme, host, port)
        await runtime.until_stopped()
        service.draining = True
        server.should_exit = True
        await asyncio.wait([serving], timeout=config.drain_limit_s)
        service.fail_open_calls()
        await asyncio.wait([serving], timeout=_LAST_WORDS_S + 1)
        await service.close()
    finally:
        listener.close()


async def begin(runtime: Runtime, config: GatewayConfig, loaded: Loaded) -> tuple[Gateway, uvicorn.Server]:
    """The gateway at work on the bus, and the server for it, which does not listen yet. Raises BusTimeout."""
    profile, codec, api, access, tls = loaded
    service = GatewayService(runtime.bus, config, profile, codec, new_id("gw"), access)
    gateway = Gateway(config, profile, codec, api, service, access)
    await service.start()
    runtime.spawn(service.beat(), name="status")
    if config.key_file:
        _watch(runtime, Watched([config.key_file], access.read))
    if tls is not None:
        _watch(runtime, Watched([config.tls_certificate, config.tls_key], tls.read))
    return gateway, _Server(_uvicorn_config(config, gateway, tls))


def _watch(runtime: Runtime, files: Watched) -> None:
    runtime.spawn(every(LOOK_EVERY_S, files.look), name="files")


def _listen(host: str, port: int) -> socket.socket:
    """Raises Stop where the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # named as TCP, or asyncio leaves Nagle's algorithm on and each answer waits 40 ms for an acknowledgement
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
        raise Stop(1, f"port {port} on {host} {why}; set another one, e.g. TEDISERVE_GATEWAY_PORT=8001") from None
    listener.setblocking(False)
    return listener


def _uvicorn_config(config: GatewayConfig, gateway: Gateway, tls: ServerTls | None) -> uvicorn.Config:
    try:
        version = metadata.version("tediserve")
    except metadata.PackageNotFoundError:
        version = "0"
    return uvicorn.Config(
        build_app(gateway, version),
        http=hardened_protocol(config.body_limit_s, config.max_connections),
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,  # nobody asks where a request came from
        timeout_keep_alive=75,  # longer than clients keep idle connections, or they meet a closed one
        timeout_graceful_shutdown=int(config.drain_limit_s + _LAST_WORDS_S),
    )


if __name__ == "__main__":
    start("gateway", GatewayConfig, prepare)
