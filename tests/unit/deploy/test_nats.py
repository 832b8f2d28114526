"""Keys and certificates for NATS: what tools.secrets makes is what compose and Kubernetes hand to each, and no more."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.conftest import nats_server_binary
from tests.processes import ROOT
from tests.unit.deploy.files import DEPLOY, OVERLAYS, SERVICES, Service, compose
from tests.unit.deploy.test_compose import settings_of, source_of
from tests.unit.deploy.test_kubernetes import API_VERSION, container_of, find, workload_of, workloads
from tests.unit.deploy.test_kubernetes import settings_of as kubernetes_settings_of
from tools.secrets.__main__ import main
from tools.secrets.kubernetes import manifests
from tools.secrets.store import Secrets, make_secrets

EACH = pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
EVERY = pytest.mark.parametrize("overlay", [f"overlays/{name}" for name in OVERLAYS])
SECURE = ("single-users", "cluster-users", "single-secure", "cluster-secure")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make_secrets(tmp_path_factory.mktemp("secrets") / "made", ["nats", "*.nats"])


@pytest.fixture(scope="module")
def stack(made: Secrets) -> dict[str, Any]:
    return compose("secure.yml", SECRETS=str(made.folder), OWNER="1234", GROUP="5678")


def keys_of(service: Service) -> set[str]:
    """The files of the keys that a container needs: its own, and those of what it starts."""
    return {f"{name}.nk" for name in ({"agent", "worker"} if service.name == "agent" else {service.name})}


def checked(config: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """By nats-server, which does not start."""
    command = [nats_server_binary(), "-t", "-c", str(config)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("name", SECURE)
def test_nats_server_takes_the_configuration_and_wants_every_key(name: str, made: Secrets) -> None:
    config = DEPLOY / "nats" / f"{name}.conf"
    accepted = checked(config, made.nats_variables())
    assert accepted.returncode == 0, accepted.stderr
    for variable in made.public_keys:
        refused = checked(config, {k: v for k, v in made.nats_variables().items() if k != variable})
        assert refused.returncode != 0
        assert variable in refused.stderr


def test_what_is_printed_for_kubernetes_says_what_lies_in_the_folder(
    made: Secrets, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(made.folder), "--kubernetes"]) == 0
    printed = {found["metadata"]["name"]: found for found in yaml.safe_load_all(capsys.readouterr().out)}
    assert printed["nats-scheduler"]["stringData"].keys() == {"scheduler.nk", "ca.pem"}
    assert printed["nats-scheduler"]["stringData"]["scheduler.nk"] == made.nkey("scheduler").read_text()
    assert printed["nats-server"]["stringData"] == made.public_keys
    for found in printed.values():
        kubernetes_validate.validate(found, API_VERSION, strict=True)


# --- compose --------------------------------------------------------------------------------------------------------


def mounted_secrets(container: dict[str, Any], stack: dict[str, Any]) -> dict[str, Path]:
    """The files here that a container sees in /run/secrets, by name."""
    return {secret["source"]: Path(stack["secrets"][secret["source"]]["file"]) for secret in container["secrets"]}


@EACH
def test_a_container_gets_its_own_keys_as_the_user_who_may_read_them(
    service: Service, stack: dict[str, Any], made: Secrets
) -> None:
    container = stack["services"][service.name]
    assert container["user"] == "1234"
    mounted = mounted_secrets(container, stack)
    settings = settings_of(service, stack)
    assert settings["nats"].nkeys == "/run/secrets"
    assert settings["nats"].tls_ca == "/run/secrets/ca.pem"
    assert mounted["ca.pem"] == made.ca
    assert {name for name in mounted if name.endswith(".nk")} == keys_of(service)
    assert all(path == made.nkey(name.removesuffix(".nk")) for name, path in mounted.items() if name.endswith(".nk"))
    if service.name == "gateway":
        assert mounted[Path(settings["gateway"].key_file).name] == made.key_file


def test_the_composed_nats_server_asks_for_keys_and_knows_them_and_speaks_tls(
    stack: dict[str, Any], made: Secrets
) -> None:
    container = stack["services"]["nats"]
    config = source_of(container["command"][2], container, stack)
    assert config.name == "single-secure.conf"
    mounted = mounted_secrets(container, stack)
    assert mounted == {"nats.pem": made.certificate("nats"), "nats.key": made.private_key("nats")}
    here = {f"/run/secrets/{name}": str(path) for name, path in mounted.items()}
    variables = {name: here.get(value, value) for name, value in container["environment"].items()}
    assert variables.items() >= {"NATS_TLS_CERTIFICATE": str(made.certificate("nats"))}.items()
    assert checked(config, variables).returncode == 0


def test_the_composed_nats_server_may_read_its_certificate_without_capabilities(
    stack: dict[str, Any], made: Secrets
) -> None:
    container = stack["services"]["nats"]
    assert "user" not in container, "root, to whom the fresh volume belongs"
    assert container["group_add"] == ["5678"]
    for path in mounted_secrets(container, stack).values():
        assert path.stat().st_mode & 0o777 == 0o640


def test_without_the_secrets_the_composed_nats_server_does_not_start() -> None:
    container = compose("secure.yml", SECRETS="./nowhere")["services"]["nats"]
    assert checked(ROOT / "deploy" / "nats" / "single-secure.conf", container.get("environment") or {}).returncode != 0


# --- Kubernetes -----------------------------------------------------------------------------------------------------


def secrets_of(pod: dict[str, Any], printed: dict[str, Any]) -> dict[str, set[str]]:
    """The files that a pod's secrets put into its container, by folder."""
    template = pod["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(pod)["volumeMounts"]}
    found = {}
    for volume in template["volumes"]:
        if secret := volume.get("secret"):
            assert template["securityContext"]["fsGroup"] == template["securityContext"]["runAsUser"]
            assert secret["defaultMode"] == 0o440
            found[mounts[volume["name"]]] = set(printed[secret["secretName"]]["stringData"])
    return found


@pytest.fixture(scope="module")
def printed(made: Secrets) -> dict[str, Any]:
    return {found["metadata"]["name"]: found for found in manifests(made)}


@EVERY
@EACH
def test_a_pod_gets_its_own_keys(service: Service, overlay: str, printed: dict[str, Any], tmp_path: Path) -> None:
    settings = kubernetes_settings_of(service, overlay, tmp_path)
    files = secrets_of(workload_of(service, overlay), printed)
    assert files[settings["nats"].nkeys] == keys_of(service) | {"ca.pem"}
    assert settings["nats"].tls_ca == f"{settings['nats'].nkeys}/ca.pem"
    if service.name == "gateway":
        folder, _, name = settings["gateway"].key_file.rpartition("/")
        assert name in files[folder]


@EVERY
def test_the_nats_pods_ask_for_keys_and_speak_tls(overlay: str, printed: dict[str, Any], made: Secrets) -> None:
    [nats] = find(overlay, "StatefulSet", "nats")
    container, files = container_of(nats), secrets_of(nats, printed)
    assert re.fullmatch(r"/etc/nats/(single|cluster)-secure\.conf", container["args"][1])
    [reference] = container["envFrom"]
    assert printed[reference["secretRef"]["name"]]["stringData"] == made.public_keys
    variables = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    for name in ("NATS_TLS_CA", "NATS_TLS_CERTIFICATE", "NATS_TLS_KEY"):
        folder, _, file = variables[name].rpartition("/")
        assert file in files[folder]


def test_each_secret_is_somebodys(printed: dict[str, Any]) -> None:
    text = json.dumps([workloads(f"overlays/{name}") for name in OVERLAYS])
    assert [name for name in printed if f'"{name}"' not in text] == []
