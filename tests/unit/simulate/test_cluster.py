"""Whole clusters with the live policies."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulate.build import CANVAS, STEPS, live, make_cluster, make_profile, make_setting
from tools.simulate.baselines import Fixed, LeastLoaded
from tools.simulate.cluster import Cluster, Policies, Setting
from tools.simulate.results import by_arrival, summarise, write_csv

ALONE_S = 4 * 0.003 + 36 * 0.00132  # prompt 0 at 0.9


def test_a_request_alone_takes_its_passes_and_nothing_else() -> None:
    setting = make_setting()
    (outcome,) = make_cluster(setting, live(setting), [0.0]).run()
    assert outcome.latency_s == pytest.approx(ALONE_S, abs=1e-6)
    assert (outcome.state, outcome.met, outcome.steps, outcome.recompute_steps) == ("finished", True, 40, 4)
    assert (outcome.mean_threshold, outcome.correctness) == (pytest.approx(0.9), pytest.approx(0.8))


def test_messages_that_take_time_delay_it_by_their_ways() -> None:
    # to the stream, to the scheduler, to the worker; to the stream, to the gateway
    setting = make_setting(delay_s=0.001, gateway_s=0.1)
    (outcome,) = make_cluster(setting, live(setting, controlled=False), [0.0]).run()
    assert outcome.latency_s == pytest.approx(ALONE_S + 0.1 + 5 * 0.001, abs=1e-6)
    assert outcome.queue_s == pytest.approx(0.103, abs=1e-6)


def test_what_fits_nowhere_waits() -> None:
    setting = make_setting()
    outcomes = by_arrival(make_cluster(setting, live(setting, controlled=False), [0.0] * 5).run())
    assert [outcome.queue_s > 0 for outcome in outcomes] == [False] * 4 + [True]  # four canvases fit
    assert outcomes[4].queue_s >= min(outcome.latency_s for outcome in outcomes[:4])


def test_under_load_thresholds_fall_and_more_requests_are_in_time() -> None:
    at = [0.021 * n for n in range(60)]
    setting = make_setting(slo_s=0.4)
    found = {
        name: summarise(make_cluster(setting, policies, at, [n % 3 for n in range(60)]).run())
        for name, policies in {
            "fixed": live(setting, controlled=False, fill_share=0.0),
            "both": live(setting, fill_share=0.0),
            "deadline": live(setting, load_control=False, fill_share=0.0),
        }.items()
    }
    assert found["both"].attainment > found["fixed"].attainment + 0.3
    assert found["deadline"].attainment > found["fixed"].attainment + 0.1
    assert found["both"].threshold_mean < 0.85
    assert found["both"].steps_mean < found["fixed"].steps_mean
    assert found["fixed"].threshold_mean == pytest.approx(0.9)
    assert found["both"].accuracy < found["fixed"].accuracy


def test_who_waits_too_long_is_given_up() -> None:
    setting = make_setting(profile=make_profile(cache="none"), kv_tokens=CANVAS)
    limits = setting.profile.limits
    assert limits.time_limit_s == 30.0
    outcomes = make_cluster(setting, live(setting, controlled=False), [0.0] * 300).run()
    states = Counter((outcome.state, outcome.reason) for outcome in outcomes)
    # 40 recompute steps of 3 ms take 0.12 s, so about 250 of them end in 30 s
    assert states["finished", ""] == pytest.approx(255, abs=15)
    assert states["failed", "expired"] == 300 - states["finished", ""]


def run_twice(seed: int, **changes: Any) -> list[bytes]:
    found = []
    for _ in range(2):
        setting = make_setting(2, seed=seed, delay_s=0.0005, jitter_s=0.001, pass_noise=0.05, **changes)
        cluster = make_cluster(setting, live(setting), [0.01 * n for n in range(25)], [n % 3 for n in range(25)])
        found.append(repr(cluster.run()).encode())
    return found


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    first, again = run_twice(1)
    assert first == again
    assert run_twice(2)[0] != first


def test_the_file_has_a_line_for_each_request_by_arrival(tmp_path: Path) -> None:
    setting = make_setting()
    outcomes = make_cluster(setting, live(setting), [0.0, 0.001, 0.2], [2, 0, 1]).run()
    assert [outcome.prompt for outcome in outcomes] == [0, 2, 1]  # in order of their ends
    write_csv(tmp_path / "out.csv", outcomes)
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0].startswith("request_id,prompt,prompt_tokens,arrived_at,state,reason,latency_s")
    assert [line.split(",")[1] for line in lines[1:]] == ["2", "0", "1"]


class Checked:
    """A policy that is checked after each event."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def handle(self, event: Any, now: float) -> Any:
        commands = self._policy.handle(event, now)
        self._policy.check_invariants()
        return commands


def checked(policies: Policies) -> Policies:
    thresholds = policies.thresholds and Checked(policies.thresholds)
    return policies._replace(scheduler=Checked(policies.scheduler), thresholds=thresholds)


def who_decides(name: str, setting: Setting) -> Policies:
    if name == "live":
        return live(setting)
    return Policies(LeastLoaded(Fixed(0.9), binds=name == "infaas", migrate=name == "llumnix"))


@pytest.mark.parametrize("name", ["live", "infaas", "llumnix"])
@settings(max_examples=8)
@given(
    at=st.lists(st.floats(0.0, 0.6), min_size=1, max_size=40),
    instances=st.integers(1, 3),
    jitter_s=st.sampled_from([0.0, 0.004]),
    seed=st.integers(0, 9),
)
def test_whatever_comes_each_request_ends_once_and_no_instance_holds_too_much(
    name: str, at: list[float], instances: int, jitter_s: float, seed: int
) -> None:
    setting = make_setting(instances, jitter_s=jitter_s, delay_s=0.001, seed=seed)
    cluster = make_cluster(setting, checked(who_decides(name, setting)), at, [n % 3 for n in range(len(at))])
    outcomes = cluster.run(Cluster.check_invariants)
    assert sorted(outcome.request_id for outcome in outcomes) == sorted(f"r{n}" for n in range(len(at)))
    assert {outcome.state for outcome in outcomes} == {"finished"}
    assert all(outcome.recompute_steps == outcome.blocks == 4 for outcome in outcomes)
    if name != "live":
        assert all(outcome.steps == STEPS[outcome.prompt][2] for outcome in outcomes)
    assert sum(outcome.steps for outcome in outcomes) == sum(
        instance.recompute_steps + instance.cache_steps for instance in cluster.instances.values()
    )
