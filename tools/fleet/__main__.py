"""python -m tools.fleet: a process with many simulated instances, on the bus that `[nats]` names.

Each is a live worker whose passes sleep as long as the profile's latency says, and whose requests denoise in as many
steps as published ones did. What they write is no text. Ctrl-C ends all at once, as if their machine had lost power;
SIGUSR1 does so to the first one that is left.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from prometheus_client import start_http_server

from services.bus import BusTimeout, NatsSettings
from services.costs import load_latency
from services.denoiser.config import WorkerConfig
from services.profile import load_profile
from services.runtime import set_up_logging
from services.settings import ConfigError, load_section
from tools.fleet.instance import SimulatedInstance
from tools.simulate.denoising import Counted
from tools.simulate.run import Job, read_behaviour

READY = "all instances are there"

_CONNECT_AT_ONCE = 8


def behaviour_of(profile: Path) -> Counted:
    """How requests denoise that are served with this profile: the published ones, at the profile's mean steps.

    Raises ConfigError.
    """
    job = Job(profile=profile, system="tedi", workload="profile", phases=(), tp_degrees=(1,))
    behaviour = read_behaviour(job, load_profile(profile))
    assert isinstance(behaviour, Counted)
    return behaviour


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, required=True, help="folder; its weights are not needed")
    parser.add_argument("--instances", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument("--name", default="sim", help="what their ids begin with (default: %(default)s)")
    parser.add_argument("--slower", type=float, default=1.0, help="reports come so many times as seldom (default: 1)")
    parser.add_argument("--metrics-port", type=int, help="of the workers together")
    options = parser.parse_args()
    try:
        set_up_logging("fleet")
        settings = load_section(NatsSettings, "nats")
        instances = _make(options)
    except ConfigError as error:
        print(f"fleet: {error}", file=sys.stderr)
        sys.exit(2)
    if options.metrics_port:
        start_http_server(options.metrics_port)
    try:
        asyncio.run(_run(instances, settings))
    except BusTimeout as error:
        sys.exit(f"fleet: {error}")


def _make(options: argparse.Namespace) -> list[SimulatedInstance]:
    profile, behaviour = load_profile(options.profile), behaviour_of(options.profile)
    cost = load_latency(profile.latency_file).cost(profile.engine.tp_degree)
    report_every_ms = options.slower * WorkerConfig().report_every_ms
    return [
        SimulatedInstance(
            WorkerConfig(
                profile=str(options.profile),
                instance_id=f"{options.name}-{number}",
                node_id=options.name,
                report_every_ms=report_every_ms,
            ),
            profile,
            cost,
            behaviour,
        )
        for number in range(options.instances)
    ]


async def _run(instances: list[SimulatedInstance], settings: NatsSettings) -> None:
    """Until a signal, or until one of them fails, which it raises."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    slots = asyncio.Semaphore(_CONNECT_AT_ONCE)
    killed: list[asyncio.Task[None]] = []

    async def begin(instance: SimulatedInstance) -> None:
        async with slots:
            await instance.begin(settings)

    await asyncio.gather(*(begin(instance) for instance in instances))
    loop.add_signal_handler(signal.SIGUSR1, lambda: killed.append(loop.create_task(instances.pop(0).kill())))
    print(READY, flush=True)
    watches = [loop.create_task(_watch(instance)) for instance in instances]
    stopped = loop.create_task(stopping.wait())
    done, _ = await asyncio.wait({stopped, *watches}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*killed, *(instance.kill() for instance in instances))
    for task in done:
        task.result()


async def _watch(instance: SimulatedInstance) -> None:
    """Raises what the instance fails with; who was killed has not failed."""
    with contextlib.suppress(asyncio.CancelledError):
        await instance.work
        return
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
