"""The stack under the benchmark: a fresh one for each policy, so that nothing is left of the one before.

1. Nothing around configures it: TEDISERVE_* and tediserve.toml are left out, a file of its own says what is set.
2. Workers offer their metrics, so that a cell can tell what passes cost in it (work.py).
3. The gateway takes as many calls as requests may be open, so that a long queue is waited for, not refused.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.settings import PREFIX
from tools.bench.slo.policies import Policy
from tools.bench.slo.work import Work, done_so_far
from tools.bench.stack import ports_in_a_row, running_stack

MAX_OPEN = 4096


class Cluster(NamedTuple):
    """A running one."""

    url: str
    metrics_ports: Sequence[int]  # of its workers

    def done_so_far(self) -> list[Work]:
        """Of each worker (rule 2)."""
        return done_so_far([f"http://127.0.0.1:{port}/metrics" for port in self.metrics_ports])


@contextlib.contextmanager
def running_cluster(profile: str, workers: int, policy: Policy) -> Iterator[Cluster]:
    """A stack with a folder that is removed. Raises RuntimeError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="tediserve-bench-") as data, _clean_environment():
        metrics_ports = ports_in_a_row(workers)
        config = Path(data) / "bench.toml"
        config.write_text(_toml(metrics_ports, policy), encoding="utf-8")
        os.environ[f"{PREFIX}CONFIG"] = str(config)
        with running_stack(policy.profile_of(profile), workers, Path(data)) as (url, _):
            yield Cluster(url, metrics_ports)


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """Without what configures services; as it was, afterwards."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    for name in kept:
        del os.environ[name]
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            del os.environ[name]
        os.environ.update(kept)


def _toml(metrics_ports: Sequence[int], policy: Policy) -> str:
    tables: dict[str, Mapping[str, Any]] = {
        "nats": {"max_open_requests": MAX_OPEN},
        "gateway": {"max_open_calls": MAX_OPEN},
        "worker": {"metrics_port": metrics_ports[0]},  # of the first; the others' follow
        "threshold_controller": policy.controller,
        "scheduler": policy.scheduler,
    }
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"
