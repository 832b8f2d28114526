"""What the gateway knows of the cluster, for the page. Pure; times are wall-clock seconds of the gateway.

1. An instance is shown while its last status is at most `SILENT_S` old; the load state and the plan likewise, but that
   the plan, which changes rarely, stays.
2. Attainment counts this gateway's own requests that had a deadline, in bins of `BIN_S` by the time of their end: met
   when their answer was whole by it. Cancelled ones count for neither side.
"""

from collections import deque
from typing import Any

import msgspec

from contracts import messages as m
from services.gateway.policy import kept_deadline

SILENT_S = 5.0
BIN_S = 10.0
NUM_BINS = 60
MAX_INSTANCES = 4096  # more are somebody's mistake; the page shows those that it heard of first


class _Bin(msgspec.Struct):
    """The requests with a deadline that ended in one span of time."""

    number: int  # of the span, since the epoch
    with_slo: int = 0
    met: int = 0


class ClusterView:
    """Take in what is heard, then `describe` it."""

    def __init__(self) -> None:
        self._statuses: dict[str, tuple[m.InstanceStatus, float]] = {}  # by instance, with the time of receipt
        self._load: tuple[m.LoadState, float] | None = None
        self._plan: m.ClusterPlan | None = None
        self._bins: deque[_Bin] = deque(maxlen=NUM_BINS)

    def note(self, heard: m.InstanceStatus | m.LoadState | m.ClusterPlan, now: float) -> None:
        """Take in a message."""
        match heard:
            case m.InstanceStatus():
                self._note_status(heard, now)
            case m.LoadState():
                self._load = heard, now
            case m.ClusterPlan():
                self._plan = heard

    def _note_status(self, status: m.InstanceStatus, now: float) -> None:
        if status.instance_id not in self._statuses:
            self._statuses = {key: value for key, value in self._statuses.items() if now - value[1] <= SILENT_S}
            if len(self._statuses) >= MAX_INSTANCES:
                return
        self._statuses[status.instance_id] = status, now

    def note_end(self, record: m.ProgressRecord) -> None:
        """Count one of our requests that has ended."""
        kept = kept_deadline(record)
        if kept is None:
            return
        number = int(record.written_at // BIN_S)
        if not self._bins or self._bins[-1].number < number:
            self._bins.append(_Bin(number))
        place = next((bin for bin in reversed(self._bins) if bin.number == number), None)
        if place is not None:  # else it ended before everything that is kept, or the clock was set back
            place.with_slo += 1
            place.met += kept

    def describe(self, now: float) -> dict[str, Any]:
        """Instances by id, load (None: nobody tells), plan (None: there is none), attainment from old to new."""
        statuses = [status for status, heard in self._statuses.values() if now - heard <= SILENT_S]
        load = self._load[0] if self._load is not None and now - self._load[1] <= SILENT_S else None
        return {
            "instances": [_instance(status) for status in sorted(statuses, key=lambda status: status.instance_id)],
            "load": None if load is None else msgspec.to_builtins(load),
            "plan": None if self._plan is None else _plan(self._plan),
            "attainment": self._attainment(now),
        }

    def _attainment(self, now: float) -> list[dict[str, int]]:
        last = int(now // BIN_S)
        known = {bin.number: bin for bin in self._bins}
        numbers = range(last - NUM_BINS + 1, last + 1)
        return [
            {"with_slo": known[number].with_slo, "met": known[number].met}
            if number in known
            else {"with_slo": 0, "met": 0}
            for number in numbers
        ]


def _instance(status: m.InstanceStatus) -> dict[str, Any]:
    return {
        "instance_id": status.instance_id,
        "node_id": status.node_id,
        "tp_degree": status.tp_degree,
        "requests": len(status.held),
        "max_requests": status.max_requests,
        "held_tokens": sum(held.canvas_tokens for held in status.held),
        "kv_tokens": status.kv_tokens,
        "latency_ratio": status.latency_ratio,
        "draining": status.draining,
    }


def _plan(plan: m.ClusterPlan) -> dict[str, Any]:
    return {
        "revision": plan.revision,
        "reason": plan.reason,
        "nodes": msgspec.to_builtins(plan.nodes),
        "in_rollout": plan.rollout is not None,
    }
