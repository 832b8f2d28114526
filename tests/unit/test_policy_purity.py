"""Decisions are pure: what the policies import allows no I/O, no clock, no randomness and no logging."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services"

# By service, the files in which it decides, and what they are made of.
PURE = sorted(
    [
        *SERVICES.glob("*/policy.py"),
        *SERVICES.glob("*/*_policy.py"),
        SERVICES / "denoiser" / "batching.py",
        SERVICES / "denoiser" / "run.py",
        SERVICES / "denoiser" / "worker_events.py",
        SERVICES / "gateway" / "keys.py",
        SERVICES / "gateway" / "stops.py",
        SERVICES / "reconfigurator" / "cluster.py",
        SERVICES / "reconfigurator" / "plan.py",
        SERVICES / "reconfigurator" / "problem.py",
        SERVICES / "reconfigurator" / "rollout.py",
        SERVICES / "scheduler" / "admission.py",
        SERVICES / "scheduler" / "events.py",
        SERVICES / "scheduler" / "instances.py",
        SERVICES / "scheduler" / "waiting.py",
        SERVICES / "step_predictor" / "hindsight.py",
        SERVICES / "threshold_controller" / "events.py",
        SERVICES / "threshold_controller" / "load.py",
        SERVICES / "threshold_controller" / "needs.py",
        SERVICES / "threshold_controller" / "prices.py",
        SERVICES / "threshold_controller" / "steady.py",
    ]
)
STANDARD = {
    "bisect", "collections", "collections.abc", "dataclasses", "datetime", "enum", "functools", "hashlib", "heapq",
    "hmac", "itertools", "math", "operator", "statistics", "tomllib", "typing",
}  # fmt: skip
SHARED = {
    "contracts", "contracts.messages", "contracts.subjects", "services.costs", "services.opening", "services.profile",
}  # fmt: skip
LIBRARIES = {"msgspec", "msgspec.structs", "numpy", "numpy.typing"}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_each_service_has_a_policy() -> None:
    assert {path.parent.name for path in PURE} == {
        "denoiser",
        "gateway",
        "reconfigurator",
        "scheduler",
        "step_predictor",
        "threshold_controller",
        "workload_monitor",
    }
    assert len(PURE) >= 10


@pytest.mark.parametrize("path", PURE, ids=module_of)
def test_a_policy_imports_only_what_is_pure(path: Path) -> None:
    pure = {module_of(other) for other in PURE}
    config = f"{module_of(path.parent / 'config.py')}"
    # the gateway's policy turns tokens into text: its codec and the call's facts are values that it is given
    given = {"services.gateway.text", "services.gateway.openai_api"} if path.parent.name == "gateway" else set()
    assert imports_of(path) <= STANDARD | SHARED | LIBRARIES | pure | {config} | given


def test_imports_point_one_way() -> None:
    services = {path.name for path in SERVICES.iterdir() if (path / "__init__.py").exists()}
    for path in SERVICES.rglob("*.py"):
        own = path.relative_to(SERVICES).parts[0]
        for name in imports_of(path):
            first, _, rest = name.partition(".")
            assert first not in ("tools", "tests"), f"{path} imports {name}"
            if first == "services" and (other := rest.split(".")[0]) in services:
                assert other == own, f"{path} imports {name}, of another service"
    for path in (ROOT / "contracts").rglob("*.py"):
        assert not any(name.startswith(("services", "tools", "nats")) for name in imports_of(path)), path


def test_only_the_bus_knows_nats() -> None:
    knowing = {path.relative_to(ROOT).as_posix() for path in SERVICES.rglob("*.py") if "nats" in imports_of(path)}
    assert knowing == {"services/bus.py"}
