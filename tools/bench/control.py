"""What the threshold-controller's decisions take: load control over many requests, and from a report to a threshold.

1. Load control is the policy itself, in this process: `OPEN` requests, of which `RUNNING` are held by `INSTANCES` and
   have moved since the last run, in every second run at new prices. Their SLOs are given, and take turns.
2. From a report to the threshold: the controller's process on a nats-server of its own, and this process in the place
   of the instances. Each report tells of one request that has just begun, so that each is answered by a threshold. They
   start once the controller has said how loaded the instances are: what it does once for all is not in the figures.
"""

import asyncio
import contextlib
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from contracts import messages as m
from contracts import subjects
from services.bus import Bus, NatsSettings
from services.costs import load_latency
from services.profile import Profile, load_profile
from services.threshold_controller import events as e
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.policy import ThresholdController
from tools.bench.stack import free_ports, own_processes
from tools.up.config import UpConfig
from tools.up.plan import processes_of

OPEN, RUNNING, INSTANCES = 4000, 128, 16
REPORTS, REPORTS_PER_S = 1000, 200
_ROUNDS = 50
SLOS_S = (5.0, 15.0, 60.0, None)
_LOOSE_SLO_S = 65.0
_READY_LIMIT_S = 30.0


class LoadControl(NamedTuple):
    """Seconds of one run, by round."""

    moved: list[float]  # RUNNING requests had moved
    repriced: list[float]  # and an instance had become faster or slower, which changes all prices


def measure_load_control(folder: str, slos_s: Sequence[float | None]) -> LoadControl:
    profile = load_profile(folder)
    settings = ThresholdControllerConfig(profile=folder, load_every_s=0.0)
    controller = ThresholdController(settings, profile, load_latency(profile.latency_file))
    gc.freeze()  # as the controller does
    controller.handle(e.CaughtUp(), 0.0)
    for number in range(OPEN):
        slo_s = slos_s[number % len(slos_s)]
        deadline = None if slo_s is None else 1.0 + slo_s
        controller.handle(e.RequestSeen(_request(profile, number, 0.0, slo_s), number + 1, 100.0, deadline), 0.0)
    now = 1.0
    for instance in range(INSTANCES):
        controller.handle(e.StatusSeen(_status(profile, f"i-{instance}")), now)
    controller.handle(e.Tick(), now)  # it decides from here on
    controller.handle(e.Tick(), now)  # the first run prices all requests
    times = LoadControl([], [])
    for step in range(1, _ROUNDS + 1):
        for into, ratio in ((times.moved, 1.0 + (step - 1) % 2), (times.repriced, 1.0 + step % 2)):
            now += 1e-3
            for instance in range(INSTANCES):
                entries = [
                    _entry(number, 2 * step + (into is times.repriced))
                    for number in range(instance, RUNNING, INSTANCES)
                ]
                controller.handle(e.ReportSeen(_report(f"i-{instance}", entries, ratio if instance == 0 else 1.0)), now)
            started = time.perf_counter()
            controller.handle(e.Tick(), now)
            into.append(time.perf_counter() - started)
    return times


async def measure_reaction(folder: str) -> list[float]:
    """Seconds from a report's publication to the arrival of its request's threshold, by report."""
    with _controller(folder) as (nats_url, log):
        bus = await Bus.connect(NatsSettings(url=nats_url), "bench")
        try:
            await bus.ensure_streams()
            return await _react(bus, load_profile(folder), log)
        finally:
            await bus.close()


async def _react(bus: Bus, profile: Profile, log: Path) -> list[float]:
    sent: dict[str, float] = {}
    took: dict[str, float] = {}
    all_told, is_loaded = asyncio.Event(), asyncio.Event()

    def on_thresholds(thresholds: m.Thresholds) -> None:
        heard = time.perf_counter()
        for entry in thresholds.entries:
            if entry.request_id in sent:
                took.setdefault(entry.request_id, heard - sent[entry.request_id])
        if len(took) == REPORTS:
            all_told.set()

    def on_load(state: m.LoadState) -> None:
        if state.capacity_s:
            is_loaded.set()

    await bus.subscribe("inst.*.thresholds", m.Thresholds, on_thresholds)
    await bus.subscribe(subjects.LOAD_STATE, m.LoadState, on_load)
    for number in range(REPORTS):
        request = _request(profile, number, time.time(), _LOOSE_SLO_S)
        await bus.append(subjects.request(request.request_id), request)
    await asyncio.to_thread(_wait_until_ready, log)
    instances = [f"i-{number}" for number in range(8)]
    for instance_id in instances:
        await bus.publish(subjects.instance_status(instance_id), _status(profile, instance_id))
    await asyncio.wait_for(is_loaded.wait(), _READY_LIMIT_S)
    beat = time.perf_counter()
    for number in range(REPORTS):
        instance_id = instances[number % len(instances)]
        entries = [_entry(number, 1)]
        if number >= 8 * len(instances):  # each holds eight
            entries.append(_entry(number - 8 * len(instances), 2, finished=True))
        sent[entries[0].request_id] = time.perf_counter()
        await bus.publish(subjects.report(instance_id), _report(instance_id, entries))
        beat += 1 / REPORTS_PER_S
        await asyncio.sleep(max(0.0, beat - time.perf_counter()))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(all_told.wait(), 2.0)
    return list(took.values())


@contextlib.contextmanager
def _controller(folder: str) -> Iterator[tuple[str, Path]]:
    """A nats-server and a controller. Yields its address and the controller's log."""
    beside_python = Path(sys.executable).with_name("nats-server")
    nats_server = str(beside_python) if beside_python.exists() else shutil.which("nats-server") or "nats-server"
    port, nats_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="tediserve-bench-") as data:
        config = UpConfig(port=port, nats_port=nats_port, profile=folder, data=data)
        wanted = {p.name: p for p in processes_of(config, nats_server)}
        log = Path(data) / "controller.log"
        with log.open("wb") as output, own_processes() as start:
            for name in ("nats", "threshold-controller"):
                start(wanted[name].command, output, os.environ | wanted[name].environment)
            yield config.nats_url, log


def _wait_until_ready(log: Path) -> None:
    give_up_at = time.monotonic() + _READY_LIMIT_S
    while "ready: " not in log.read_text(errors="replace"):
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"the controller is not ready:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)


def _request(profile: Profile, number: int, created_at: float, slo_s: float | None) -> m.GenerateRequest:
    decoding = profile.decoding
    return m.GenerateRequest(
        request_id=f"r-{number}",
        gateway_id="bench",
        model=profile.model,
        prompt_ids=[1] * (32 + number % 200),
        max_tokens=decoding.max_tokens,
        block_size=decoding.block_size,
        cache=decoding.cache,
        blocks_ahead=decoding.blocks_ahead,
        created_at=created_at,
        expires_at=created_at + 100,
        deadline_at=None if slo_s is None else created_at + slo_s,
    )


def _status(profile: Profile, instance_id: str) -> m.InstanceStatus:
    return m.InstanceStatus(
        instance_id=instance_id,
        node_id="bench",
        model=profile.model,
        tp_degree=1,
        sent_at=time.time(),
        epoch=1,
        draining=False,
        max_requests=profile.engine.max_requests,
        kv_tokens=profile.engine.kv_tokens or 16384,
        held=[],
    )


def _entry(number: int, steps: int, *, finished: bool = False) -> m.RequestReport:
    return m.RequestReport(
        request_id=f"r-{number}",
        attempt=1,
        block_index=0,
        num_blocks=8,
        steps=steps,
        steps_in_block=steps,
        tokens_committed=min(steps, 31),
        tokens_committed_in_block=min(steps, 31),
        threshold=0.9,
        confidence=(0.5, 0.6, 0.7, 0.8, 0.9),
        next_recompute=False,
        finished=finished,
    )


def _report(instance_id: str, entries: list[m.RequestReport], latency_ratio: float = 1.0) -> m.Report:
    return m.Report(instance_id=instance_id, sent_at=time.time(), entries=entries, latency_ratio=latency_ratio)
