"""Settings of workers and agents. Tables `[worker]` and `[agent]`."""

import re
import secrets
import socket

import msgspec

from services.denoiser.devices import check_devices

_NODE_ID_LIMIT = 60  # leaves room for slot and suffix within an instance id of 80 characters


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance. Its agent sets `instance_id`, `node_id` and `metrics_port` through the environment."""

    profile: str = "profiles/tiny-cpu"  # folder
    metrics_port: int = 0  # Prometheus metrics there; 0: nowhere
    instance_id: str = ""  # "": a fresh one; must never be used for two processes
    node_id: str = ""  # "": from the host's name
    status_every_s: float = 1.0
    report_every_ms: float = 50.0  # while requests run; a block's end reports at once
    drain_limit_s: float = 30.0  # from SIGTERM to an exit that leaves requests behind
    rank_limit_s: float = 10.0  # for which the ranks of a tensor-parallel instance wait for one that hangs
    tp_degree: int = 0  # 0: as the profile says

    def __post_init__(self) -> None:
        _check_token("instance_id", self.instance_id, limit=80)
        _check_token("node_id", self.node_id)
        _check_positive(self, "status_every_s", "report_every_ms", "drain_limit_s", "rank_limit_s")
        _check_port(self.metrics_port)
        if not 0 <= self.tp_degree <= 64:
            raise ValueError(f"tp_degree: {self.tp_degree} is not between 0 and 64")


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node: a fixed number of workers, each with the TP degree of the profile; or what the cluster's plan says."""

    profile: str = "profiles/tiny-cpu"  # folder, handed to the workers
    metrics_port: int = 0  # Prometheus metrics there; 0: nowhere
    node_id: str = ""  # "": from the host's name
    workers: int = 2  # where `planned`: until a plan lists this node, and no more than there are devices for
    planned: bool = False  # converges on the cluster's plan, which a reconfigurator makes
    devices: str = "auto"  # that plans may use: GPUs or else cores; "cuda", "cpu", or some of them: "cuda:0,1"
    status_every_s: float = 1.0
    stop_limit_s: float = 35.0  # from SIGTERM to the killing of workers that still drain
    backoff_first_s: float = 0.5  # before the second restart in a row; the first comes at once
    backoff_limit_s: float = 10.0  # it doubles up to here; a wrong configuration waits so long at once
    healthy_after_s: float = 30.0  # a worker that was ready for so long starts anew with a clean record
    run_folder: str = ""  # Linux: it locks a file there, its workers outlive it, and the next agent adopts them
    orphan_limit_s: float = 60.0  # for which they run without an agent; where there is no run_folder they end with it
    lifeline: str = ""  # a file that the agent's supervisor keeps locked: workers end when it does, at once

    def __post_init__(self) -> None:
        _check_token("node_id", self.node_id)
        _check_positive(self, "status_every_s", "stop_limit_s", "backoff_first_s", "backoff_limit_s", "healthy_after_s")
        _check_positive(self, "orphan_limit_s")
        _check_port(self.metrics_port)
        if self.lifeline and not self.run_folder:
            raise ValueError("lifeline: without a run_folder workers end with their agent")
        if not 0 <= self.workers <= 1024:
            raise ValueError(f"workers: {self.workers} is not between 0 and 1024")
        check_devices(self.devices)


def default_node_id() -> str:
    """The host's name as a subject token."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname()).strip("-")[:_NODE_ID_LIMIT] or "node"


def fresh_instance_id(slot_id: str) -> str:
    """An id that no process has had: who was lost under an old one cannot come back under it."""
    return f"{slot_id}-{secrets.token_hex(3)}"


def _check_token(key: str, value: str, limit: int = _NODE_ID_LIMIT) -> None:
    if value and not (len(value) <= limit and re.fullmatch(r"[A-Za-z0-9_-]+", value)):
        raise ValueError(f"{key}: {value!r} is not 1 to {limit} of A-Z a-z 0-9 _ -")


def _check_positive(config: msgspec.Struct, *keys: str) -> None:
    for key in keys:
        if not getattr(config, key) > 0:
            raise ValueError(f"{key}: {getattr(config, key)} is not positive")


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise ValueError(f"metrics_port: {port} is no port")
