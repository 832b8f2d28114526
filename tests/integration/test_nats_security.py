"""nats-server as deploy/nats/single-secure.conf has it: who may connect, and what each service may say and hear.

The tables below are written by hand: contracts/permissions.py, which makes the server's configuration, must agree.
"""

import asyncio
import contextlib
import gc
import logging
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import get_args

import httpx
import nkeys
import pytest
import pytest_asyncio

from contracts import messages as m
from contracts import subjects
from contracts.permissions import SERVICES, stream_of, streams_of
from contracts.subjects import LEASES, Service
from services.bus import Bus, BusTimeout, NatsSettings
from services.lease import Lease
from services.settings import ConfigError
from tests.builders import make_record, make_request
from tests.conftest import NatsServer, nats_server_binary
from tests.processes import ROOT, ServiceProcess, free_port
from tests.waiting import until, wait_until
from tools.secrets.store import Secrets, make_secrets

pytestmark = pytest.mark.integration

# Everything that anybody says, and some of what only an attacker would.
SUBJECTS = (
    *("req.r", "prog.g.r", "cancel.r", "canvas.r", "report.i", "forecast.i", "load.state", "sched.drain"),
    *("inst.i.assign", "inst.i.release", "inst.i.drain", "inst.i.thresholds"),
    *("status.ask", "status.instance.i", "status.lost.i", "status.node.n", "status.gateway.g"),
    *("$KV.CLUSTER.plan", "$KV.CLUSTER.workload"),
    *("$KV.CLUSTER.scheduler", "$KV.CLUSTER.reconfigurator", "$KV.CLUSTER.threshold-controller"),
    *("$JS.API.STREAM.UPDATE.REQUESTS", "$JS.API.STREAM.PURGE.REQUESTS", "$JS.API.STREAM.PURGE.PROGRESS"),
    *("$JS.API.STREAM.DELETE.PROGRESS", "$JS.API.STREAM.CREATE.MINE", "$JS.API.STREAM.LIST", "$JS.API.INFO"),
    *("_INBOX.gateway.x", "_INBOX.scheduler.x", "$SYS.REQ.SERVER.PING", "else.where"),
)
MAY_SAY: dict[Service, set[str]] = {
    "gateway": {"req.r", "prog.g.r", "cancel.r", "status.ask", "status.gateway.g"},
    "scheduler": {
        *("prog.g.r", "cancel.r", "inst.i.assign", "inst.i.release", "status.ask", "$KV.CLUSTER.scheduler"),
        *("$JS.API.STREAM.UPDATE.REQUESTS", "$JS.API.STREAM.PURGE.REQUESTS"),
    },
    "worker": {"prog.g.r", "report.i", "canvas.r", "status.instance.i", "sched.drain"},
    "agent": {"status.lost.i", "status.node.n", "inst.i.drain"},
    "step-predictor": {"forecast.i"},
    "threshold-controller": {"inst.i.thresholds", "load.state", "status.ask", "$KV.CLUSTER.threshold-controller"},
    "workload-monitor": {"$KV.CLUSTER.workload"},
    "reconfigurator": {"status.ask", "$KV.CLUSTER.plan", "$KV.CLUSTER.reconfigurator"},
    "cli": {"inst.i.drain", "status.ask"},
}
PATTERNS = (
    *("req.*", "prog.*.*", "cancel.*", "canvas.*", "report.*", "forecast.*", "load.state", "sched.drain"),
    *("inst.*.assign", "inst.*.release", "inst.*.drain", "inst.*.thresholds"),
    *("status.ask", "status.instance.*", "status.lost.*", "status.node.*", "status.gateway.*"),
    *("$KV.CLUSTER.>", "_INBOX.>", "_INBOX.gateway.>", "$JS.API.>", "$SYS.>", ">"),
)
MAY_HEAR: dict[Service, set[str]] = {
    "gateway": {"canvas.*", "load.state", "status.ask", "status.instance.*", "_INBOX.gateway.>"},
    "scheduler": {
        *("load.state", "sched.drain", "status.instance.*", "status.lost.*", "status.gateway.*"),
    },
    "worker": {"cancel.*", "inst.*.assign", "inst.*.release", "inst.*.drain", "inst.*.thresholds", "status.ask"},
    "agent": {"status.ask", "status.instance.*"},
    "step-predictor": {"report.*", "status.ask"},
    "threshold-controller": {"report.*", "forecast.*", "status.instance.*", "status.lost.*"},
    "workload-monitor": set(),
    "reconfigurator": {"status.node.*"},
    "cli": {"load.state", "status.instance.*", "status.lost.*", "status.node.*", "status.gateway.*"},
}


class SecureServer(NatsServer):
    """With the configuration that is deployed."""

    def __init__(self, folder: Path, secrets: Secrets) -> None:
        super().__init__(folder)
        self.secrets = secrets

    @property
    def url(self) -> str:
        return f"tls://127.0.0.1:{self.port}"

    @property
    def settings(self) -> NatsSettings:
        return NatsSettings(url=self.url, nkeys=str(self.secrets.nkeys), tls_ca=str(self.secrets.ca))

    def start(self) -> None:
        command = [nats_server_binary(), "-c", str(ROOT / "deploy" / "nats" / "single-secure.conf")]
        command += ["-a", "127.0.0.1", "-p", str(self.port), "-sd", str(self.store / "js")]
        variables = self.secrets.nats_variables()
        with (self.store / "nats.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        wait_until(self._listens, "nats-server listens", limit_s=30)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make_secrets(tmp_path_factory.mktemp("secrets") / "made", ["127.0.0.1"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, secrets: Secrets) -> Iterator[SecureServer]:
    """One for all tests, with its streams."""
    running = SecureServer(tmp_path_factory.mktemp("nats"), secrets)
    running.start()

    async def make_streams() -> None:
        async with connected(running, "scheduler") as bus:
            await bus.ensure_streams()

    asyncio.run(make_streams())
    yield running
    running.kill()


@contextlib.asynccontextmanager
async def connected(server: SecureServer, name: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(server.settings, name)
    try:
        yield bus
    finally:
        await asyncio.wait_for(bus.close(drain=False), 10)


async def all_is_told(bus: Bus) -> None:
    """The server has seen all that was sent, and we what it thinks of it."""
    for _ in range(2):  # nats-py sends the first one's ping ahead of what is buffered
        await bus._client.flush(timeout=30)


@pytest_asyncio.fixture
async def gateway(server: SecureServer) -> AsyncIterator[Bus]:
    async with connected(server, "gateway") as bus:
        yield bus


@pytest_asyncio.fixture
async def scheduler(server: SecureServer) -> AsyncIterator[Bus]:
    async with connected(server, "scheduler") as bus:
        yield bus


@pytest_asyncio.fixture
async def worker(server: SecureServer) -> AsyncIterator[Bus]:
    async with connected(server, "worker i") as bus:
        yield bus


# --- what each may say and hear -----------------------------------------------------------------------------------


def test_the_tables_are_of_all_services_and_subjects() -> None:
    assert MAY_SAY.keys() == MAY_HEAR.keys() == set(get_args(Service))
    of_subject = {channel.pattern.split(".")[0] for channel in subjects.CHANNELS}
    assert of_subject <= {subject.split(".")[0] for subject in SUBJECTS}


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_says_its_own_and_nothing_else(
    server: SecureServer, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server, service) as bus:
        for subject in SUBJECTS:
            await bus._client.publish(subject, b"")
        await all_is_told(bus)
        refused = {subject for subject in SUBJECTS if f'Publish to "{subject}"'.lower() in caplog.text.lower()}
    assert set(SUBJECTS) - refused == MAY_SAY[service]


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_hears_its_own_and_nothing_else(
    server: SecureServer, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server, service) as bus:
        for pattern in PATTERNS:
            await bus._client.subscribe(pattern)
        await all_is_told(bus)
        refused = {pattern for pattern in PATTERNS if f'Subscription to "{pattern}"'.lower() in caplog.text.lower()}
    assert set(PATTERNS) - refused == MAY_HEAR[service]


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_reads_its_streams_and_keeps_its_lease(
    server: SecureServer, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server, service) as bus:
        for channel in subjects.channels_heard_by(service):
            if channel.kind == "stream":
                follower = await bus.follow(stream_of(channel.pattern), channel.pattern, dict, lambda *_: None)
                await follower.caught_up()
                await follower.stop()
        for stream in streams_of(service):
            await bus.last(stream, "nothing.there", dict)
        if service in LEASES:
            await bus.purge(subjects.CLUSTER_STREAM, subjects.cluster_key(LEASES[service]))  # of the test before
            lease = Lease(bus, "me", LEASES[service], ttl_s=30)
            await asyncio.wait_for(lease.acquire(), 30)
            await lease.give_up()
            assert await bus.last(subjects.CLUSTER_STREAM, subjects.cluster_key(LEASES[service]), dict) is None
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_request_is_served_from_end_to_end(gateway: Bus, scheduler: Bus, worker: Bus) -> None:
    request, record = make_request("r1"), make_record("r1")
    followed: list[str] = []
    done: list[m.ProgressRecord] = []

    async def accept(assign: m.GenerateRequest) -> m.Accepted:
        await worker.append(subjects.progress("g", assign.request_id), record)
        return m.Accepted()

    await worker.respond(subjects.assign("i"), m.GenerateRequest, accept)
    await worker.flush()
    await gateway.follow(subjects.PROGRESS, subjects.progress_of_gateway("g"), m.ProgressRecord, _into(done))
    await scheduler.follow(
        subjects.REQUESTS, "req.*", m.GenerateRequest, lambda r, _: followed.append(r.request_id), on_malformed=_ignore
    )
    await gateway.append(subjects.request("r1"), request, after_seq=0)
    await until(lambda: "r1" in followed)
    await scheduler.request(subjects.assign("i"), request, m.Accepted, limit_s=30)
    await until(lambda: done == [record])
    await scheduler.purge(subjects.REQUESTS, subjects.request("r1"))
    assert await scheduler.last(subjects.REQUESTS, subjects.request("r1"), m.GenerateRequest) is None


def _into(found: list[m.ProgressRecord]):  # type: ignore[no-untyped-def]
    return lambda record, _: found.append(record)


def _ignore(subject: str, seq: int) -> None:
    """The tests before this one have left some."""


async def test_who_hears_a_request_answers_it_and_says_nothing_else_to_an_inbox(
    scheduler: Bus, worker: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    async def accept(_: m.DrainNotice) -> m.Accepted:
        return m.Accepted()

    await scheduler.respond(subjects.DRAIN, m.DrainNotice, accept)
    await scheduler.flush()
    notice = m.DrainNotice(instance_id="i")
    assert await worker.request(subjects.DRAIN, notice, m.Accepted, limit_s=30) == m.Accepted()
    await scheduler.publish("_INBOX.worker.other", m.Accepted())
    await all_is_told(scheduler)
    assert 'publish to "_inbox.worker.other"' in caplog.text.lower()


async def test_what_a_service_may_not_store_is_not_stored(gateway: Bus, worker: Bus, scheduler: Bus) -> None:
    await scheduler.purge(subjects.CLUSTER_STREAM, subjects.PLAN)  # what the tests before this one have left
    with pytest.raises(BusTimeout):
        await worker.append(subjects.PLAN, {"mine": True}, limit_s=0.3)
    assert await scheduler.last(subjects.CLUSTER_STREAM, subjects.PLAN, dict) is None
    heard: list[object] = []
    await scheduler.subscribe("status.instance.*", dict, heard.append)
    await scheduler.subscribe("load.state", dict, heard.append)
    await scheduler.flush()
    await gateway.publish(subjects.instance_status("i"), {"forged": True})
    await gateway.flush()
    await worker.publish(subjects.instance_status("i"), {"forged": False})
    await until(lambda: heard)
    assert heard == [{"forged": False}]


# --- who may connect ----------------------------------------------------------------------------------------------


async def refusal(settings: NatsSettings, name: str = "gateway") -> str:
    """Why the connection is refused, which must be said at once: trying on would not help."""
    with pytest.raises(ConfigError) as refused:
        await asyncio.wait_for(Bus.connect(settings, name), 20)
    return str(refused.value)


async def test_without_a_key_nobody_gets_in(server: SecureServer) -> None:
    assert "refuses us as gateway: its key or password is missing or wrong" in await refusal(
        NatsSettings(url=server.url, tls_ca=str(server.secrets.ca))
    )


async def test_a_password_is_no_key(server: SecureServer) -> None:
    settings = NatsSettings(url=server.url, tls_ca=str(server.secrets.ca), user="gateway", password="secret")
    assert "refuses us as gateway" in (said := await refusal(settings))
    assert "secret" not in said


async def test_a_service_whose_key_is_not_there_says_which_file(server: SecureServer, tmp_path: Path) -> None:
    settings = NatsSettings(url=server.url, tls_ca=str(server.secrets.ca), nkeys=str(tmp_path))
    assert str(tmp_path / "gateway.nk") in await refusal(settings)
    (tmp_path / "gateway.nk").write_text("password\n")
    assert "holds no user's nkey seed" in await refusal(settings)


async def test_a_server_that_others_have_signed_is_not_trusted(server: SecureServer, tmp_path: Path) -> None:
    other = make_secrets(tmp_path / "other", ["127.0.0.1"])
    settings = NatsSettings(url=server.url, nkeys=str(server.secrets.nkeys), tls_ca=str(other.ca))
    assert "certificate is not trusted" in await refusal(settings)


async def test_a_server_of_another_name_is_not_trusted(tmp_path: Path, secrets: Secrets) -> None:
    elsewhere = SecureServer(tmp_path, make_secrets(tmp_path / "elsewhere", ["nats.example.org"]))
    elsewhere.start()
    try:
        assert "made out to the name in [nats] url" in await refusal(elsewhere.settings)
    finally:
        elsewhere.kill()


async def test_without_tls_nobody_gets_in(server: SecureServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        assert b'"tls_required":true' in await asyncio.wait_for(reader.readline(), 20)
        writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
        assert b"PONG" not in await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()
    settings = NatsSettings(url=f"nats://127.0.0.1:{server.port}", nkeys=str(server.secrets.nkeys))
    assert "tls_ca must name" in await refusal(settings)


async def test_where_tls_is_wanted_nothing_is_told_to_a_server_without(
    nats_server: NatsServer, secrets: Secrets
) -> None:
    url = f"tls://127.0.0.1:{nats_server.port}"
    assert "does not begin with TLS" in await refusal(NatsSettings(url=url, tls_ca=str(secrets.ca)))


async def test_a_service_that_is_refused_ends_with_exit_code_2(server: SecureServer, tmp_path: Path) -> None:
    shutil.copytree(server.secrets.nkeys, tmp_path / "nkeys")
    seed = nkeys.encode_seed(b"\x07" * 32, nkeys.PREFIX_BYTE_USER)
    (tmp_path / "nkeys" / "scheduler.nk").write_bytes(seed)
    process = ServiceProcess("services.scheduler", tmp_path / "log", server.url)
    process.set(TEDISERVE_NATS_NKEYS=str(tmp_path / "nkeys"), TEDISERVE_NATS_TLS_CA=str(server.secrets.ca))
    process.start()
    assert await process.exit_code(60) == 2
    assert "refuses us as scheduler: its key or password is missing or wrong" in process.log
    assert seed.decode() not in process.log


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # nats-py leaves refused sockets to the collector
async def test_a_key_that_is_taken_away_is_told_of_and_works_again_when_it_is_back(
    tmp_path: Path, secrets: Secrets, caplog: pytest.LogCaptureFixture
) -> None:
    """As an operator does it: the file without the user, and nats-server is told to read it anew."""
    config, port = tmp_path / "nats.conf", free_port()
    with_gateway = f"authorization {{ users: [ {{nkey: {secrets.public_keys['NATS_NKEY_GATEWAY']}}} ] }}"
    config.write_text(with_gateway)
    command = [nats_server_binary(), "-c", str(config), "-a", "127.0.0.1", "-p", str(port)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        settings = NatsSettings(url=f"nats://127.0.0.1:{port}", nkeys=str(secrets.nkeys))
        bus = await Bus.connect(settings, "gateway")
        config.write_text(f"authorization {{ users: [ {{nkey: {secrets.public_keys['NATS_NKEY_CLI']}}} ] }}")
        process.send_signal(signal.SIGHUP)
        await until(lambda: "refuses us as gateway" in caplog.text)
        assert not bus.connected
        config.write_text(with_gateway)
        process.send_signal(signal.SIGHUP)
        await until(lambda: bus.connected)
        await bus.close(drain=False)
    finally:
        process.kill()
        await process.wait()
        gc.collect()


async def test_a_connection_that_nats_has_ended_for_good_is_told_of(bus: Bus) -> None:
    watching = asyncio.create_task(bus.watch())
    await bus._client._process_err("'Unknown Protocol Operation'")
    with pytest.raises(BusTimeout, match="Unknown Protocol Operation"):
        await asyncio.wait_for(watching, 30)


async def test_servers_of_a_cluster_join_whom_their_authority_has_signed_and_nobody_else(
    tmp_path: Path, secrets: Secrets
) -> None:
    """Two with certificates of one authority, and a third one with all the keys but a certificate of another."""
    stranger = make_secrets(tmp_path / "stranger", ["127.0.0.1"])
    names = {"a": secrets, "b": secrets, "c": stranger}
    routes, monitors = ({name: free_port() for name in names} for _ in range(2))
    processes = []
    try:
        for name, own in names.items():
            command = [nats_server_binary(), "-c", str(ROOT / "deploy" / "nats" / "cluster-secure.conf")]
            command += ["--name", name, "-a", "127.0.0.1", "-p", str(free_port()), "-m", str(monitors[name])]
            command += ["--cluster", f"nats://127.0.0.1:{routes[name]}", "-sd", str(tmp_path / name)]
            command += ["--routes", ",".join(f"nats://127.0.0.1:{routes[other]}" for other in names if other != name)]
            with (tmp_path / f"{name}.log").open("wb") as log:
                variables = own.nats_variables()
                processes.append(await asyncio.create_subprocess_exec(*command, env=variables, stdout=log, stderr=log))

        def others(name: str) -> set[str]:
            with contextlib.suppress(httpx.HTTPError):
                found = httpx.get(f"http://127.0.0.1:{monitors[name]}/routez", timeout=5).json()
                return {route["remote_name"] for route in found["routes"]}
            return set()

        await until(lambda: others("a") == {"b"} and others("b") == {"a"}, "the two have joined", limit_s=60)
        await until(lambda: "certificate" in (tmp_path / "c.log").read_text(), "the third was refused", limit_s=60)
        assert (others("a"), others("b"), others("c")) == ({"b"}, {"a"}, set())
    finally:
        for process in processes:
            process.kill()
            await process.wait()


def test_secret_files_are_their_owners_alone_and_stay_as_they_are(tmp_path: Path) -> None:
    made = make_secrets(tmp_path / "made", ["localhost"])
    private = [made.private_key("gateway"), made.api_key, made.key_file, *map(made.nkey, SERVICES)]
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    groups = made.private_key("nats")
    assert (groups.stat().st_mode & 0o777, groups.parent.stat().st_mode & 0o777) == (0o640, 0o700), "and no way to it"
    before = {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    made.nkey("worker").unlink()
    again = make_secrets(tmp_path / "made", ["localhost"])
    assert {name for name, key in again.public_keys.items() if made.public_keys[name] != key} == {"NATS_NKEY_WORKER"}
    changed = {path for path in before if path.read_bytes() != before[path]}
    assert changed == {made.nkey("worker"), made.nats_env}
    assert ssl.create_default_context(cafile=made.ca).cert_store_stats()["x509_ca"] > 0
