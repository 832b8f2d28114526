"""Instances that come and go: losses, drains, layouts that follow the load."""

from pathlib import Path
from typing import Any

import pytest

from services.costs import LatencyProfile, PassCost
from services.reconfigurator.config import ReconfiguratorConfig
from services.settings import ConfigError
from services.workload_monitor.config import WorkloadMonitorConfig
from tests.unit.simulate.build import live, make_cluster, make_setting
from tools.simulate.__main__ import main
from tools.simulate.cluster import Cluster, Setting
from tools.simulate.fleet import Fleet, FleetSetting, layout_text

LATENCY = LatencyProfile(
    {
        1: PassCost(curve=((0.0, 4.0), (1000.0, 44.0))),
        2: PassCost(curve=((0.0, 2.5), (1000.0, 26.0))),
        4: PassCost(curve=((0.0, 1.5), (1000.0, 15.0))),
    }
)


def fleet_of(tp_degrees: tuple[int, ...], **changes: Any) -> Setting:
    setting = make_setting(delay_s=0.001, jitter_s=0.001, slo_s=2.0, **changes)
    return setting._replace(latency=LATENCY, tp_degrees=tp_degrees)


def run(setting: Setting, at: list[float]) -> Cluster:
    cluster = make_cluster(setting, live(setting), at, [n % 3 for n in range(len(at))])
    cluster.run(Cluster.check_invariants)
    return cluster


def all_finished(cluster: Cluster) -> bool:
    """Each once, with all of its blocks."""
    ids = sorted(outcome.request_id for outcome in cluster.outcomes)
    return ids == sorted(f"r{n}" for n in range(cluster.num_arrived)) and all(
        (outcome.state, outcome.blocks) == ("finished", 4) for outcome in cluster.outcomes
    )


def test_instances_of_several_degrees_stand_side_by_side() -> None:
    cluster = run(fleet_of((1, 4)), [0.0, 5.0])
    slow, fast = cluster.instances.values()
    assert (slow.settings.tp_degree, fast.settings.tp_degree) == (1, 4)
    assert (slow.passes, fast.passes > 0) == (0, True)  # alone each goes where its steps are shortest


def test_what_was_lost_goes_on_elsewhere_and_its_instance_comes_back() -> None:
    setting = fleet_of((1, 1, 1), fleet=FleetSetting(nodes=1, devices=4, launch_s=2.0, losses=(1.3, 3.0)))
    cluster = run(setting, [0.05 * n for n in range(80)])
    assert all_finished(cluster)
    assert cluster.fleet is not None
    layouts = [(change.at, change.layout) for change in cluster.fleet.changes]
    assert layouts[:5] == [
        (0.0, {1: 3}),
        (1.3, {1: 2}),
        (3.0, {1: 1}),
        (3.3, {1: 2}),
        (5.0, {1: 3}),
    ]
    steps = sum(one.recompute_steps + one.cache_steps for one in cluster.all_instances)
    assert steps > sum(outcome.steps for outcome in cluster.outcomes)  # some were run in vain
    assert any(outcome.recompute_steps == 4 for outcome in cluster.outcomes)


def test_the_layout_follows_the_load_and_nothing_is_lost_on_the_way() -> None:
    quiet, busy = [2.0 * n for n in range(17)], [34.0 + n / 30 for n in range(600)]
    follows = FleetSetting(
        nodes=1,
        devices=4,
        launch_s=1.0,
        plan_s=0.1,
        reconfigurator=ReconfiguratorConfig(period_s=6.0, min_covered_s=5.0, stay_periods=1),
        monitor=WorkloadMonitorConfig(window_s=6.0, half_life_s=3.0, buckets=6, snapshot_every_s=1.0),
    )
    setting = fleet_of((1, 1, 1, 1), fleet=follows)
    first, again = run(setting, quiet + busy), run(setting, quiet + busy)
    assert all_finished(first)
    assert first.fleet is not None
    layouts = [change.layout for change in first.fleet.changes]
    assert layouts[0] == {1: 4}
    assert {4: 1} in layouts  # alone a request is fastest there
    assert first.fleet.changes[-1].layout != {4: 1}  # which does not carry the load
    assert {decision.reason for decision in first.fleet.decisions} >= {"latency_gain"}
    steps = sum(one.recompute_steps + one.cache_steps for one in first.all_instances)
    assert steps == sum(outcome.steps for outcome in first.outcomes)  # drained, not killed
    assert repr(first.outcomes) == repr(again.outcomes)
    assert again.fleet is not None
    assert first.fleet.changes == again.fleet.changes
    assert first.fleet.decisions == again.fleet.decisions


def test_the_largest_are_placed_first_and_what_does_not_fit_is_refused() -> None:
    setting = fleet_of((1, 1, 2, 4), fleet=FleetSetting(nodes=2, devices=4))
    cluster = make_cluster(setting, live(setting), [0.0])
    assert isinstance(cluster.fleet, Fleet)
    cluster.run()
    assert [sorted(node.running) for node in cluster.fleet.nodes] == [["n0-0"], ["n1-0", "n1-1", "n1-2"]]
    with pytest.raises(ConfigError, match=r"do not fit on 1 nodes of 4 devices"):
        make_cluster(fleet_of((4, 1), fleet=FleetSetting(nodes=1)), live(setting), [0.0])
    assert layout_text({1: 8, 4: 2}) == "8 x TP-1, 2 x TP-4"


# --- the command line ---------------------------------------------------------------------------------------------

PUBLISHED = ["--profile", "profiles/llada-8b-h100", "--workload", "gsm8k", "--rate", "1", "--seconds", "4"]


def test_layouts_losses_and_lengths_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,33\n1,9000,10\n2,0,1\n")
    rest = ["--layout", "2*1,1*4", "--losses", "2", "--launch-s", "1", "--lengths", str(lengths)]
    main([*PUBLISHED, "--systems", "tedi", *rest, "--csv", str(tmp_path / "rows.csv")])
    out = capsys.readouterr().out
    assert "0.0  2 x TP-1, 1 x TP-4" in out
    rows = [line.split(",") for line in (tmp_path / "rows.tedi.csv").read_text().splitlines()]
    sizes = {(row[2], row[rows[0].index("blocks")]) for row in rows[1:]}
    assert sizes == {("100", "2"), ("1", "1")}  # the second row fits into no context


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--systems", "infaas", "--reconfigure"], "infaas does not know that instances come and go"),
        (["--systems", "tedi", "--reconfigure", "--instances", "17"], "do not fit on 4 nodes of 4 devices"),
        (["--systems", "tedi", "--layout", "2*3"], "holds TP degree 1,2,4, not 3"),
        (["--systems", "tedi", "--reconfigure", "--reconfigurator", "period=1"], "period"),
        (["--lengths", "pyproject.toml"], "a column of ContextTokens and one of GeneratedTokens were expected"),
        (["--layout", "many"], "'many' is not of the form 8*1,2*4"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*PUBLISHED, *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
