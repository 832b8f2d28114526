"""The workload-monitor's I/O. REQUESTS is read from the start: what is open counts from its arrival on.

A snapshot is stored in the CLUSTER bucket every `snapshot_every_s` seconds, each in the place of the last; whoever
follows the key, or listens on its subject, hears of it at once. One that cannot be stored is left out.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from prometheus_client import Counter, Gauge

from contracts import messages as m
from contracts import subjects
from services.bus import BusTimeout, StreamFull
from services.profile import load_profile
from services.runtime import Runtime, every
from services.workload_monitor.config import WorkloadMonitorConfig
from services.workload_monitor.policy import RequestSeen, SnapshotDue, WorkloadMonitor

logger = logging.getLogger(__name__)

REQUESTS = Counter("tediserve_workload_requests", "Requests seen")
RATE = Gauge("tediserve_workload_requests_per_second", "Arrivals a second, of all classes")
CLASSES = Gauge("tediserve_workload_classes", "Classes of requests that have come in the window")
UNSTORED = Counter("tediserve_workload_unstored_snapshots", "Snapshots that could not be stored in time")

_STORE_LIMIT_S = 2.0


def make_serve(config: WorkloadMonitorConfig) -> Callable[[Runtime], Awaitable[None]]:
    """The service with its profile read. Raises ConfigError."""
    profile = load_profile(Path(config.profile))

    async def serve(runtime: Runtime) -> None:
        loop = asyncio.get_running_loop()
        monitor = WorkloadMonitor(config, profile.model, loop.time())

        def on_request(request: m.GenerateRequest, _: int) -> None:
            REQUESTS.inc()
            arrived_at = request.created_at + loop.time() - time.time()  # wall clock to ours
            monitor.handle(RequestSeen(request, arrived_at), loop.time())

        async def store_snapshot() -> None:
            for command in monitor.handle(SnapshotDue(time.time()), loop.time()):
                CLASSES.set(len(command.snapshot.classes))
                RATE.set(sum(one.rate_rps for one in command.snapshot.classes))
                await _store(runtime, command.snapshot)

        follower = await runtime.bus.follow(
            subjects.REQUESTS,
            "req.*",
            m.GenerateRequest,
            on_request,
            subject_of=lambda request: subjects.request(request.request_id),
        )
        try:
            await follower.caught_up()
        except TimeoutError:
            raise BusTimeout(f"{subjects.REQUESTS} could not be read") from None
        logger.info("ready: %d classes of requests are open", monitor.num_classes)
        runtime.spawn(every(config.snapshot_every_s, store_snapshot), name="snapshots")
        await runtime.until_stopped()

    return serve


async def _store(runtime: Runtime, snapshot: m.WorkloadSnapshot) -> None:
    try:
        await runtime.bus.append(subjects.WORKLOAD, snapshot, limit_s=_STORE_LIMIT_S)
    except (BusTimeout, StreamFull) as error:
        UNSTORED.inc()
        logger.debug("snapshot: %s", error)
