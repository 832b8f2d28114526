"""Names on the bus: subjects, streams, buckets, and who says and hears what.

`CHANNELS` is the one table of it: the README's service table and the test that throws garbage at every subject are
checked against it.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from contracts import messages as m

REQUESTS = "REQUESTS"  # stream of open requests, one message a request
PROGRESS = "PROGRESS"  # stream of the records of requests, one message a request
CLUSTER = "CLUSTER"  # KV bucket: leases, the plan, the last workload snapshot
CLUSTER_STREAM = f"KV_{CLUSTER}"  # that holds the bucket

STATUS_ASK = "status.ask"
LOAD_STATE = "load.state"
DRAIN = "sched.drain"
LEASE_KEY = "scheduler"
RECONFIGURATOR_LEASE_KEY = "reconfigurator"
CONTROLLER_LEASE_KEY = "threshold-controller"
PLAN = f"$KV.{CLUSTER}.plan"
WORKLOAD = f"$KV.{CLUSTER}.workload"

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,80}")


def _token(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise ValueError(f"{value!r} cannot be part of a subject: use 1 to 80 of A-Z a-z 0-9 _ -")
    return value


def cluster_key(key: str) -> str:
    """Where the bucket CLUSTER keeps it."""
    return f"$KV.{CLUSTER}.{_token(key)}"


def request(request_id: str) -> str:
    return f"req.{_token(request_id)}"


def progress(gateway_id: str, request_id: str) -> str:
    return f"prog.{_token(gateway_id)}.{_token(request_id)}"


def progress_of_gateway(gateway_id: str) -> str:
    return f"prog.{_token(gateway_id)}.*"


def progress_of_request(request_id: str) -> str:
    """Whichever gateway took the request."""
    return f"prog.*.{_token(request_id)}"


def assign(instance_id: str) -> str:
    return f"inst.{_token(instance_id)}.assign"


def release(instance_id: str) -> str:
    return f"inst.{_token(instance_id)}.release"


def drain(instance_id: str) -> str:
    return f"inst.{_token(instance_id)}.drain"


def thresholds(instance_id: str) -> str:
    return f"inst.{_token(instance_id)}.thresholds"


def cancel(request_id: str) -> str:
    return f"cancel.{_token(request_id)}"


def report(instance_id: str) -> str:
    return f"report.{_token(instance_id)}"


def canvas(request_id: str) -> str:
    return f"canvas.{_token(request_id)}"


def forecast(instance_id: str) -> str:
    return f"forecast.{_token(instance_id)}"


def instance_status(instance_id: str) -> str:
    return f"status.instance.{_token(instance_id)}"


def instance_lost(instance_id: str) -> str:
    return f"status.lost.{_token(instance_id)}"


def node_status(node_id: str) -> str:
    return f"status.node.{_token(node_id)}"


def gateway_status(gateway_id: str) -> str:
    return f"status.gateway.{_token(gateway_id)}"


Service: TypeAlias = Literal[
    "gateway",
    "scheduler",
    "worker",
    "agent",
    "step-predictor",
    "threshold-controller",
    "workload-monitor",
    "reconfigurator",
    "cli",
]


class Channel(NamedTuple):
    """One subject pattern: what it carries, where it lives, who says it and who hears it."""

    pattern: str
    message: type
    kind: Literal["stream", "publish", "request"]
    said_by: tuple[Service, ...]
    heard_by: tuple[Service, ...]
    replies: tuple[type, ...] = ()  # of a request: one of these


CHANNELS: tuple[Channel, ...] = (
    Channel(
        "req.*",
        m.GenerateRequest,
        "stream",
        ("gateway",),
        ("scheduler", "threshold-controller", "workload-monitor", "cli"),
    ),
    Channel(
        "prog.*.*",
        m.ProgressRecord,
        "stream",
        ("gateway", "scheduler", "worker"),
        ("gateway", "scheduler", "threshold-controller", "cli"),
    ),
    Channel("inst.*.assign", m.Assign, "request", ("scheduler",), ("worker",), (m.Accepted, m.Refused)),
    Channel("inst.*.release", m.Release, "request", ("scheduler",), ("worker",), (m.Accepted, m.Refused)),
    Channel("inst.*.drain", m.Drain, "request", ("agent", "cli"), ("worker",), (m.Accepted,)),
    Channel("inst.*.thresholds", m.Thresholds, "publish", ("threshold-controller",), ("worker",)),
    Channel("cancel.*", m.Cancel, "publish", ("gateway", "scheduler"), ("worker",)),
    Channel(DRAIN, m.DrainNotice, "request", ("worker",), ("scheduler",), (m.Accepted,)),
    Channel("report.*", m.Report, "publish", ("worker",), ("step-predictor", "threshold-controller")),
    Channel("canvas.*", m.CanvasStep, "publish", ("worker",), ("gateway",)),
    Channel("forecast.*", m.Forecast, "publish", ("step-predictor",), ("threshold-controller",)),
    Channel("load.state", m.LoadState, "publish", ("threshold-controller",), ("scheduler", "gateway", "cli")),
    Channel(
        "status.instance.*",
        m.InstanceStatus,
        "publish",
        ("worker",),
        ("scheduler", "gateway", "agent", "threshold-controller", "cli"),
    ),
    Channel("status.lost.*", m.InstanceLost, "publish", ("agent",), ("scheduler", "threshold-controller", "cli")),
    Channel("status.node.*", m.NodeStatus, "publish", ("agent",), ("reconfigurator", "cli")),
    Channel("status.gateway.*", m.GatewayStatus, "publish", ("gateway",), ("scheduler", "cli")),
    Channel(
        "status.ask",
        m.StatusAsk,
        "publish",
        ("scheduler", "gateway", "threshold-controller", "reconfigurator", "cli"),
        ("worker", "agent", "gateway", "step-predictor"),
    ),
    Channel(WORKLOAD, m.WorkloadSnapshot, "stream", ("workload-monitor",), ("reconfigurator",)),
    Channel(PLAN, m.ClusterPlan, "stream", ("reconfigurator",), ("agent", "reconfigurator", "gateway", "cli")),
)


# The lease of each service of which one acts: its key in the bucket CLUSTER.
LEASES: dict[Service, str] = {
    "scheduler": LEASE_KEY,
    "reconfigurator": RECONFIGURATOR_LEASE_KEY,
    "threshold-controller": CONTROLLER_LEASE_KEY,
}

STREAM_MAKER: Service = "scheduler"  # makes the streams and keeps their settings; everybody else waits for them


def channels_heard_by(service: Service) -> Iterable[Channel]:
    return (channel for channel in CHANNELS if service in channel.heard_by)
