"""The stack under the benchmark: started once; to change the policy, scheduler and controller start again.

1. Nothing around configures it: TEDISERVE_* and tediserve.toml are left out, a file of its own says what is set.
2. A policy is in use once a scheduler and a controller that have read it run, the controller decides and no request is
   open: each cell begins idle.
3. Workers offer their metrics, so that a cell can tell what passes cost in it (work.py).
4. The gateway takes as many calls as requests may be open, so that a long queue is waited for, not refused.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts import subjects
from contracts.messages import LoadState
from services.bus import Bus, NatsSettings
from services.settings import PREFIX
from tools.bench.slo.work import Work, done_so_far
from tools.bench.stack import ports_in_a_row, running_stack

MAX_OPEN = 4096
_DECIDING = ("scheduler", "threshold-controller")
_SWITCH_LIMIT_S = 180.0  # longer than a request's time limit: what a cell has left behind may run on as long
_LOOK_EVERY_S = 0.05


class Cluster:
    """See `running_cluster`."""

    def __init__(self, folder: Path, url: str, nats_url: str, metrics_ports: Sequence[int]) -> None:
        self.url = url
        self._folder = folder
        self._nats_url = nats_url
        self._metrics_ports = metrics_ports

    def done_so_far(self) -> list[Work]:
        """Of each worker (rule 3)."""
        return done_so_far([f"http://127.0.0.1:{port}/metrics" for port in self._metrics_ports])

    async def use(self, controller: Mapping[str, Any], scheduler: Mapping[str, Any]) -> None:
        """Rule 2, with these settings of the two. Raises TimeoutError."""
        _configure(self._folder, self._metrics_ports, controller, scheduler)
        before = self._pids()
        async with asyncio.timeout(_SWITCH_LIMIT_S):
            for pid in before.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            while any(self._pids().get(name, pid) == pid for name, pid in before.items()):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_EVERY_S)
            await self._until_idle()

    def _pids(self) -> dict[str, int]:
        """Of the two, as far as they run."""
        status = json.loads((self._folder / "up.json").read_text(encoding="utf-8"))
        return {name: status["services"][name] for name in _DECIDING if name in status["services"]}

    async def _until_idle(self) -> None:
        """A controller says its load state once it decides, and then every second."""
        idle = asyncio.Event()
        bus = await Bus.connect(NatsSettings(url=self._nats_url), "bench-slo")
        try:
            await bus.subscribe(
                subjects.LOAD_STATE, LoadState, lambda state: idle.set() if state.num_open == 0 else None
            )
            await idle.wait()
        finally:
            await bus.close()


@contextlib.contextmanager
def running_cluster(profile: str, workers: int) -> Iterator[Cluster]:
    """A stack with a folder that is removed. Raises RuntimeError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="tediserve-bench-") as data, _clean_environment():
        folder = Path(data)
        metrics_ports = ports_in_a_row(workers)
        _configure(folder, metrics_ports, {}, {})
        os.environ[f"{PREFIX}CONFIG"] = str(_config_file(folder))
        with running_stack(profile, workers, folder) as (url, nats_url):
            yield Cluster(folder, url, nats_url, metrics_ports)


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


def _config_file(folder: Path) -> Path:
    return folder / "bench.toml"


def _configure(
    folder: Path, metrics_ports: Sequence[int], controller: Mapping[str, Any], scheduler: Mapping[str, Any]
) -> None:
    tables = {
        "nats": {"max_open_requests": MAX_OPEN},
        "gateway": {"max_open_calls": MAX_OPEN},
        "worker": {"metrics_port": metrics_ports[0]},  # of the first; the others' follow
        "threshold_controller": dict(controller),
        "scheduler": dict(scheduler),
    }
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    _config_file(folder).write_text("\n".join(lines) + "\n", encoding="utf-8")
