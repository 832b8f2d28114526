"""What every service's process does: logging, signals, its tasks, its metrics, a graceful end.

1. SIGTERM or SIGINT sets `stopping`; the service drains and returns. A second signal ends the process at once.
2. A background task that fails ends the process with exit code 1: its supervisor starts a clean one.
3. Exit codes: 0 asked to stop, 1 failed, 2 wrong configuration, 3 the scheduler's lease was lost. In the last case
   nothing buffered is delivered: another one acts by now.
"""

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from prometheus_client import start_http_server

from contracts.subjects import STREAM_MAKER
from services import telemetry
from services.bus import Bus, BusTimeout, NatsSettings, trace_parent
from services.settings import DEFAULT_FILE, PREFIX, ConfigError, load_section

logger = logging.getLogger(__name__)

# A wait that comes to its end as it is cancelled forgets that it was (asyncio.wait_for before Python 3.12).
_INSIST_S = 1.0
_GIVE_UP_S = 15.0  # on tasks that do not end


class Configured(Protocol):
    """The settings of a service that offers metrics."""

    @property
    def metrics_port(self) -> int: ...


C = TypeVar("C", bound=Configured)


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[log]`."""

    level: str = "INFO"
    format: str = "text"  # or "json"

    def __post_init__(self) -> None:
        if self.level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError(f"level: {self.level!r} is not DEBUG, INFO, WARNING or ERROR")
        if self.format not in ("text", "json"):
            raise ValueError(f'format: {self.format!r} is neither "text" nor "json"')


class Stop(Exception):
    """Ends the process with an exit code of its own; `at_once`: and leaves everything as it is, for it might hang."""

    def __init__(self, exit_code: int, why: str, *, at_once: bool = False) -> None:
        super().__init__(why)
        self.exit_code, self.at_once = exit_code, at_once


class Runtime:
    """Handed to a service's `serve`: its bus, its tasks, and the wish that it stop."""

    def __init__(self, name: str, bus: Bus) -> None:
        self.name = name
        self.bus = bus
        self.stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Runs `work` beside the service. If it raises, the process ends."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: BaseException) -> None:
        """Ends the process, as if a task had raised this."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def until_stopped(self) -> None:
        """Returns when the process is asked to stop. Raises what a background task raised."""
        waiter: asyncio.Future[Any] = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({waiter, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if self._failed.done():
            self._failed.result()

    async def cancel_tasks(self) -> None:
        """Returns when all have ended. Where one does not, the process ends at once: it may hold a lease."""
        tasks = list(self._tasks)
        give_up_at = time.monotonic() + _GIVE_UP_S
        while pending := [task for task in tasks if not task.done()]:
            if time.monotonic() > give_up_at:
                logger.critical("cancelled, and still there: %s", ", ".join(task.get_name() for task in pending))
                logging.shutdown()
                os._exit(1)
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=_INSIST_S)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failed.done():
            self._failed.exception()  # seen, even where the service had ended already


def new_id(prefix: str) -> str:
    """An id for this run of a process: a restarted one is another one."""
    return f"{prefix}-{secrets.token_hex(4)}"


async def every(period_s: float, action: Callable[[], Awaitable[object]]) -> None:
    """Runs `action` now and then each `period_s` seconds, skipping beats that it overruns."""
    loop = asyncio.get_running_loop()
    beat = loop.time()
    while True:
        await action()
        beat = max(beat + period_s, loop.time())
        await asyncio.sleep(beat - loop.time())


def start(
    name: str,
    config: type[C],
    make_serve: Callable[[C], Callable[[Runtime], Awaitable[None]]],
    words: Sequence[str] | None = None,
) -> None:
    """Runs a service whose settings are the table of its own name. A wrong one is told, and the exit code is 2.

    `words`: of the command line, which has no options but `--help`; None: those of this process.
    """
    table = name.replace("-", "_")
    where = f"settings: [{table}] in {DEFAULT_FILE}, or {PREFIX}{table.upper()}_<SETTING> in the environment"
    argparse.ArgumentParser(f"python -m services.{table}", f"%(prog)s [--help]; {where}").parse_args(words)
    try:
        settings = load_section(config, table)
        serve = make_serve(settings)
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    main(name, serve, metrics_port=settings.metrics_port)


def main(name: str, serve: Callable[[Runtime], Awaitable[None]], *, metrics_port: int = 0) -> None:
    """Runs the service `serve` as this process and exits. `metrics_port`: Prometheus metrics there; 0: nowhere."""
    try:
        set_up_logging(name)
        nats_settings = load_section(NatsSettings, "nats")
        telemetry.set_up(name, load_section(telemetry.TelemetrySettings, "telemetry"))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        exit_code = asyncio.run(_run(name, serve, nats_settings, metrics_port))
    finally:
        telemetry.shut_down()
    sys.exit(exit_code)


async def _run(
    name: str, serve: Callable[[Runtime], Awaitable[None]], nats_settings: NatsSettings, metrics_port: int
) -> int:
    try:
        if metrics_port:
            start_http_server(metrics_port)
        bus = await Bus.connect(nats_settings, name)
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    except (BusTimeout, OSError) as error:
        logger.error("%s", error)
        return 1
    runtime = Runtime(name, bus)
    _handle_signals(runtime)
    drain = True
    runtime.spawn(bus.watch(), name="connection")
    try:
        if name == STREAM_MAKER:
            await bus.ensure_streams()
        await serve(runtime)
        return 0
    except Stop as stop:
        logger.error("stopping: %s", stop)
        if stop.at_once:
            logging.shutdown()
            os._exit(stop.exit_code)
        drain = False
        return stop.exit_code
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    except BusTimeout as error:
        logger.error("stopping: %s", error)
        return 1
    except Exception:
        logger.exception("stopping after an unexpected error")
        return 1
    finally:
        await runtime.cancel_tasks()
        await bus.close(drain)


def _handle_signals(runtime: Runtime) -> None:
    def on_signal() -> None:
        if runtime.stopping.is_set():
            os._exit(1)
        logger.info("asked to stop")
        runtime.stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {service}: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        line = super().formatMessage(record)
        parent = trace_parent.get() if telemetry.is_on() else ""  # else there is nowhere to look it up
        return f"{line} [trace {parent.split('-')[1]}]" if parent else line


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "service": self._service,
            "message": record.getMessage(),
        }
        if parent := trace_parent.get():
            line["trace_id"] = parent.split("-")[1]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(service: str) -> None:
    """As `[log]` says. Raises ConfigError."""
    settings = load_section(LogSettings, "log")
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter(service) if settings.format == "json" else _TextFormatter(service))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # the bus tells what matters
    logging.getLogger("asyncio").addFilter(_not_of_nats_tls)


def _not_of_nats_tls(record: logging.LogRecord) -> bool:
    """nats-py begins TLS on a connection that was plain, and asyncio says so at its end, which helps nobody."""
    return "eof_received() has no effect" not in record.msg
