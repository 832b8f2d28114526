"""Tables for a terminal. What comes from the cluster is text, never markup."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from contracts import messages as m
from tools.cli.view import InstanceRow, PlanView, RequestRow, SlotRow, Status

_COLOURS = {
    "serving": "green",
    "running": "green",
    "finished": "green",
    "draining": "yellow",
    "starting": "yellow",
    "stopping": "yellow",
    "waiting": "yellow",
    "backing_off": "red",
    "failed": "red",
}


def status_view(status: Status, *, connected: bool = True) -> RenderableType:
    lines = [_facts(status), _load(status.load)]
    if not connected:
        lines.insert(0, Text("NATS does not answer; this is what was heard last", style="bold red"))
    return Group(*lines, _instances(status.instances))


def _facts(status: Status) -> Text:
    return Text.assemble(
        ("requests ", "bold"),
        f"{status.open_requests} open, {status.waiting_requests} waiting   ",
        ("scheduler ", "bold"),
        _holder(status.scheduler),
        f", epoch {status.epoch}   ",
        ("reconfigurator ", "bold"),
        _holder(status.reconfigurator, missing_is_well=True),
        "   ",
        ("threshold-controller ", "bold"),
        _holder(status.threshold_controller, missing_is_well=True),
        "   ",
        ("gateways ", "bold"),
        (", ".join(status.gateways) or "none", "" if status.gateways else "red"),
        "   ",
        ("nodes ", "bold"),
        ", ".join(node.node_id for node in status.nodes) or "none",
    )


def _holder(name: str, *, missing_is_well: bool = False) -> tuple[str, str]:
    return (name, "") if name else ("none", "" if missing_is_well else "red")


def _load(load: m.LoadState | None) -> Text:
    if load is None:
        return Text.assemble(("load ", "bold"), ("no threshold-controller speaks", "yellow"))
    caps = ", ".join(f"{cap.threshold:g} for priority {cap.priority}" for cap in load.caps) or "none needed"
    full = load.demand_s > load.capacity_s
    return Text.assemble(
        ("load ", "bold"),
        (f"{load.demand_s:.2f} of {load.capacity_s:.2f} instance-seconds", "red" if full else ""),
        f" in the next {load.horizon_s:g} s, {load.floor_s:.2f} at the lowest thresholds   ",
        ("caps ", "bold"),
        caps,
        f"   hopeless {load.num_hopeless} of {load.num_open}",
    )


def _instances(rows: Iterable[InstanceRow]) -> Table:
    table = _table("instance", "node", "state", ">TP", ">requests", ">K/V tokens", ">K/V use", ">latency", "")
    for row in rows:
        spoke = row.kv_tokens > 0
        table.add_row(
            Text(row.instance_id),
            Text(row.node_id),
            _state(row.state),
            str(row.tp_degree or ""),
            f"{row.requests}/{row.max_requests}" if spoke else "",
            f"{row.tokens}/{row.kv_tokens}" if spoke else "",
            f"{row.kv_use:.0%}" if spoke else "",
            f"x{row.latency_ratio:.2f}" if spoke else "",
            Text(row.detail),
        )
    return table


def requests_view(rows: Iterable[RequestRow]) -> Table:
    table = _table(
        "request", "state", "instance", ">attempt", ">moves", ">blocks", ">priority", ">age s", ">SLO s", ">slack s"
    )
    for row in rows:
        table.add_row(
            Text(row.request_id),
            _state(row.state),
            Text(row.instance_id),
            str(row.attempt),
            str(row.moves),
            f"{row.blocks_done}/{row.num_blocks}",
            str(row.priority),
            f"{row.age_s:.1f}",
            "" if row.slo_s is None else f"{row.slo_s:.1f}",
            "" if row.slack_s is None else Text(f"{row.slack_s:.1f}", style="red" if row.slack_s < 0 else ""),
        )
    return table


def plan_view(view: PlanView) -> RenderableType:
    table = _table("node", "slot", "wanted", ">TP", "devices", "profile", "runs as", "state", "")
    for row in view.slots:
        table.add_row(
            Text(row.node_id),
            Text(row.slot_id),
            "yes" if row.wanted else Text("no", style="yellow"),
            str(row.tp_degree or "profile's"),
            ", ".join(map(str, row.devices)) or "shared",
            Text(row.profile or "agent's"),
            Text(row.instance_id if row.state else ""),
            _running(row),
            Text(row.detail),
        )
    return Group(*_plan_facts(view.plan), table)


def _running(row: SlotRow) -> Text:
    return _state(row.state) if row.state else Text("not there", style="red" if row.wanted else "")


def _plan_facts(plan: m.ClusterPlan | None) -> list[Text]:
    if plan is None:
        return [Text("There is no plan: each agent runs what it is configured to.")]
    lines = [Text.assemble(("plan ", "bold"), f"{plan.revision}: {plan.reason or 'no reason given'}")]
    if plan.rollout is None:
        lines.append(Text.assemble(("rollout ", "bold"), "none: the layout is as it shall be"))
    else:
        step = plan.rollout.launching or "between two launches"
        stopped = ", ".join(stopped.slot_id for stopped in plan.rollout.stopped) or "nothing"
        lines.append(Text.assemble(("rollout ", "bold"), f"{plan.rollout.reason}; launching {step}, stopped {stopped}"))
    if plan.failures:
        lines.append(Text(f"{plan.failures} rollouts in a row were given up", style="red"))
    return lines


def _state(state: str) -> Text:
    return Text(state.replace("_", " "), style=_COLOURS.get(state, ""))


def _table(*heads: str) -> Table:
    """A head that begins with > is of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head.lstrip(">"), justify="right" if head.startswith(">") else "left", overflow="fold")
    return table
