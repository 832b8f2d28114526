"""deploy/k8s: what kustomize makes of it is valid, hangs together, and says what the services accept."""

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from services.settings import SECTIONS
from tests.unit.deploy.files import DEPLOY, OVERLAYS, SERVICES, Service, documents, kustomized

K8S = DEPLOY / "k8s"
API_VERSION = "1.33"
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}  # of the operator: not the API server's own

EVERY = pytest.mark.parametrize("overlay", [f"overlays/{name}" for name in OVERLAYS])
EACH = pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An overlay with HTTPS at the gateway."""
    folder = tmp_path_factory.mktemp("https")
    there = {name: os.path.relpath(K8S / name, folder) for name in ("overlays/cpu", "https")}
    kustomization = {"resources": [there["overlays/cpu"]], "components": [there["https"]]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return str(folder)


def find(overlay: str, kind: str, name: str | None = None) -> list[dict[str, Any]]:
    return [
        found for found in kustomized(overlay) if found["kind"] == kind and name in (None, found["metadata"]["name"])
    ]


def workloads(overlay: str) -> list[dict[str, Any]]:
    return [found for kind in ("Deployment", "StatefulSet", "DaemonSet") for found in find(overlay, kind)]


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    [container] = workload["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def workload_of(service: Service, overlay: str) -> dict[str, Any]:
    [found] = [found for found in workloads(overlay) if found["metadata"]["name"] == service.name]
    return found


def settings_of(service: Service, overlay: str, tmp_path: Path) -> dict[str, Any]:
    """As its process reads them: the ConfigMap that is mounted, and the container's variables."""
    container = container_of(workload_of(service, overlay))
    variables = {variable["name"]: variable.get("value", "from-elsewhere") for variable in container["env"]}
    [volume] = [
        v for v in workload_of(service, overlay)["spec"]["template"]["spec"]["volumes"] if v["name"] == "config"
    ]
    [config] = find(overlay, "ConfigMap", volume["configMap"]["name"])
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "config"]
    assert variables["TEDISERVE_CONFIG"] == f"{mount['mountPath']}/tediserve.toml"
    path = tmp_path / "tediserve.toml"
    path.write_text(config["data"]["tediserve.toml"])
    return service.configs(variables | {"TEDISERVE_CONFIG": str(path)})


# --- valid --------------------------------------------------------------------------------------------------------


def test_the_api_server_would_take_it() -> None:
    objects = [
        found for folder in (*(f"overlays/{name}" for name in OVERLAYS), "monitoring") for found in kustomized(folder)
    ]
    distinct = {json.dumps(found, sort_keys=True): found for found in objects if found["kind"] not in CUSTOM}
    for found in distinct.values():
        kubernetes_validate.validate(found, API_VERSION, strict=True)


def test_what_it_would_not_take_is_found() -> None:
    [deployment] = find("base", "Deployment", "scheduler")
    wrong = deployment | {"spec": deployment["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, API_VERSION, strict=True)


def test_every_file_belongs_to_a_kustomization() -> None:
    for folder in {path.parent for path in K8S.rglob("*.yaml")}:
        text = (folder / "kustomization.yaml").read_text()
        for path in folder.glob("*.yaml"):
            assert path.name == "kustomization.yaml" or path.name in text, path


# --- the services -------------------------------------------------------------------------------------------------


@EVERY
@EACH
def test_a_container_runs_its_service_with_settings_that_it_accepts(
    service: Service, overlay: str, tmp_path: Path
) -> None:
    container = container_of(workload_of(service, overlay))
    settings = settings_of(service, overlay, tmp_path)
    assert " ".join(container["args"]).endswith(" ".join(["python -m", *service.command]))
    assert "command" not in container, "it would take the place of tini"
    own = settings[next(iter(service.tables))]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    if service.name == "gateway":
        assert (own.host, own.port) == ("0.0.0.0", ports["http"])
        assert own.idempotency_secret == "from-elsewhere"
    else:
        assert own.metrics_port == ports["metrics"]


@pytest.mark.parametrize("overlay", ["base", *(f"overlays/{name}" for name in OVERLAYS)])
def test_no_table_of_the_configuration_is_left_unread(overlay: str) -> None:
    read = {table for service in SERVICES for table in service.tables} | {"nats", "log", "telemetry"}
    for found in find(overlay, "ConfigMap"):
        if "tediserve.toml" in found["data"]:
            assert tomllib.loads(found["data"]["tediserve.toml"]).keys() <= read & set(SECTIONS)


@EVERY
def test_the_workers_metrics_are_where_the_pod_says(overlay: str, tmp_path: Path) -> None:
    agent = SERVICES[-1]
    ports = {p["name"]: p["containerPort"] for p in container_of(workload_of(agent, overlay))["ports"]}
    first = settings_of(agent, overlay, tmp_path)["worker"].metrics_port
    workers = [port for name, port in ports.items() if name.startswith("worker-")]
    assert workers == list(range(first, first + 8))


@EVERY
def test_the_gateways_drain_and_the_agents_have_the_time_for_it(overlay: str, tmp_path: Path) -> None:
    grace = {
        found["metadata"]["name"]: found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for found in workloads(overlay)
    }
    gateway = settings_of(SERVICES[0], overlay, tmp_path)["gateway"]
    agent = settings_of(SERVICES[-1], overlay, tmp_path)["agent"]
    [sleep, pause_s] = container_of(workload_of(SERVICES[0], overlay))["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert grace["gateway"] > gateway.drain_limit_s + int(pause_s)
    assert grace["agent"] > agent.stop_limit_s


@EVERY
@EACH
def test_the_profile_is_the_images_own_or_the_mounted_one(service: Service, overlay: str, tmp_path: Path) -> None:
    settings = settings_of(service, overlay, tmp_path)
    assert settings[next(iter(service.tables))].profile == "/profile"
    mounted = {mount["mountPath"] for mount in container_of(workload_of(service, overlay))["volumeMounts"]}
    assert ("/profile" in mounted) == (overlay == "overlays/gpu")
    assert "COPY profiles/tiny-cpu /profile\n" in (DEPLOY / "images" / "Dockerfile").read_text()


def test_a_second_scheduler_stands_by_and_of_what_keeps_no_request_there_is_one() -> None:
    replicas = {found["metadata"]["name"]: found["spec"]["replicas"] for found in find("overlays/gpu", "Deployment")}
    two = {"gateway", "scheduler"}
    assert replicas == {name: 2 if name in two else 1 for name in replicas}
    for found in find("overlays/gpu", "Deployment"):
        kind = "RollingUpdate" if found["metadata"]["name"] in two else "Recreate"
        assert found["spec"]["strategy"]["type"] == kind, "who is alone goes before the next one comes"


def test_agents_run_on_gpu_nodes_with_their_gpus_or_on_all_nodes_without() -> None:
    gpu, cpu = (workload_of(SERVICES[-1], f"overlays/{name}")["spec"]["template"]["spec"] for name in ("gpu", "cpu"))
    assert gpu["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert gpu["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert not cpu.keys() & {"nodeSelector", "tolerations"}
    assert "nvidia.com/gpu" not in cpu["containers"][0]["resources"]["limits"]
    assert cpu["containers"][0]["image"].startswith("tediserve/denoiser-cpu:")


# --- NATS ---------------------------------------------------------------------------------------------------------


@EVERY
def test_the_services_ask_every_server_that_there_is(overlay: str, tmp_path: Path) -> None:
    [nats] = find(overlay, "StatefulSet", "nats")
    settings = settings_of(SERVICES[0], overlay, tmp_path)["nats"]
    names = [f"nats://nats-{number}.nats:4222" for number in range(nats["spec"]["replicas"])]
    assert settings.replicas == nats["spec"]["replicas"]
    assert settings.url.split(",") == (names if len(names) > 1 else ["nats://nats:4222"])


@EVERY
def test_nats_reads_a_configuration_that_is_mounted(overlay: str) -> None:
    [nats] = find(overlay, "StatefulSet", "nats")
    args = container_of(nats)["args"]
    [config] = [found for found in find(overlay, "ConfigMap") if found["metadata"]["name"].startswith("nats-")]
    assert nats["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    assert args[1].removeprefix("/etc/nats/") in config["data"]
    for name, text in config["data"].items():
        assert text == (DEPLOY / "nats" / name).read_text()


# --- what hangs together --------------------------------------------------------------------------------------------


def _selected(labels: dict[str, str], overlay: str) -> list[dict[str, Any]]:
    return [
        found
        for found in workloads(overlay)
        if labels.items() <= found["spec"]["template"]["metadata"]["labels"].items()
    ]


@EVERY
def test_services_and_budgets_select_pods_and_ports_that_exist(overlay: str) -> None:
    for service in find(overlay, "Service"):
        [workload] = _selected(service["spec"]["selector"], overlay)
        ports = {port["name"]: port["containerPort"] for port in container_of(workload)["ports"]}
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            assert target in ports or target in ports.values(), service["metadata"]["name"]
    for budget in find(overlay, "PodDisruptionBudget"):
        assert len(_selected(budget["spec"]["selector"]["matchLabels"], overlay)) == 1
    budgets = {budget["metadata"]["name"] for budget in find(overlay, "PodDisruptionBudget")}
    assert budgets == {"nats", "gateway", "scheduler"}, "those of which there are several"


@EVERY
def test_probes_ask_ports_that_exist(overlay: str) -> None:
    for workload in workloads(overlay):
        container = container_of(workload)
        ports = {port["name"] for port in container["ports"]}
        assert {"startupProbe", "livenessProbe"} <= container.keys()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert probe not in container or container[probe]["httpGet"]["port"] in ports


@EVERY
def test_without_a_certificate_the_gateway_speaks_http_and_is_asked_so(overlay: str, tmp_path: Path) -> None:
    assert settings_of(SERVICES[0], overlay, tmp_path)["gateway"].tls_certificate == ""
    assert schemes_of(workload_of(SERVICES[0], overlay)) == {"HTTP"}


def schemes_of(workload: dict[str, Any]) -> set[str]:
    probes = [container_of(workload)[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    return {probe["httpGet"].get("scheme", "HTTP") for probe in probes}


def test_with_a_certificate_the_gateway_speaks_https_and_is_asked_so(https: str, tmp_path: Path) -> None:
    for found in kustomized(https):
        kubernetes_validate.validate(found, API_VERSION, strict=True)
    gateway = workload_of(SERVICES[0], https)
    settings = settings_of(SERVICES[0], https, tmp_path)["gateway"]
    assert schemes_of(gateway) == {"HTTPS"}
    pod = gateway["spec"]["template"]["spec"]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "certificate"]
    assert volume["secret"] == {"secretName": "gateway-tls", "defaultMode": 0o440}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    [mount] = [mount for mount in container_of(gateway)["volumeMounts"] if mount["name"] == "certificate"]
    files = [f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key")]  # of a Secret of the type tls
    assert [settings.tls_certificate, settings.tls_key] == files
    [service] = find(https, "Service", "gateway")
    assert service["spec"]["ports"] == [{"name": "https", "port": 443, "targetPort": "http"}]
    [monitor] = find("monitoring", "ServiceMonitor")
    schemes = {endpoint["port"]: endpoint.get("scheme", "http") for endpoint in monitor["spec"]["endpoints"]}
    assert schemes == {"metrics": "http", "http": "http", "https": "https"}
    others = [found for found in kustomized(https) if found["metadata"]["name"] != "gateway"]
    assert others == [found for found in kustomized("overlays/cpu") if found["metadata"]["name"] != "gateway"]


def _allowed(overlay: str, workload: str, direction: str) -> Iterator[tuple[Any, int, int]]:
    """Peers (None: everybody) and first and last ports that policies open for the pods of a workload."""
    [pods] = [found for found in workloads(overlay) if found["metadata"]["name"] == workload]
    labels = pods["spec"]["template"]["metadata"]["labels"].items()
    word, peers = ("ingress", "from") if direction == "in" else ("egress", "to")
    for policy in find(overlay, "NetworkPolicy"):
        if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= labels:
            for rule in policy["spec"].get(word, []):
                for port in rule["ports"]:
                    yield rule.get(peers), port["port"], port.get("endPort", port["port"])


def opens(overlay: str, workload: str, direction: str, port: int, peer: dict[str, str] | None) -> bool:
    """`peer`: labels of a pod, or None for everybody."""
    for peers, first, last in _allowed(overlay, workload, direction):
        pods = [p["podSelector"]["matchLabels"].items() for p in peers or [] if "podSelector" in p]
        heard = peers is None if peer is None else peers is None or any(wanted <= peer.items() for wanted in pods)
        if first <= port <= last and heard:
            return True
    return False


@EVERY
def test_the_network_lets_through_what_is_needed_and_no_more(overlay: str) -> None:
    [deny] = find(overlay, "NetworkPolicy", "default-deny")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    nats = {"app.kubernetes.io/name": "nats", "app.kubernetes.io/part-of": "tediserve"}
    for service in SERVICES:
        labels = {"app.kubernetes.io/name": service.name, "app.kubernetes.io/part-of": "tediserve"}
        assert opens(overlay, service.name, "out", 4222, nats)
        assert opens(overlay, "nats", "in", 4222, labels)
        assert opens(overlay, "nats", "in", 6222, labels) == (service.name == "nats")
    assert opens(overlay, "nats", "out", 6222, nats)
    assert opens(overlay, "nats", "in", 6222, nats)
    assert opens(overlay, "gateway", "in", 8000, None)
    assert not opens(overlay, "nats", "in", 4222, None)
    assert not opens(overlay, "agent", "in", 9100, None)


@EVERY
def test_metrics_may_be_read_from_the_namespace_of_prometheus(overlay: str) -> None:
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    for workload in workloads(overlay):
        for port in container_of(workload)["ports"]:
            if port["name"] == "metrics" or port["name"].startswith("worker-"):
                allowed = [
                    (a, z) for p, a, z in _allowed(overlay, workload["metadata"]["name"], "in") if p == monitoring
                ]
                assert any(a <= port["containerPort"] <= z for a, z in allowed), port


@pytest.mark.parametrize("overlay", ["base", *(f"overlays/{name}" for name in OVERLAYS)])
def test_every_pod_is_hardened(overlay: str) -> None:
    [namespace] = find(overlay, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in workloads(overlay):
        pod, container = workload["spec"]["template"]["spec"], container_of(workload)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert all("hostPath" not in volume for volume in pod["volumes"])
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert ":" in container["image"]
        assert not container["image"].endswith(":latest")


# --- monitoring -----------------------------------------------------------------------------------------------------


def test_the_operators_rules_are_those_of_prometheus() -> None:
    [rule] = documents((K8S / "monitoring" / "rules.yaml").read_text())
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())


def test_what_is_monitored_has_those_labels_and_ports() -> None:
    [monitor] = find("monitoring", "ServiceMonitor")
    ports = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
    for service in find("overlays/gpu", "Service"):
        labels = service["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert monitor["spec"]["jobLabel"] in labels
        if service["metadata"]["name"] != "nats":
            assert ports & {port["name"] for port in service["spec"]["ports"]}
    [pods] = find("monitoring", "PodMonitor")
    [agent] = _selected(pods["spec"]["selector"]["matchLabels"], "overlays/gpu")
    endpoints = {endpoint["port"]: endpoint["relabelings"][0] for endpoint in pods["spec"]["podMetricsEndpoints"]}
    assert endpoints.keys() == {port["name"] for port in container_of(agent)["ports"]}
    for name, relabeling in endpoints.items():
        assert relabeling == {"targetLabel": "job", "replacement": "agent" if name == "metrics" else "worker"}


def test_the_dashboard_goes_along() -> None:
    [config] = find("monitoring", "ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["data"]["tediserve.json"] == (DEPLOY / "grafana" / "dashboards" / "tediserve.json").read_text()
