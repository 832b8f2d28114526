"""docker-compose.yml and its overrides: compose takes them, and what they say is what the services accept."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from contracts import subjects
from services.settings import PREFIX
from tests.processes import ROOT
from tests.unit.deploy.files import COMPOSE_OVERRIDES, DEPLOY, SERVICES, Service, compose

# all together but one: a cluster of nats-servers that ask for keys is not composed
STACKS = [(), *((name,) for name in COMPOSE_OVERRIDES), tuple(n for n in COMPOSE_OVERRIDES if n != "secure.yml")]
EVERY = pytest.mark.parametrize("overrides", STACKS, ids=" ".join)
EACH = pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)


def source_of(path: str, container: dict[str, Any], stack: dict[str, Any]) -> Path:
    """The file or folder here that a container sees at `path`."""
    for mount in container.get("volumes", []):
        if mount["type"] == "bind" and path.startswith(mount["target"]):
            return Path(mount["source"] + path.removeprefix(mount["target"]))
    for config in container.get("configs", []):
        if config["target"] == path:
            return Path(stack["configs"][config["source"]]["file"])
    raise AssertionError(f"nothing is mounted at {path}")


def environment_of(service: Service, stack: dict[str, Any]) -> dict[str, str]:
    """Of the service's container, with its configuration file where it lies here."""
    container = stack["services"][service.name]
    variables: dict[str, str] = container["environment"]
    file = source_of(variables["TEDISERVE_CONFIG"], container, stack)
    return variables | {"TEDISERVE_CONFIG": str(file)}


def settings_of(service: Service, stack: dict[str, Any]) -> dict[str, Any]:
    return service.configs(environment_of(service, stack))


def metrics_port(service: Service, settings: dict[str, Any]) -> int:
    own = settings[next(iter(service.tables))]
    return int(own.port if service.name == "gateway" else own.metrics_port)


def seconds(duration: str) -> float:
    """As compose writes them: 1m5s."""
    factors = {"m": 60, "s": 1}
    return sum(float(number) * factors[unit] for number, unit in re.findall(r"([\d.]+)([ms])", duration))


# --- the services -------------------------------------------------------------------------------------------------


def test_every_service_is_deployed() -> None:
    written = {
        name
        for name in get_args(subjects.Service)
        if name != "worker" and (ROOT / "services" / name.replace("-", "_") / "service.py").exists()
    }
    assert {service.name for service in SERVICES} == written | {"agent"}, "files.py knows of them all"
    assert {service.name for service in SERVICES} <= compose()["services"].keys()


@EACH
def test_a_container_runs_its_service(service: Service) -> None:
    assert compose()["services"][service.name]["command"] == ["python", "-m", *service.command]


@EVERY
@EACH
def test_the_settings_of_a_container_are_accepted_and_read(service: Service, overrides: tuple[str, ...]) -> None:
    stack = compose(*overrides)
    environment = environment_of(service, stack)
    tables = service.configs(environment).keys()  # refuses what no table has
    for variable in environment:
        read = variable == "TEDISERVE_CONFIG" or variable.startswith(
            tuple(f"{PREFIX}{table.upper()}_" for table in tables)
        )
        assert read or not variable.startswith(PREFIX), f"{variable} is of a table that {service.name} does not read"


@EVERY
@EACH
def test_the_profile_is_the_one_that_is_mounted(service: Service, overrides: tuple[str, ...]) -> None:
    stack = compose(*overrides)
    profile = settings_of(service, stack)[next(iter(service.tables))].profile
    assert (source_of(profile, stack["services"][service.name], stack) / "profile.toml").exists()


@EVERY
@EACH
def test_nats_is_where_the_services_look_for_it(service: Service, overrides: tuple[str, ...]) -> None:
    stack = compose(*overrides)
    nats = settings_of(service, stack)["nats"]
    servers = [re.fullmatch(r"nats://([a-z0-9-]+):4222", url) for url in nats.url.split(",")]
    names = {server[1] for server in servers if server}
    assert len(names) == len(servers) == nats.replicas
    for name in names:
        assert set(stack["services"][name]["networks"]) & set(stack["services"][service.name]["networks"])


def test_traces_go_to_the_collector() -> None:
    stack = compose()
    for service in SERVICES:
        assert settings_of(service, stack)["telemetry"].endpoint == "http://otel-collector:4318"
    assert {"bus", "default"} == stack["services"]["otel-collector"]["networks"].keys()


@EACH
def test_health_is_asked_for_where_the_service_answers(service: Service) -> None:
    stack = compose()
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", stack["services"][service.name]["healthcheck"]["test"][-1])
    assert url is not None
    assert int(url[1]) == metrics_port(service, settings_of(service, stack))
    assert url[2] in ("/health", "/metrics")


def test_the_gateway_listens_for_other_containers_and_is_published_here_only() -> None:
    stack = compose(PORT="8123")
    gateway = settings_of(SERVICES[0], stack)["gateway"]
    [port] = stack["services"]["gateway"]["ports"]
    assert gateway.host == "0.0.0.0"
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "8123", gateway.port)


def test_the_variables_are_what_the_comment_says(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('[gateway]\nidempotency_secret = "mine"\n[scheduler]\nadmission = "reject"\n')
    stack = compose(CONFIG=str(config), PROFILE="./profiles", WORKERS="3", GRAFANA_PASSWORD="secret")
    by_name = {service.name: settings_of(service, stack) for service in SERVICES}
    assert by_name["gateway"]["gateway"].idempotency_secret == "mine"
    assert by_name["scheduler"]["scheduler"].admission == "reject"
    assert by_name["agent"]["agent"].workers == 3
    assert source_of("/profile", stack["services"]["agent"], stack) == ROOT / "profiles"
    assert stack["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == "secret"


def test_gpus_are_the_agents_and_each_instance_has_its_own() -> None:
    stack = compose("gpu.yml", GPUS="4")
    agent = stack["services"]["agent"]
    [device] = agent["deploy"]["resources"]["reservations"]["devices"]
    settings = settings_of(SERVICES[-1], stack)["agent"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 4, ["gpu"])
    assert (settings.planned, settings.devices) == (True, "cuda")
    assert agent["build"]["target"] == "denoiser-cuda"


# --- stopping -----------------------------------------------------------------------------------------------------


def test_a_container_has_the_time_that_its_service_takes_to_drain() -> None:
    stack = compose()
    grace = {name: seconds(container.get("stop_grace_period", "10s")) for name, container in stack["services"].items()}
    gateway, agent = settings_of(SERVICES[0], stack)["gateway"], settings_of(SERVICES[-1], stack)
    assert grace["gateway"] > gateway.drain_limit_s
    assert grace["agent"] > agent["agent"].stop_limit_s > agent["worker"].drain_limit_s


def test_who_takes_requests_in_stops_first_and_who_stores_them_last() -> None:
    after = {name: set(container.get("depends_on", {})) for name, container in compose()["services"].items()}
    assert after["gateway"] >= {"agent", "scheduler", "nats"}
    assert after["agent"] >= {"scheduler", "nats"}
    assert all("nats" in after[service.name] for service in SERVICES)


# --- hardening ----------------------------------------------------------------------------------------------------


@EVERY
def test_every_container_is_hardened(overrides: tuple[str, ...]) -> None:
    for name, container in compose(*overrides)["services"].items():
        assert container["read_only"], name
        assert container["cap_drop"] == ["ALL"], name
        assert container["security_opt"] == ["no-new-privileges:true"], name
        assert not container.keys() & {"privileged", "cap_add", "pid", "ipc", "network_mode", "devices"}, name
        assert len({path.split(":")[0] for path in container["tmpfs"]}) == len(container["tmpfs"]), name
        assert all(mount.get("read_only") for mount in container.get("volumes", []) if mount["type"] == "bind"), name


@EVERY
def test_every_image_is_pinned_by_version(overrides: tuple[str, ...]) -> None:
    for name, container in compose(*overrides)["services"].items():
        assert re.search(r":v?\d+\.\d+\.\d+", container["image"]), name


@EVERY
def test_nothing_is_published_beyond_this_machine_and_nats_not_at_all(overrides: tuple[str, ...]) -> None:
    stack = compose(*overrides)
    assert stack["networks"]["bus"]["internal"]
    for name, container in stack["services"].items():
        assert all(port["host_ip"] == "127.0.0.1" for port in container.get("ports", [])), name
        if name.startswith("nats"):
            assert container["networks"].keys() == {"bus"}
            assert "ports" not in container


@EVERY
def test_what_is_mounted_exists(overrides: tuple[str, ...]) -> None:
    stack = compose(*overrides)
    for container in stack["services"].values():
        for mount in container.get("volumes", []):
            exists = Path(mount["source"]).exists() if mount["type"] == "bind" else mount["source"] in stack["volumes"]
            assert exists, mount
        for word in container.get("command") or []:
            for path in re.findall(r"/etc/[\w./-]+", word):
                assert source_of(path, container, stack).exists(), path


def test_the_overrides_are_told_of() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for name in COMPOSE_OVERRIDES:
        assert f"-f deploy/compose/{name}" in text
        assert f"-f deploy/compose/{name}" in (DEPLOY / "compose" / name).read_text()
