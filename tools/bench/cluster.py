"""python -m tools.bench.cluster: the control services of a cluster that is larger than this machine. Prints Markdown.

1. Scheduler, threshold-controller, step-predictor and nats-server are real processes. The instances are live workers
   whose passes sleep (tools/fleet), each with a connection of its own; this process is their gateway.
2. They have LLaDA-8B's published latency on H100, at which eight requests an instance run about 50 steps a second, and
   its published steps on GSM8K. The step predictor is the built-in model's: what it says is of no use here, but takes
   as long.
3. So many requests are open all the time: where one ends, the next is asked. Half of them have an SLO.
4. Where the whole does not fit on this machine's cores, time is stretched (`--slower`): passes, SLOs, and the pauses
   between reports, looks for moves and load control take so many times as long. What a service needs of a core at the
   design's rate is at most what it needed for each step, times that rate, and what it needs without any request: what
   goes by the clock all the same (statuses, repetitions) counts more often, and messages that come together are cheaper
   (a report costs half as much at 1,500/s as at 300/s). So it is measured again how the scheduler alone does at four
   times the rate: the others leave it that much room. And its policy alone is measured in the simulator, in processor
   time, at the design's rate.
5. The streams lie in memory. On a disk that is synced each write, a few hundred records a second are all that a laptop
   stores; a cluster of this size has three nats-servers that replicate instead.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import httpx
import msgspec
import psutil
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from contracts import messages as m
from contracts import subjects
from services.bus import Bus, NatsSettings
from services.costs import PassCost, dump_latency, read_latency_file
from services.profile import Profile, load_profile
from services.runtime import every
from services.scheduler import events as e
from services.step_predictor.config import CARD_FILE, MODEL_FILE
from services.step_predictor.model import read_card
from tools.bench.machine import describe_machine
from tools.bench.serving import quantile
from tools.bench.stack import free_ports, own_processes
from tools.fleet.__main__ import READY, behaviour_of
from tools.fleet.engine import TOKEN_ID
from tools.simulate.cluster import Cluster, SchedulingPolicy
from tools.simulate.denoising import Counted
from tools.simulate.run import Job, make_setting, read_behaviour, read_profile
from tools.simulate.systems import Scene, system
from tools.simulate.workload import Phase, arrivals
from tools.up.config import UpConfig
from tools.up.plan import processes_of

PROFILE, PREDICTOR = Path("profiles/llada-8b-h100"), Path("profiles/tiny-cpu")
STEPS_PER_S = 50.0  # of each request, by the design's budget
MEASURED = {"scheduler": "acting", "threshold-controller": "ready: ", "step-predictor": "ready: "}  # and their log then

_GATEWAY = "bench"
_SLOS_S = (3.0, 6.0)  # evenly spread between, in time that is not stretched
_SIMULATED_S = (1.0, 3.0)  # of the simulation, what counts
_READY_LIMIT_S = 90.0
_PROBE_EVERY_S = 0.05


class ClusterJob(NamedTuple):
    """What is to be measured."""

    instances: int = 128
    requests: int = 8  # of each instance, on the mean
    slower: float = 16.0
    seconds: float = 25.0  # measured
    fleets: int = 1  # processes of simulated instances
    services: tuple[str, ...] = tuple(MEASURED)
    idle_s: float = 4.0  # measured without requests, before
    silence: bool = False  # in the middle of it one instance is killed, and nobody says so


class Waits(NamedTuple):
    """Seconds: median, 95th and 99th percentile."""

    p50: float
    p95: float
    p99: float

    def __str__(self) -> str:
        return " | ".join(f"{1e3 * value:.2f}" for value in self)


class Service(NamedTuple):
    """What a process used of a core, as a share."""

    name: str
    idle: float  # without requests
    busy: float
    step_us: float  # processor time for each step of a request, beyond that
    full: float  # at the design's rate (rule 4)


class Measured(NamedTuple):
    """See `print_cluster`."""

    job: ClusterJob
    request_steps_per_s: float
    asked: int
    ended: dict[str, int]  # by state, or reason where it failed; "lost": has none
    taken_over: int  # ended requests that had been lost with their instance
    moves: int
    requests_per_s: float  # in the window, as the rest
    mean_threshold: float
    stretch: float  # passes took so many times what they should have: above 1 the fleet is the bottleneck
    services: list[Service]
    placed: Waits  # from handing a request in to an instance's having it
    bus: Waits  # a message of this process to itself
    status_lag: Waits  # from an instance's status to the scheduler's reading it
    deciding: dict[str, Waits]  # by what is decided
    rates: dict[str, float]  # messages a second, by kind

    @property
    def lost(self) -> int:
        return self.ended.get("lost", 0)

    @property
    def finished(self) -> int:
        return self.ended.get("finished", 0)


# --- the stack ----------------------------------------------------------------------------------------------------


def write_profile(into: Path, slower: float) -> Profile:
    """Rule 2, with stretched latencies."""
    into.mkdir()
    shutil.copy(PROFILE / "profile.toml", into)
    shutil.copy(PREDICTOR / MODEL_FILE, into)
    profile = load_profile(into)
    card = replace(read_card(PREDICTOR / CARD_FILE), model=profile.model, manner=profile.decoding.manner)
    (into / CARD_FILE).write_bytes(msgspec.json.encode(card))
    latency = read_latency_file(PROFILE / "latency.json")
    degrees = [replace(one, cost=_stretched(one.cost, slower), errors=(), passes=()) for one in latency.degrees]
    dump_latency(profile.latency_file, f"{latency.hardware}, times {slower:g}", degrees)
    return profile


def _stretched(cost: PassCost, times: float) -> PassCost:
    parts = ("recompute_step_ms", "cache_step_ms", "key_ms", "pair_ms")
    curve = tuple((tokens, times * ms) for tokens, ms in cost.curve)
    return replace(cost, curve=curve, **{part: times * getattr(cost, part) for part in parts})


class _Stack(NamedTuple):
    nats_url: str
    monitor_url: str  # of the nats-server
    metrics_urls: dict[str, str]  # by process
    pids: dict[str, int]


@contextlib.contextmanager
def _running(job: ClusterJob, profile: Path, data: Path) -> Iterator[_Stack]:
    """Raises RuntimeError where it does not start."""
    nats_port, monitor_port, *metrics_ports = free_ports(2 + len(job.services) + job.fleets)
    config = UpConfig(nats_port=nats_port, profile=str(profile), data=str(data))
    beside_python = Path(sys.executable).with_name("nats-server")
    nats_server = str(beside_python) if beside_python.exists() else shutil.which("nats-server") or "nats-server"
    wanted = {p.name: p for p in processes_of(config, nats_server, has_predictor=True)}
    fleets = [f"fleet-{number}" for number in range(job.fleets)]
    ports = dict(zip((*job.services, *fleets), metrics_ports, strict=True))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TEDISERVE_")},
        "TEDISERVE_NATS_STORAGE": "memory",  # rule 5
        "TEDISERVE_NATS_MAX_OPEN_REQUESTS": str(max(4096, 2 * job.instances * job.requests)),
        "TEDISERVE_SCHEDULER_MOVE_EVERY_S": str(0.1 * job.slower),
        "TEDISERVE_THRESHOLD_CONTROLLER_LOAD_EVERY_S": str(0.05 * job.slower),
        **{f"TEDISERVE_{name.replace('-', '_').upper()}_METRICS_PORT": str(ports[name]) for name in job.services},
        "OMP_NUM_THREADS": "1",
    }
    with own_processes() as start_process:
        running: dict[str, subprocess.Popen[bytes]] = {}

        def start(name: str, command: Sequence[str], more: dict[str, str]) -> None:
            with (data / f"{name}.log").open("wb") as log:
                running[name] = start_process(command, log, environment | more)

        start("nats", (*wanted["nats"].command, "-m", str(monitor_port)), {})
        for name in job.services:
            start(name, wanted[name].command, wanted[name].environment)
        shares = [job.instances * n // job.fleets for n in range(job.fleets + 1)]
        for number, name in enumerate(fleets):
            command = [sys.executable, "-m", "tools.fleet", "--profile", str(profile), "--name", f"sim{number}"]
            command += ["--instances", str(shares[number + 1] - shares[number]), "--slower", str(job.slower)]
            command += ["--metrics-port", str(ports[name])]
            start(name, command, {"TEDISERVE_NATS_URL": config.nats_url})
        marks = {name: MEASURED[name] for name in job.services} | dict.fromkeys(fleets, READY)
        _wait_until_ready(running, data, marks)
        yield _Stack(
            nats_url=config.nats_url,
            monitor_url=f"http://127.0.0.1:{monitor_port}",
            metrics_urls={name: f"http://127.0.0.1:{port}/metrics" for name, port in ports.items()},
            pids={name: process.pid for name, process in running.items()},
        )


def _wait_until_ready(running: dict[str, "subprocess.Popen[bytes]"], data: Path, marks: dict[str, str]) -> None:
    give_up_at = time.monotonic() + _READY_LIMIT_S
    while missing := [name for name, mark in marks.items() if mark not in _log(data, name)]:
        ended = [name for name, process in running.items() if process.poll() is not None]
        if ended or time.monotonic() > give_up_at:
            name = (ended or missing)[0]
            raise RuntimeError(f"{name} is not ready:\n{_log(data, name)}")
        time.sleep(0.1)


def _log(data: Path, name: str) -> str:
    return (data / f"{name}.log").read_text(errors="replace")


# --- the load -----------------------------------------------------------------------------------------------------


class _Gateway:
    """Rule 3: asks, and reads how it goes on."""

    def __init__(self, bus: Bus, profile: Profile, behaviour: Counted, slower: float) -> None:
        self._bus, self._profile, self._behaviour, self._slower = bus, profile, behaviour, slower
        self._rng = random.Random(0)
        self._numbers = itertools.count()
        self._asking: set[asyncio.Task[None]] = set()
        self._blocks: dict[str, int] = {}  # of each open request, as far as its records tell
        self.stopping = False
        self.all_ended = asyncio.Event()
        self.asked = self.request_steps = self.records = self.taken_over = self.moves = 0
        self.ended: Counter[str] = Counter()
        self.thresholds: list[tuple[float, int]] = []  # of blocks: the mean, and of how many steps
        self.placed_s: list[float] = []

    async def ask(self) -> None:
        """One request more."""
        number = next(self._numbers)
        decoding, now = self._profile.decoding, time.time()
        prompt = number % self._behaviour.num_prompts
        slo_s = self._slower * self._rng.uniform(*_SLOS_S) if number % 2 else None
        request = m.GenerateRequest(
            request_id=f"r-{number}",
            gateway_id=_GATEWAY,
            model=self._profile.model,
            prompt_ids=[TOKEN_ID] * self._behaviour.prompt_tokens(prompt),
            max_tokens=self._behaviour.max_tokens(prompt),
            block_size=decoding.block_size,
            cache=decoding.cache,
            blocks_ahead=decoding.blocks_ahead,
            created_at=now,
            expires_at=now + self._profile.limits.time_limit_s,
            deadline_at=None if slo_s is None else now + slo_s,
            seed=prompt,
        )
        self._blocks[request.request_id] = 0
        self.asked += 1
        await self._bus.append(subjects.request(request.request_id), request, after_seq=0, limit_s=10.0)

    def on_record(self, record: m.ProgressRecord, _: int) -> None:
        known = self._blocks.get(record.request_id)
        if known is None:
            return
        self.records += 1
        for block in record.blocks[known:]:
            steps = block.recompute_steps + block.cache_steps
            self.request_steps += steps
            self.thresholds.append((block.mean_threshold, steps))
        self._blocks[record.request_id] = len(record.blocks)
        if record.is_final:
            self._end(record)

    def _end(self, record: m.ProgressRecord) -> None:
        del self._blocks[record.request_id]
        self.ended[record.reason or record.state] += 1
        self.taken_over += record.attempt > 1
        self.moves += record.moves
        if record.started_at is not None:
            self.placed_s.append(record.started_at - record.created_at)
        if not self.stopping:
            task = asyncio.create_task(self.ask())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        elif not self._blocks:
            self.all_ended.set()

    @property
    def num_open(self) -> int:
        return len(self._blocks)


class _Counts(NamedTuple):
    """At one moment."""

    at: float
    cpu_s: dict[str, float]  # by process
    samples: dict[tuple[str, ...], float]  # by process, metric and its labels' values
    messages: dict[str, float]  # of the nats-server
    request_steps: int
    records: int
    ended: int
    thresholds: int
    placed: int
    probes: int


async def measure_cluster(job: ClusterJob) -> Measured:
    """Raises RuntimeError where the stack does not start."""
    with tempfile.TemporaryDirectory(prefix="tediserve-bench-") as folder:
        profile = await asyncio.to_thread(write_profile, Path(folder) / "profile", job.slower)
        data = Path(folder) / "data"
        data.mkdir()
        with _running(job, Path(profile.folder), data) as stack:
            try:
                return await _measure(job, stack, profile)
            except (httpx.HTTPError, psutil.Error) as error:
                logs = "\n".join(f"{name}: {_log(data, name)[-2000:]}" for name in stack.pids)
                raise RuntimeError(f"a process has ended ({error!r}):\n{logs}") from None


async def _measure(job: ClusterJob, stack: _Stack, profile: Profile) -> Measured:
    bus = await Bus.connect(NatsSettings(url=stack.nats_url), "gateway bench")
    gateway = _Gateway(bus, profile, behaviour_of(Path(profile.folder)), job.slower)
    probes: list[float] = []
    beside = [
        asyncio.create_task(every(1.0, lambda: bus.publish(subjects.gateway_status(_GATEWAY), _gateway_status()))),
        asyncio.create_task(every(_PROBE_EVERY_S, await _prober(bus, probes))),
    ]
    try:
        await bus.follow(subjects.PROGRESS, subjects.progress_of_gateway(_GATEWAY), m.ProgressRecord, gateway.on_record)
        look = _looker(stack, gateway, probes)
        idle = await _before_and_after(look, job.idle_s)
        await _ramp_up(gateway, job, profile)
        if job.silence:
            asyncio.get_running_loop().call_later(job.seconds / 2, os.kill, stack.pids["fleet-0"], signal.SIGUSR1)
        busy = await _before_and_after(look, job.seconds)
        gateway.stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gateway.all_ended.wait(), profile.limits.time_limit_s)
        return _sum_up(job, gateway, probes, idle, busy)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await bus.close()


async def _before_and_after(look: Callable[[], Awaitable[_Counts]], seconds: float) -> tuple[_Counts, _Counts]:
    before = await look()
    await asyncio.sleep(seconds)
    return before, await look()


async def _ramp_up(gateway: _Gateway, job: ClusterJob, profile: Profile) -> None:
    """All requests one after another, over about as long as one of them takes: they shall not go in step."""
    wanted = job.instances * job.requests
    decoding = profile.decoding
    takes_s = job.slower * decoding.max_tokens / decoding.block_size * decoding.steps_per_block / STEPS_PER_S
    pause_s, beat = takes_s / wanted, time.perf_counter()
    for _ in range(wanted):
        await gateway.ask()
        beat += pause_s
        await asyncio.sleep(max(0.0, beat - time.perf_counter()))


def _gateway_status() -> m.GatewayStatus:
    return m.GatewayStatus(gateway_id=_GATEWAY, sent_at=time.time())


async def _prober(bus: Bus, took_s: list[float]) -> Callable[[], Awaitable[object]]:
    """Sends messages to this process, and notes how long they took."""
    subject = subjects.canvas("probe")  # nobody else listens there
    sent = asyncio.Queue[float]()

    def on_probe(_: m.StatusAsk) -> None:
        took_s.append(time.perf_counter() - sent.get_nowait())

    await bus.subscribe(subject, m.StatusAsk, on_probe)

    async def probe() -> None:
        sent.put_nowait(time.perf_counter())
        await bus.publish(subject, m.StatusAsk())

    return probe


def _looker(stack: _Stack, gateway: _Gateway, probes: list[float]) -> Callable[[], Awaitable[_Counts]]:
    processes = {name: psutil.Process(pid) for name, pid in stack.pids.items()}
    processes[_GATEWAY] = psutil.Process()

    async def look() -> _Counts:
        async with httpx.AsyncClient(timeout=10) as client:
            samples: dict[tuple[str, ...], float] = {}
            for name, url in stack.metrics_urls.items():
                for family in text_string_to_metric_families((await client.get(url)).text):
                    for sample in family.samples:
                        samples[name, sample.name, *sample.labels.values()] = sample.value
            varz = (await client.get(f"{stack.monitor_url}/varz")).json()
        return _Counts(
            at=time.perf_counter(),
            cpu_s={name: sum(process.cpu_times()[:2]) for name, process in processes.items()},
            samples=samples,
            messages={name: varz[name] for name in ("in_msgs", "out_msgs")},
            request_steps=gateway.request_steps,
            records=gateway.records,
            ended=gateway.ended.total(),
            thresholds=len(gateway.thresholds),
            placed=len(gateway.placed_s),
            probes=len(probes),
        )

    return look


# --- what came of it ----------------------------------------------------------------------------------------------


def _sum_up(
    job: ClusterJob,
    gateway: _Gateway,
    probes: list[float],
    idle: tuple[_Counts, _Counts],
    busy: tuple[_Counts, _Counts],
) -> Measured:
    before, after = busy
    seconds = after.at - before.at
    grown = {key: value - before.samples.get(key, 0.0) for key, value in after.samples.items()}
    steps_per_s = (after.request_steps - before.request_steps) / seconds
    wanted_per_s = job.instances * job.requests * STEPS_PER_S
    blocks = gateway.thresholds[before.thresholds : after.thresholds]
    slept = sum(value for key, value in grown.items() if key[1] == "tediserve_worker_step_seconds_sum")
    wanted = sum(value for key, value in grown.items() if key[1] == "tediserve_worker_profiled_seconds_total")
    ended = dict(gateway.ended)
    if gateway.num_open:
        ended["lost"] = gateway.num_open

    def of(service: str, metric: str) -> Waits:
        return _waits_of(grown, service, f"tediserve_{metric}_seconds")

    def rate(*key: str) -> float:
        return grown.get(key, 0.0) / seconds

    heard = "threshold-controller", "tediserve_controller_events_total"
    return Measured(
        job=job,
        request_steps_per_s=steps_per_s,
        asked=gateway.asked,
        ended=ended,
        taken_over=gateway.taken_over,
        moves=gateway.moves,
        requests_per_s=(after.ended - before.ended) / seconds,
        mean_threshold=sum(t * steps for t, steps in blocks) / sum(steps for _, steps in blocks),
        stretch=slept / wanted,
        services=[_service(name, idle, busy, steps_per_s, wanted_per_s) for name in after.cpu_s],
        placed=_waits(gateway.placed_s[before.placed : after.placed]),
        bus=_waits(probes[before.probes : after.probes]),
        status_lag=of("scheduler", "scheduler_clock_skew"),
        deciding={
            "scheduler, a moment in which it places": of("scheduler", "scheduler_placement"),
            "scheduler, any moment": of("scheduler", "scheduler_decision"),
            "controller, a round": of("threshold-controller", "controller_decision"),
            "controller, from a report to thresholds sent": of("threshold-controller", "controller_reaction"),
            "predictor, a batch": of("step-predictor", "step_predictor"),
        },
        rates={
            "reports": rate(*heard, "ReportSeen"),
            "records": rate(*heard, "RecordSeen"),
            "forecasts": rate(*heard, "ForecastSeen"),
            "statuses": rate(*heard, "StatusSeen"),
            "thresholds": sum(
                value for key, value in grown.items() if key[1] == "tediserve_controller_thresholds_sent_total"
            )
            / seconds,
            "placements": sum(v for k, v in grown.items() if k[1] == "tediserve_scheduler_placements_total") / seconds,
            "moves": sum(v for k, v in grown.items() if k[1] == "tediserve_scheduler_moves_total") / seconds,
            "into the nats-server": (after.messages["in_msgs"] - before.messages["in_msgs"]) / seconds,
            "out of it": (after.messages["out_msgs"] - before.messages["out_msgs"]) / seconds,
        },
    )


def _service(
    name: str, idle: tuple[_Counts, _Counts], busy: tuple[_Counts, _Counts], steps_per_s: float, wanted_per_s: float
) -> Service:
    idle_share, busy_share = ((b.cpu_s[name] - a.cpu_s[name]) / (b.at - a.at) for a, b in (idle, busy))
    step_s = max(0.0, busy_share - idle_share) / steps_per_s
    return Service(name, idle_share, busy_share, 1e6 * step_s, idle_share + step_s * wanted_per_s)


def _waits(values: Sequence[float]) -> Waits:
    return Waits(*(quantile(values, share) if values else math.nan for share in (0.5, 0.95, 0.99)))


def _waits_of(grown: dict[tuple[str, ...], float], service: str, histogram: str) -> Waits:
    """From the buckets of a histogram, in proportion within one; nan where nothing was observed."""
    buckets = sorted((float(key[-1]), n) for key, n in grown.items() if key[:2] == (service, f"{histogram}_bucket"))
    return Waits(*(bucket_quantile(buckets, share) for share in (0.5, 0.95, 0.99)))


def bucket_quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """As Prometheus's `histogram_quantile`: (upper bound, observed up to it), ascending; beyond the last finite bound
    that bound. nan where nothing was observed."""
    if not buckets or not buckets[-1][1]:
        return math.nan
    wanted, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    raise AssertionError("the last bucket holds all")


# --- the policy alone ---------------------------------------------------------------------------------------------


class PolicyTimes(NamedTuple):
    """Of the scheduler's policy in the simulator, at the design's rate."""

    requests_per_s: float
    placing: Waits  # processor time of an event over which it places
    others: Waits
    share: float  # of a core


class _TimedPolicy:
    """The scheduler's policy, with a note of when it took how much processor time, and whether it placed."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.took: list[tuple[float, float, bool]] = []

    def handle(self, event: e.Event, now: float) -> list[e.Command]:
        started = time.thread_time()
        commands = self._policy.handle(event, now)
        took_s = time.thread_time() - started
        self.took.append((now, took_s, any(isinstance(command, e.SendAssign) for command in commands)))
        return commands


def measure_policy(instances: int, requests: int) -> PolicyTimes:
    """Random arrivals, each with the SLO in the middle, of as many steps a second as the budget has."""
    began_s, ended_s = _SIMULATED_S
    job = Job(
        profile=PROFILE, system="tedi", workload="profile", phases=(), tp_degrees=(1,) * instances, slo_s=fmean(_SLOS_S)
    )
    chosen = system(job.system)
    profile, latency = read_profile(job, chosen.cache)
    behaviour = read_behaviour(job, profile)
    setting = make_setting(job, profile, latency, behaviour)
    policies = chosen.make(Scene(setting, behaviour, "blurred", job.forecast_error))
    timed = _TimedPolicy(policies.scheduler)
    rate = instances * requests * STEPS_PER_S / behaviour.mean(profile.decoding.threshold).steps
    asked = arrivals([Phase(rate, ended_s)], behaviour.num_prompts, job.seed)
    Cluster(setting, policies._replace(scheduler=timed), behaviour, asked).run()
    took = [(took_s, places) for at, took_s, places in timed.took if began_s <= at < ended_s]
    return PolicyTimes(
        requests_per_s=rate,
        placing=_waits([took_s for took_s, places in took if places]),
        others=_waits([took_s for took_s, places in took if not places]),
        share=sum(took_s for took_s, _ in took) / (ended_s - began_s),
    )


def print_policy(done: PolicyTimes) -> None:
    """The table for BENCHMARKS.md."""
    print(f"The scheduler's policy alone, {done.requests_per_s:.0f} requests/s: {done.share:.0%} of a core.\n")
    print("| processor time of | p50 ms | p95 ms | p99 ms |")
    print("|---|---|---|---|")
    print(f"| an event over which it places | {done.placing} |\n| any other | {done.others} |\n", flush=True)


# --- the command --------------------------------------------------------------------------------------------------


def print_cluster(done: Measured) -> None:
    """The tables for BENCHMARKS.md."""
    job, wanted = done.job, done.job.instances * done.job.requests * STEPS_PER_S
    print(
        f"{job.instances} instances, {job.instances * job.requests} requests open, time stretched {job.slower:g} times,"
        f" {job.seconds:g} s: {done.request_steps_per_s:,.0f} request steps/s of the budget's {wanted:,.0f}.\n"
    )
    print("| instances | requests/s | asked | finished | lost | other ends | moves | taken over | mean threshold |")
    print("|---|---|---|---|---|---|---|---|---|")
    other = ", ".join(f"{n} {why}" for why, n in done.ended.items() if why not in ("finished", "lost")) or "none"
    print(
        f"| {job.instances} | {done.requests_per_s:.1f} | {done.asked} | {done.finished} | {done.lost} | {other} |"
        f" {done.moves} | {done.taken_over} | {done.mean_threshold:.3f} |\n"
    )
    print("| process | of a core, idle | under this load | µs a request step | at 50 steps/s, at most | keeps up |")
    print("|---|---|---|---|---|---|")
    for s in done.services:
        kept = ("yes" if s.full < 1 else "not shown") if s.name in MEASURED else ""
        full = f"{s.full:.0%}" if s.name in (*MEASURED, "nats") else ""
        print(f"| {s.name} | {s.idle:.1%} | {s.busy:.1%} | {s.step_us:.1f} | {full} | {kept} |")
    print("\n| what | p50 ms | p95 ms | p99 ms |")
    print("|---|---|---|---|")
    times = {
        **done.deciding,
        "request handed in to instance has it": done.placed,
        "status of an instance to the scheduler": done.status_lag,
        "a message to oneself (bus)": done.bus,
    }
    for what, waits in times.items():
        if not math.isnan(waits.p50):
            print(f"| {what} | {waits} |")
    print("\nMessages a second: " + ", ".join(f"{what} {rate:,.0f}" for what, rate in done.rates.items() if rate) + ".")
    print(
        f"Passes took {done.stretch - 1:.1%} longer than they should have: how far the fleet itself lagged.\n",
        flush=True,
    )


def main() -> None:
    defaults = ClusterJob()
    parser = argparse.ArgumentParser(prog="python -m tools.bench.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=defaults.instances, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=defaults.requests, help="an instance (default: %(default)s)")
    parser.add_argument(
        "--slower", type=float, default=defaults.slower, help="time is stretched (default: %(default)g)"
    )
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="measured (default: %(default)g)")
    parser.add_argument("--fleets", type=int, default=defaults.fleets, help="processes of instances (default: 1)")
    parser.add_argument("--silence", action="store_true", help="one instance falls silent in the middle of it")
    parser.add_argument(
        "--services", nargs="+", choices=MEASURED, help="(default: all, then the scheduler alone, four times as fast)"
    )
    options = vars(parser.parse_args())
    if options["services"]:
        jobs = [ClusterJob(**options)]
    else:
        job = ClusterJob(**(options | {"services": tuple(MEASURED)}))
        jobs = [job, job._replace(services=("scheduler",), slower=job.slower / 4, seconds=job.seconds / 2)]
    print(f"Hardware: {describe_machine()}. Profile: {PROFILE}.\n")
    if not options["services"]:
        print_policy(measure_policy(options["instances"], options["requests"]))
    for job in jobs:
        try:
            print_cluster(asyncio.run(measure_cluster(job)))
        except RuntimeError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
