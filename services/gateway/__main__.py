"""`python -m services.gateway`: serves the profile's model over HTTP."""

import asyncio
import contextlib
import errno
import logging
import socket
import sys
from collections.abc import Iterator
from importlib import metadata

import uvicorn

from services.gateway.config import GatewayConfig
from services.gateway.http import Gateway, build_app
from services.gateway.openai_api import Api
from services.gateway.protocol import hardened_protocol
from services.gateway.service import GatewayService
from services.gateway.text import load_codec, load_special_ids
from services.profile import check_retention, load_profile
from services.runtime import Runtime, Stop, main, new_id
from services.settings import ConfigError, load_section

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 3.0  # for calls that could not finish to tell their clients so


class _Server(uvicorn.Server):
    """Leaves signals to the runtime."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(runtime: Runtime, config: GatewayConfig) -> None:
    """Until asked to stop; then lets running calls finish within `drain_limit_s`."""
    listener = _listen(config.host, config.port)
    try:
        gateway = load_gateway(runtime, config)
        service = gateway.service
        await service.start()
        runtime.spawn(service.beat(), name="status")
        server = _Server(_uvicorn_config(config, gateway))
        serving = runtime.spawn(server.serve(sockets=[listener]), name="http")
        host, port = listener.getsockname()[:2]
        logger.info("%s serves %s at http://%s:%d", service.gateway_id, gateway.profile.model, host, port)
        await runtime.until_stopped()
        service.draining = True
        server.should_exit = True
        await asyncio.wait([serving], timeout=config.drain_limit_s)
        service.fail_open_calls()
        await asyncio.wait([serving], timeout=_LAST_WORDS_S + 1)
        await service.close()
    finally:
        listener.close()


def load_gateway(runtime: Runtime, config: GatewayConfig) -> Gateway:
    """Everything but the server. Raises ConfigError."""
    profile = load_profile(config.profile)
    check_retention(profile, runtime.bus.result_retention_s)
    ids = load_special_ids(profile.weights_folder)
    mask_id = ids.get("mask_token_id")
    codec = load_codec(profile.weights_folder, mask_id)
    vocab_size = ids.get("vocab_size", codec.vocab_size)
    api = Api(profile, codec, max_choices=config.max_choices, vocab_size=vocab_size, mask_id=mask_id)
    service = GatewayService(runtime.bus, config, profile, codec, new_id("gw"))
    return Gateway(config, profile, codec, api, service)


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


def _uvicorn_config(config: GatewayConfig, gateway: Gateway) -> uvicorn.Config:
    try:
        version = metadata.version("tediserve")
    except metadata.PackageNotFoundError:
        version = "0"
    return uvicorn.Config(
        build_app(gateway, version),
        http=hardened_protocol(config.body_limit_s),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections, or they meet a closed one
        timeout_graceful_shutdown=int(config.drain_limit_s + _LAST_WORDS_S),
    )


if __name__ == "__main__":
    try:
        settings = load_section(GatewayConfig, "gateway")
    except ConfigError as error:
        print(f"gateway: {error}", file=sys.stderr)
        sys.exit(2)
    main("gateway", lambda runtime: serve(runtime, settings), metrics_port=settings.metrics_port)
