"""Wrong settings of worker and agent are refused at start, with key and value."""

import ast
from pathlib import Path

import pytest

from services.denoiser.config import AgentConfig, WorkerConfig, default_node_id, fresh_instance_id
from services.settings import ConfigError, load_section

DENOISER = Path(__file__).parents[3] / "services" / "denoiser"
PURE = {
    "__future__",
    "collections",
    "contracts",
    "msgspec",
    "services.costs",
    "services.denoiser.run",
    "services.denoiser.worker_events",
    "services.opening",
    "statistics",
    "typing",
}


@pytest.mark.parametrize(
    ("config", "section", "key", "value"),
    [
        (WorkerConfig, "worker", "INSTANCE_ID", "a.b"),
        (WorkerConfig, "worker", "NODE_ID", "a b"),
        (WorkerConfig, "worker", "NODE_ID", "x" * 61),
        (WorkerConfig, "worker", "DRAIN_LIMIT_S", "0"),
        (WorkerConfig, "worker", "METRICS_PORT", "70000"),
        (WorkerConfig, "worker", "RANK_LIMIT_S", "0"),
        (AgentConfig, "agent", "WORKERS", "-1"),
        (AgentConfig, "agent", "STOP_LIMIT_S", "-3"),
        (AgentConfig, "agent", "BACKOFF_LIMIT_S", "nan"),
        (WorkerConfig, "worker", "TP_DEGREE", "-1"),
        (AgentConfig, "agent", "DEVICES", "tpu"),
        (AgentConfig, "agent", "DEVICES", "cuda:"),
        (AgentConfig, "agent", "DEVICES", "cpu:0,1,0"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(config: type, section: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_section(config, section, {f"TEDISERVE_{section.upper()}_{key}": value})
    assert key.lower() in str(raised.value)


def test_the_defaults_are_right() -> None:
    assert load_section(AgentConfig, "agent", {}).workers == 2
    assert load_section(WorkerConfig, "worker", {}).instance_id == ""


def test_instance_ids_are_fresh_and_can_be_part_of_a_subject() -> None:
    ids = {fresh_instance_id(f"{default_node_id()}-3") for _ in range(20)}
    assert len(ids) == 20
    for instance_id in ids:
        WorkerConfig(instance_id=instance_id)


@pytest.mark.parametrize("name", ["worker_policy", "worker_events", "run", "agent_policy"])
def test_what_decides_is_pure(name: str) -> None:
    tree = ast.parse((DENOISER / f"{name}.py").read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert {module for module in imported if module not in PURE and module.split(".")[0] not in PURE} == set()
