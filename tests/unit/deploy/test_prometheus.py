"""Prometheus and Grafana: expressions read metrics and labels that the services have; alerts are explained."""

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from services.bus import NatsSettings
from tests.processes import ROOT
from tests.unit.deploy.files import DEPLOY, SERVICES, compose
from tests.unit.deploy.test_compose import metrics_port, settings_of

PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "tediserve.json").read_text())
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()

_OF_THE_TARGET = {"job", "instance"}  # labels that Prometheus adds
_OF_PROMETHEUS = {"up": set[str]()}
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def metrics_of_the_services() -> dict[str, set[str]]:
    """The labels of each metric that one of the services offers."""
    for path in sorted((ROOT / "services").rglob("*.py")):
        if re.search(r"prometheus_client import", path.read_text()) and path.name != "runtime.py":
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found: dict[str, set[str]] = {}
    for collector in set(REGISTRY._names_to_collectors.values()):  # of which there is no public list
        if isinstance(collector, (Counter, Gauge, Histogram)):
            for suffix in _SUFFIXES[collector._type]:
                found[collector._name + suffix] = {*collector._labelnames, *(["le"] if suffix == "_bucket" else [])}
    return found


KNOWN = metrics_of_the_services() | _OF_PROMETHEUS


def panels() -> Iterator[tuple[str, str]]:
    """Title of a panel and an expression in it, with an interval in the place of Grafana's variable."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m")


EXPRESSIONS = [*((rule["alert"], rule["expr"]) for rule in RULES), *panels()]


def nodes(expression: str) -> list[Any]:
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), pre_visit=found.append)
    return found


def selectors(expression: str) -> list[Any]:
    return [node for node in nodes(expression) if isinstance(node, promql_parser.VectorSelector)]


def faults(expression: str) -> list[str]:
    """Metrics and labels of it that no service has."""
    read = selectors(expression)
    unknown = [selector.name for selector in read if selector.name not in KNOWN]
    labels = {label for selector in read for label in KNOWN.get(selector.name, ())} | _OF_THE_TARGET
    for selector in read:
        own = KNOWN.get(selector.name, set()) | _OF_THE_TARGET
        unknown += [f"{selector.name}: {m.name}" for m in selector.matchers.matchers if m.name not in own]
    for node in nodes(expression):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            unknown += [f"by {label}" for label in node.modifier.labels if label not in labels]
    return unknown


@pytest.mark.parametrize(("name", "expression"), EXPRESSIONS)
def test_an_expression_reads_what_there_is(name: str, expression: str) -> None:
    assert selectors(expression)
    assert faults(expression) == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("rate(tediserve_http_requests[5m])", "tediserve_http_requests"),  # a counter ends in _total
        ('sum(tediserve_worker_requests_held{reason="x"})', "tediserve_worker_requests_held: reason"),
        ("sum by (tier) (tediserve_worker_requests_held)", "by tier"),
        ("histogram_quantile(0.9, sum by (le) (tediserve_worker_step_seconds))", "by le"),
    ],
)
def test_a_metric_or_label_that_no_service_has_is_found(wrong: str, fault: str) -> None:
    assert fault in faults(wrong)


@pytest.mark.parametrize(("name", "expression"), EXPRESSIONS)
def test_counters_are_read_as_rates_and_gauges_are_not(name: str, expression: str) -> None:
    rated = {
        id(node.args[0].vector_selector): node.args[0].vector_selector.name
        for node in nodes(expression)
        if isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase")
    }
    for selector in selectors(expression):
        counts = selector.name.endswith(("_total", "_bucket", "_sum", "_count"))
        assert counts == (selector.name in rated.values()), selector.name


def test_the_operators_document_names_metrics_that_there_are() -> None:
    named = set(re.findall(r"`(tediserve_[a-z0-9_]+)`", OPERATIONS))
    assert len(named) > 20
    assert {name for name in named if name not in KNOWN and f"{name}_bucket" not in KNOWN} == set()


# --- alerts -------------------------------------------------------------------------------------------------------


def test_alerts_have_names_of_their_own_a_severity_and_a_summary() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) > 10
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_every_alert_has_a_section_that_says_what_it_means_and_what_to_do() -> None:
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", OPERATIONS, re.MULTILINE | re.DOTALL))
    assert {name for name in sections if name.startswith("Tediserve")} == {rule["alert"] for rule in RULES}
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert "**Means**" in sections[rule["alert"]]
        assert "**Do**" in sections[rule["alert"]]


def test_the_bound_on_open_requests_is_that_of_the_settings() -> None:
    [full] = [rule for rule in RULES if rule["alert"] == "TediserveNearlyFull"]
    bound = NatsSettings().max_open_requests
    assert f"> {bound * 4 // 5} " in full["expr"] + " "
    assert str(bound) in full["annotations"]["summary"]


def test_alerts_fire_when_they_should_and_not_before() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    tests = DEPLOY / "prometheus" / "rules_test.yml"
    done = subprocess.run([promtool, "test", "rules", str(tests)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yml").read_text())["tests"]
    fired = {alert["alertname"] for test in tests for alert in test["alert_rule_test"] if alert.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}


# --- what is scraped ----------------------------------------------------------------------------------------------


def targets() -> dict[str, set[tuple[str, int]]]:
    """By job: names of containers and their ports."""
    return {
        job["job_name"]: {(name, sd["port"]) for sd in job["dns_sd_configs"] for name in sd["names"]}
        for job in PROMETHEUS["scrape_configs"]
    }


def test_every_service_is_scraped_where_it_offers_its_metrics() -> None:
    found, stack = targets(), compose()
    for service in SERVICES:
        assert found[service.name] == {(service.name, metrics_port(service, settings_of(service, stack)))}
        assert set(stack["services"][service.name]["networks"]) & set(stack["services"]["prometheus"]["networks"])
    assert found.keys() == {service.name for service in SERVICES} | {"worker"}


def test_the_workers_of_an_agent_are_scraped_from_the_first_on() -> None:
    first = settings_of(SERVICES[-1], compose())["worker"].metrics_port
    assert targets()["worker"] == {("agent", first + number) for number in range(8)}


def test_who_is_said_to_be_down_is_a_job() -> None:
    [down] = [rule for rule in RULES if rule["alert"] == "TediserveServiceDown"]
    [matcher] = selectors(down["expr"])[0].matchers.matchers
    assert set(matcher.value.split("|")) >= targets().keys() - {"worker"}


# --- Grafana ------------------------------------------------------------------------------------------------------


def test_the_dashboard_is_provisioned_with_its_data_source() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    urls = {source["uid"]: source["url"] for source in sources}
    services = compose()["services"]
    for url in urls.values():
        assert re.fullmatch(r"http://(\w+):\d+", url)
        assert url.split("/")[2].split(":")[0] in services
    used = {target["datasource"]["uid"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])}
    assert used == {"prometheus"} <= urls.keys()
    [provider] = yaml.safe_load((folder / "dashboards" / "tediserve.yml").read_text())["providers"]
    mounts = {mount["target"]: mount["source"] for mount in services["grafana"]["volumes"] if mount["type"] == "bind"}
    assert mounts[provider["options"]["path"]] == str(DEPLOY / "grafana" / "dashboards")


def test_the_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_a_legend_names_labels_that_its_expression_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            kept = {
                label
                for node in nodes(target["expr"].replace("$__rate_interval", "1m"))
                if isinstance(node, promql_parser.AggregateExpr) and node.modifier
                for label in node.modifier.labels
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]
