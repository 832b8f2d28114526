"""What layouts the planner makes of the two-hour trace at other peak rates: the paper's figure 12.

No cluster runs here: the live workload-monitor counts the arrivals of each five minutes, and planner and judgement of
the reconfigurator (but for the time that a layout stays at least) answer at once. Arrivals, lengths and costs are
those of diurnal.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from contracts import messages as m
from services.costs import DegreeProfile, LatencyProfile, load_latency
from services.profile import Profile, load_profile
from services.reconfigurator.cluster import problem_of
from services.reconfigurator.plan import Layout, Placed
from services.reconfigurator.policy import judge
from services.reconfigurator.problem import Planning
from services.settings import ConfigError
from services.workload_monitor.config import WorkloadMonitorConfig
from services.workload_monitor.policy import RequestSeen, SnapshotDue, WorkloadMonitor
from tools.experiments import diurnal
from tools.simulate.fleet import planned
from tools.simulate.run import supposed
from tools.simulate.workload import Phase, arrivals

_NODES, _DEVICES = 4, 4
_SEED = 0


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner said at the end of five minutes."""

    peak_rps: int
    number: int  # from 0
    arrivals_rps: float
    layout: Layout  # from then on
    reason: str  # why it changed, or stayed
    code: str  # digest of the code that it is of


class _Layout:
    """What runs on the nodes."""

    def __init__(self) -> None:
        self._made = 0
        self.instances: dict[str, Placed] = {}  # by id
        self.set([Placed(node_id=f"n{n}", devices=(d,)) for n in range(_NODES) for d in range(_DEVICES)])

    def set(self, instances: Sequence[Placed]) -> None:
        kept = {one.instance_id: one for one in instances if one.instance_id}
        for one in instances:
            if not one.instance_id:
                self._made += 1
                kept[f"{one.node_id}-{self._made}"] = one
        self.instances = kept

    def plan(self) -> m.ClusterPlan:
        nodes = [
            m.NodePlan(
                node_id=node_id,
                instances=[
                    m.PlannedInstance(slot_id=id_, tp_degree=one.tp_degree, devices=list(one.devices))
                    for id_, one in self.instances.items()
                    if one.node_id == node_id
                ],
            )
            for node_id in _node_ids()
        ]
        return m.ClusterPlan(revision=1, written_at=0.0, nodes=nodes)

    @property
    def counts(self) -> Layout:
        degrees = [one.tp_degree for one in self.instances.values()]
        return {degree: degrees.count(degree) for degree in sorted(set(degrees))}


def _node_ids() -> list[str]:
    return [f"n{number}" for number in range(_NODES)]


def run(peak_rps: int, code: str) -> list[Window]:
    """The windows of a trace that peaks at so many requests a second. `code`: the digest that they get."""
    published = diurnal.read_published()
    profile, width_s = load_profile(diurnal.PROFILE), 60.0 * published.window_minutes
    rates = [rate * peak_rps / 10 for rate in published.arrivals_rps_at_peak_10]
    latency = supposed(load_latency(profile.latency_file), 0.0, diurnal.EXTRA_STEP_MS, diurnal.TP_EFFECT)
    monitor = WorkloadMonitor(WorkloadMonitorConfig(), profile.model, began_at=0.0)
    layout, found = _Layout(), []
    asked = _requests(profile, [Phase(rate, width_s) for rate in rates])
    arrival = next(asked, None)
    for number, rate in enumerate(rates):
        end = (number + 1) * width_s
        while arrival is not None and arrival.created_at < end:
            monitor.handle(RequestSeen(arrival, arrival.created_at), arrival.created_at)
            arrival = next(asked, None)
        (said,) = monitor.handle(SnapshotDue(end), end)
        reason = _plan(profile, latency, layout, said.snapshot)
        found.append(
            Window(
                peak_rps=peak_rps,
                number=number,
                arrivals_rps=round(rate, 4),
                layout=layout.counts,
                reason=reason,
                code=code,
            )
        )
    return found


def _requests(profile: Profile, phases: Sequence[Phase]) -> Iterator[m.GenerateRequest]:
    lengths = diurnal.made_up_lengths()
    prompts = {one.prompt_tokens: [0] * one.prompt_tokens for one in lengths}
    for arrival in arrivals(phases, len(lengths), _SEED):
        one = lengths[arrival.prompt]
        yield m.GenerateRequest(
            request_id=f"r{arrival.seed}",
            gateway_id="gateway",
            model=profile.model,
            prompt_ids=prompts[one.prompt_tokens],
            max_tokens=one.output_tokens,
            block_size=profile.decoding.block_size,
            cache=profile.decoding.cache,
            blocks_ahead=profile.decoding.blocks_ahead,
            created_at=arrival.at,
            expires_at=arrival.at + profile.limits.time_limit_s,
            ignore_eos=True,
            deadline_at=arrival.at + diurnal.SLO_S,
        )


def _plan(profile: Profile, latency: LatencyProfile, layout: _Layout, snapshot: m.WorkloadSnapshot) -> str:
    """Changes the layout where the plan is clearly better; why it did or did not."""
    status = {
        node_id: m.NodeStatus(node_id=node_id, sent_at=0.0, instances=[], devices=list(range(_DEVICES)), planned=True)
        for node_id in _node_ids()
    }
    degrees = [DegreeProfile(tp_degree=degree, cost=latency.cost(degree)) for degree in latency.degrees]
    problem = problem_of(profile, degrees, Planning(), snapshot=snapshot, plan=layout.plan(), nodes=status)
    assert problem is not None, "there are nodes"
    made = planned(problem)
    verdict = judge(problem, made)
    if verdict.change:
        layout.set(made.instances)
    return verdict.reason


# --- the file -----------------------------------------------------------------------------------------------------


def read_windows(path: Path) -> list[Window]:
    """Raises ConfigError for a file that is none of these."""
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Window], strict=False)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds other rows than this experiment's: {error}; remove it") from None


def write_windows(path: Path, windows: Sequence[Window]) -> None:
    """A line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(one) for one in sorted(windows, key=lambda w: (w.peak_rps, w.number))]
    path.write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")


def missing(path: Path, code: str) -> list[int]:
    """Peaks that the file lacks. Windows of other code are taken out of it."""
    found = read_windows(path)
    still = [window for window in found if window.code == code]
    if still != found:
        write_windows(path, still)
    return [peak for peak in diurnal.read_published().peaks if all(window.peak_rps != peak for window in still)]


def add_windows(path: Path, made: Sequence[Window]) -> None:
    write_windows(path, [*read_windows(path), *made])
