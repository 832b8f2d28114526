"""The controller's decisions, event by event. A step alone costs 10.6 ms (recompute) or 4.2 ms (cache): `build.py`."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from services.costs import LatencyProfile, PassCost
from services.threshold_controller import events as e
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.policy import ThresholdController
from tests import builders
from tests.unit.threshold_controller.build import (
    PROFILE,
    caps,
    decisions,
    entry,
    forecast,
    held,
    make_controller,
    make_fresh,
    opened,
    record,
    report,
    seen,
    status,
    told,
)

# by threshold, alone: 2 recompute steps and 2, 4, 6, 8 or 10 cache steps, in seconds
REST_S = [0.0296, 0.038, 0.0464, 0.0548, 0.0632]


@pytest.fixture
def controller() -> Iterator[ThresholdController]:
    controller = make_controller("a")
    yield controller
    controller.check_invariants()


def placed(controller: ThresholdController, deadline: float | None, **fields: object) -> list[e.Command]:
    """Request r1 is held by a, and its forecast is known; what came of the forecast."""
    controller.handle(seen(deadline=deadline, **fields), 0.0)  # type: ignore[arg-type]
    controller.handle(e.Tick(), 0.0)
    controller.handle(status("a", held()), 0.0)
    return controller.handle(forecast(), 0.0)


# --- by deadline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deadline", "expected"),
    [
        (0.0640, (0.9, "slack")),
        (0.0630, (0.8, "deadline")),
        (0.0548, (0.8, "deadline")),
        (0.0547, (0.7, "deadline")),
        (0.0381, (0.6, "deadline")),
        (0.0297, (0.5, "deadline")),
        (0.0295, (0.5, "hopeless")),
        (-1.0, (0.5, "hopeless")),
    ],
)
def test_the_highest_threshold_at_which_the_rest_ends_in_time(
    controller: ThresholdController, deadline: float, expected: tuple[float, str]
) -> None:
    placed(controller, deadline)
    assert decisions(controller) == {"r1": expected}


def test_without_a_deadline_it_runs_at_the_highest(controller: ThresholdController) -> None:
    placed(controller, None)
    assert decisions(controller) == {"r1": (0.9, "slack")}


def test_a_pin_is_never_touched(controller: ThresholdController) -> None:
    placed(controller, 0.01, threshold=0.65)
    assert decisions(controller) == {"r1": (0.65, "pin")}


def test_the_margin_is_kept_for_the_way_back() -> None:
    controller = make_controller("a", margin_s=0.01)
    placed(controller, 0.0640)
    assert decisions(controller) == {"r1": (0.7, "deadline")}


def test_it_plans_for_an_end_ahead_of_the_deadline_by_a_share_of_the_slo() -> None:
    """Of 80 ms: 16 less are 64 ms, enough for the highest; 17.6 less are not. Hopeless it is by the deadline itself."""
    for share, expected in ((0.2, (0.9, "slack")), (0.22, (0.8, "deadline"))):
        controller = make_controller("a", ahead_share=share)
        placed(controller, 0.080, slo_s=0.080)
        assert decisions(controller) == {"r1": expected}
    controller = make_controller("a", ahead_share=0.9)
    placed(controller, 0.0297, slo_s=0.080)
    assert decisions(controller) == {"r1": (0.5, "deadline")}
    paper = make_controller("a", policy="paper", ahead_share=0.9)
    placed(paper, 0.080, slo_s=0.080)
    assert decisions(paper) == {"r1": (0.9, "slack")}


@pytest.mark.parametrize(
    ("deadline", "expected"),
    [
        (0.0800, (0.9, "slack")),
        (0.0790, (0.8, "deadline")),  # 16 ms ahead: twice the share, for low thresholds cost little after an opening
        (0.0390, (0.6, "deadline")),  # the lowest with an opening: it ends before the deadline, if not so far ahead
        (0.0375, (0.5, "deadline")),  # and this only without
        (0.0290, (0.5, "hopeless")),
    ],
)
def test_a_request_has_no_opening_only_where_it_would_be_late_with_one(
    deadline: float, expected: tuple[float, str]
) -> None:
    controller = make_controller("a", profile=opened(0.6), ahead_share=0.1)
    placed(controller, deadline, slo_s=0.080)
    assert decisions(controller) == {"r1": expected}


def test_without_an_opening_only_below_the_floor_nobody_is() -> None:
    controller = make_controller("a", profile=opened(0.6))
    placed(controller, 0.0375, floor=0.6)
    assert decisions(controller) == {"r1": (0.6, "hopeless")}


def test_an_opening_comes_back_only_with_a_margin() -> None:
    """It needs 35.9 ms with one, and has 36; with a fifth of them kept free it has 28.8. Later it needs 25.4."""
    controller = make_controller("a", profile=opened(0.6), rise_margin=0.2)
    placed(controller, 0.0370)
    assert decisions(controller)["r1"][0] == 0.5
    controller.handle(forecast(steps_left=(3.0, 5.5, 8.0, 10.0, 12.0)), 0.001)
    assert decisions(controller)["r1"][0] == 0.5
    controller.handle(forecast(steps_left=(2.0, 3.0, 8.0, 10.0, 12.0)), 0.002)
    assert decisions(controller)["r1"][0] == 0.6


@pytest.mark.parametrize(("risk", "expected"), [(0.0, 0.9), (0.5, 0.8), (1.0, 0.7)])
def test_risk_chooses_between_the_mean_and_the_upper_bound(risk: float, expected: float) -> None:
    controller = make_controller("a", risk=risk)
    placed(controller, 0.066)
    controller.handle(forecast(spread=0.4), 0.0)
    assert decisions(controller)["r1"][0] == expected


def test_with_both_controls_off_everybody_runs_at_the_profile_s_threshold() -> None:
    controller = make_controller("a", deadline_control=False, load_control=False)
    placed(controller, 0.001)
    assert decisions(controller) == {"r1": (0.9, "slack")}


def test_who_could_still_be_lucky_is_not_hopeless() -> None:
    """29.6 ms are left on average, and half of it is as likely as half as much again."""
    for slack, reason in ((0.0150, "deadline"), (0.0146, "hopeless")):
        controller = make_controller("a", risk=0.5)
        placed(controller, slack)
        assert decisions(controller) == {"r1": (0.5, "hopeless")}
        controller.handle(forecast(spread=0.5), 0.0)
        assert decisions(controller) == {"r1": (0.5, reason)}


def test_the_paper_s_hopeless_run_at_the_lowest_and_know_no_floor() -> None:
    controller = make_controller("a", policy="paper")
    placed(controller, -1.0, floor=0.7)
    assert decisions(controller) == {"r1": (0.5, "hopeless")}


@pytest.mark.parametrize(
    ("deadline", "expected"),
    [(0.0630, (0.8, "deadline")), (0.0547, (0.7, "deadline")), (0.0381, (0.7, "hopeless"))],
)
def test_no_threshold_is_turned_down_below_the_floor(
    controller: ThresholdController, deadline: float, expected: tuple[float, str]
) -> None:
    """With 38.1 ms left, 0.6 would do."""
    placed(controller, deadline, floor=0.7)
    assert decisions(controller) == {"r1": expected}


def test_as_its_deadline_nears_without_progress_the_threshold_falls(controller: ThresholdController) -> None:
    placed(controller, 1.0632)
    assert decisions(controller) == {"r1": (0.9, "slack")}
    commands = controller.handle(e.Tick(), 1.0)
    assert told(commands)["r1"] == (0.9, "slack")
    controller.handle(status("a", held()), 1.01)
    controller.handle(report("a", entry(steps=1)), 1.02)
    controller.handle(forecast(steps=1), 1.02)
    # 43 ms are left, for 31.6 at 0.6, 40 at 0.7 and 48.4 at 0.8
    assert decisions(controller)["r1"] == (0.7, "deadline")


def test_steps_count_down_between_forecasts(controller: ThresholdController) -> None:
    placed(controller, 0.0500)
    assert decisions(controller)["r1"] == (0.7, "deadline")
    controller.handle(report("a", entry(steps=6)), 0.0)  # 12 are left at 0.9 of which 6 have run
    controller.handle(status("b"), 0.0)
    controller.handle(report("a", entry(steps=6), ratio=0.8), 0.0)  # the batch costs another price: decided anew
    # one recompute and 5 cache steps at 0.8 of their price: 25.3 ms
    assert decisions(controller)["r1"] == (0.9, "slack")


def test_without_a_forecast_the_profile_s_mean_steps_count_with_each_report(controller: ThresholdController) -> None:
    controller.handle(seen(deadline=0.0700, ignore_eos=True), 0.0)
    controller.handle(status("a", held()), 0.0)
    # two blocks of 4 to 8 steps: 46.4, 54.8, 63.2, 71.6 and 80 ms
    assert decisions(controller) == {"r1": (0.7, "deadline")}
    commands = controller.handle(report("a", entry(steps=4, tokens_committed_in_block=24)), 0.0)
    # a quarter of a block (2 steps at 0.9, 8.4 ms) and another (40 ms)
    assert told(commands) == {"r1": (0.9, "slack")}


def test_a_report_that_tells_what_is_left_of_the_last_block_is_believed(controller: ThresholdController) -> None:
    controller.handle(seen(deadline=0.0390), 0.0)
    controller.handle(status("a", held()), 0.0)
    tells = {"tokens_committed_in_block": 4, "prompt_tokens": 32, "tokens_left_in_block": 24}
    controller.handle(report("a", entry(steps=2, **tells)), 0.0)
    assert decisions(controller) == {"r1": (0.5, "deadline")}
    # 24 of 32 tokens, 3 to 6 cache steps of 4.2 ms and nothing behind
    controller.handle(report("a", entry(steps=2, ends_in_block=True, **tells)), 0.0)
    assert decisions(controller) == {"r1": (0.9, "slack")}


def test_a_forecast_for_other_thresholds_is_not_used(controller: ThresholdController) -> None:
    controller.handle(seen(deadline=0.0700, ignore_eos=True), 0.0)
    controller.handle(status("a", held()), 0.0)
    controller.handle(forecast(thresholds=(0.5, 0.9), steps_left=(1.0, 1.0)), 0.0)
    controller.handle(forecast(steps_left=(1.0, 1.0)), 0.0)
    assert decisions(controller) == {"r1": (0.7, "deadline")}


def test_a_fuller_batch_is_slower_so_thresholds_fall(controller: ThresholdController) -> None:
    placed(controller, 0.0640)
    controller.handle(seen("r2", seq=2), 0.0)
    commands = controller.handle(status("a", held(), held("r2")), 0.0)
    # r2 recomputes in 2 of 16 steps: 12 tokens of recompute and 28 of cache steps, 4 ms more a step, so 62 ms at 0.6
    assert told(commands) == {"r1": (0.6, "deadline"), "r2": (0.9, "slack")}
    controller.handle(record("r2", "finished", seq=9), 0.0)
    assert decisions(controller) == {"r1": (0.9, "slack")}


def test_a_slow_instance_gives_lower_thresholds(controller: ThresholdController) -> None:
    placed(controller, 0.0640)
    controller.handle(report("a", ratio=1.05), 0.0)
    assert decisions(controller)["r1"] == (0.9, "slack"), "within what is noise"
    controller.handle(report("a", ratio=1.3), 0.0)
    assert decisions(controller)["r1"] == (0.7, "deadline")


def test_deadline_control_can_be_switched_off() -> None:
    controller = make_controller("a", deadline_control=False)
    placed(controller, 0.0300)
    assert decisions(controller) == {"r1": (0.9, "slack")}


# --- plans --------------------------------------------------------------------------------------------------------


def test_low_first_runs_at_the_lowest_until_the_rest_fits_at_the_cap() -> None:
    controller = make_controller("a", plan="low_first")
    placed(controller, 0.0630)
    assert decisions(controller) == {"r1": (0.5, "deadline")}
    controller.handle(report("a", entry(steps=3)), 0.0)
    controller.handle(forecast(steps=3, steps_left=(2.0, 4.0, 6.0, 8.0, 10.0), blocks_left=1.0), 0.0)
    assert decisions(controller) == {"r1": (0.9, "slack")}


def test_high_first_runs_high_while_the_blocks_behind_can_still_be_made_at_the_lowest() -> None:
    controller = make_controller("a", plan="high_first")
    placed(controller, 0.0464)
    # the first of two blocks takes half: 31.6 ms at 0.9 and 14.8 at 0.5
    assert decisions(controller) == {"r1": (0.9, "slack")}
    placed(controller, 0.0464)
    controller.handle(report("a", entry(steps=1, block_index=1)), 0.0)
    controller.handle(forecast(steps=1, steps_left=(4.0, 8.0, 12.0, 16.0, 20.0), blocks_left=0.0), 0.0)
    assert decisions(controller) == {"r1": (0.6, "deadline")}, "nothing is behind the last block"


# --- by the paper's rules -----------------------------------------------------------------------------------------


def test_the_paper_prices_recomputes_as_if_all_coincided() -> None:
    ours, paper = make_controller("a"), make_controller("a", policy="paper")
    for controller in (ours, paper):
        controller.handle(seen(deadline=0.1), 0.0)
        controller.handle(seen("r2", seq=2), 0.0)
        controller.handle(status("a", held(), held("r2")), 0.0)
        controller.handle(forecast(), 0.0)
    # 2 steps of 1 + 2 * 9.6 ms, and 10 of 1 + 2 * 3.2 ms at 0.9: 114.4 ms; 99.6 at 0.8
    assert decisions(paper)["r1"] == (0.8, "deadline")
    # of ours each step shares its pass with an eighth of a recompute step: 14.6 and 8.2 ms, 111.2 ms at 0.9
    assert decisions(ours)["r1"] == (0.8, "deadline")


def test_the_paper_gives_up_at_seven_tenths_of_the_time_that_recompute_steps_would_take() -> None:
    paper = make_controller("a", policy="paper")
    placed(paper, 0.7 * 4 * 0.0106 - 1e-6)
    assert decisions(paper) == {"r1": (0.5, "hopeless")}
    paper.handle(forecast(steps_left=(3.9, 6.0, 8.0, 10.0, 12.0)), 0.0)
    assert decisions(paper) == {"r1": (0.5, "deadline")}


def test_the_paper_gives_up_on_what_would_end_in_two_thirds_of_that_time() -> None:
    """LLaDA-8B on an H100, a GSM8K request of 1,440 tokens: the published latencies and steps."""
    latency = LatencyProfile({1: PassCost(curve=((32.0, 12.183), (1440.0, 39.777)))})
    for policy, least_s in (("paper", 0.7 * 39.4 * 0.039777), ("tedi", 8 * 0.039777 + 31.4 * 0.012183)):
        for slack, reason in ((least_s + 1e-6, "deadline"), (least_s - 1e-6, "hopeless")):
            controller = make_controller("a", latency=latency, policy=policy)
            request = builders.make_request("r1", prompt_ids=[1] * 1184, max_tokens=256, deadline_at=1002.0)
            controller.handle(seen(request, deadline=slack), 0.0)
            controller.handle(status("a", held(), kv_tokens=16384), 0.0)
            controller.handle(forecast(steps_left=(39.4, 45.0, 54.4, 67.3, 86.0), blocks_left=8.0), 0.0)
            assert decisions(controller)["r1"][1] == reason, (policy, slack)


def test_the_paper_s_rules_plan_for_the_mean_whatever_the_risk() -> None:
    paper = make_controller("a", policy="paper", risk=1.0)
    placed(paper, 0.0640)
    paper.handle(forecast(spread=1.0), 0.0)
    assert decisions(paper) == {"r1": (0.9, "slack")}


# --- by load ------------------------------------------------------------------------------------------------------

# of a full instance of four: 26.6 ms at the lowest threshold and 54.2 at the highest, in steps of 6.9
LOW_S, STEP_S = 0.0266, 0.0069


@pytest.mark.parametrize(
    ("spare_steps", "expected"),
    [
        (16, [0.9, 0.9, 0.9, 0.9]),
        (10, [0.9, 0.9, 0.7, 0.5]),
        (4, [0.9, 0.5, 0.5, 0.5]),
        (0, [0.5] * 4),
        (-3, [0.5] * 4),
    ],
)
def test_each_in_turn_gets_what_the_others_at_the_lowest_leave(spare_steps: int, expected: list[float]) -> None:
    controller = make_controller("a")
    slo_s = 4 * LOW_S + (spare_steps + 0.1) * STEP_S
    for number in range(4):
        controller.handle(seen(f"r{number}", number + 1, slo_s, slo_s=slo_s), 0.0)
        controller.handle(forecast(f"r{number}"), 0.0)
    controller.handle(e.Tick(), 0.0)
    assert list(caps(controller).values()) == expected
    state = controller.load_state
    assert state is not None
    assert state.capacity_s == pytest.approx(slo_s)
    assert state.floor_s == pytest.approx(4 * LOW_S)
    assert state.demand_s == pytest.approx(4 * LOW_S + max(spare_steps, 0) * STEP_S)
    assert (state.num_open, state.num_hopeless) == (4, 0)
    assert [(cap.priority, cap.threshold) for cap in state.caps] == [(0, expected[-1])]


def settled_load(controller: ThresholdController, *events: e.Event) -> dict[str, float]:
    for event in events:
        controller.handle(event, 0.0)
    controller.handle(e.Tick(), 0.0)
    return caps(controller)


def test_the_more_urgent_come_first_whenever_they_arrive() -> None:
    slo_s = 2 * LOW_S + 4.1 * STEP_S
    controller = make_controller("a")
    found = settled_load(
        controller,
        seen("early", 1, slo_s, slo_s=slo_s),
        seen("urgent", 2, slo_s, slo_s=slo_s, priority=1),
        forecast("early"),
        forecast("urgent"),
    )
    assert found == {"early": 0.5, "urgent": 0.9}
    assert controller.load_state is not None
    assert [(c.priority, c.threshold) for c in controller.load_state.caps] == [(1, 0.9), (0, 0.5)]


def test_a_hopeless_request_changes_nobody_s_cap() -> None:
    slo_s = 2 * LOW_S + 4.1 * STEP_S
    good = [seen(f"r{n}", n + 1, slo_s, slo_s=slo_s) for n in (1, 2)]
    events = [*good, forecast("r1"), forecast("r2")]
    alone = settled_load(make_controller("a"), *events)
    controller = make_controller("a")
    late = seen("late", 1, 0.001, slo_s=77.0, priority=5)
    assert settled_load(controller, late, *events) == alone | {"late": 0.9}
    assert controller.load_state is not None
    assert controller.load_state.num_hopeless == 1
    paper = make_controller("a", policy="paper")
    found = settled_load(paper, late, *events)
    assert {r: found[r] for r in alone} != alone


def test_requests_without_a_deadline_get_what_the_others_leave() -> None:
    events = [seen(f"r{n}", n, None) for n in (1, 2)] + [forecast(r) for r in ("r1", "r2", "dated")]
    events.append(status("a", held("r1"), held("r2")))
    for slo_s, expected in (
        # of 107.5 ms the dated one takes 54.2, the others at the lowest 26.6 each and 26.9, their place, at any other
        (0.1075, 0.5),
        (0.1090, 0.9),
    ):
        dated = seen("dated", 3, slo_s, slo_s=slo_s)
        found = settled_load(make_controller("a"), dated, *events, forecast("dated"))
        assert found == {"dated": 0.9, "r1": expected, "r2": expected}
        waiting = settled_load(make_controller("a"), dated, *events[:-1], forecast("dated"))
        assert waiting == {"dated": 0.9, "r1": 0.9, "r2": 0.9}, "who waits takes nobody's place"


def test_loose_requests_give_way_to_a_tight_one() -> None:
    """By the mean SLO, 85 s, there would be time for all of them at the highest."""
    loose = [seen(f"r{n}", n, 100.0, slo_s=100.0) for n in range(6)] + [forecast(f"r{n}") for n in range(6)]
    assert set(settled_load(make_controller("a"), *loose).values()) == {0.9}
    # of 0.199 s each claims 26.6 ms at the lowest: all seven leave 12.8 ms, one step up
    tight = [seen("tight", 6, 0.199, slo_s=0.199), forecast("tight")]
    found = settled_load(make_controller("a"), *loose, *tight)
    assert found == {"r0": 0.6, **{f"r{n}": 0.5 for n in range(1, 6)}, "tight": 0.5}
    paper = settled_load(make_controller("a", policy="paper"), *loose, *tight)
    assert set(paper.values()) == {0.9}, "the paper's rule stays as it is"
    controller = make_controller("a")
    settled_load(controller, *loose, *tight)
    assert controller.load_state is not None
    assert controller.load_state.horizon_s == pytest.approx(0.199), "the horizon that is fullest"
    assert controller.load_state.floor_s == pytest.approx(7 * LOW_S)


def test_with_no_deadline_at_all_nobody_is_limited() -> None:
    controller = make_controller("a")
    assert set(settled_load(controller, *(seen(f"r{n}", n) for n in range(1, 9))).values()) == {0.9}


def test_the_profile_s_threshold_is_the_ceiling_and_a_pin_may_be_above_it() -> None:
    profile = replace(PROFILE, decoding=replace(PROFILE.decoding, threshold=0.7))
    controller = make_controller("a", profile=profile)
    requests = [seen("free"), seen("dated", 2, 9.0, slo_s=9.0), seen("pinned", 3, threshold=0.8)]
    for event in (*requests, status("a", held("free"), held("dated"), held("pinned")), e.Tick()):
        controller.handle(event, 0.0)
    assert decisions(controller) == {"free": (0.7, "slack"), "dated": (0.7, "slack"), "pinned": (0.8, "pin")}
    assert controller.load_state is not None
    assert [cap.threshold for cap in controller.load_state.caps] == [0.7]


def test_a_draining_instance_is_no_capacity_and_what_it_holds_still_counts() -> None:
    slo_s = LOW_S + 4.1 * STEP_S
    controller = make_controller("a", "b", load_every_s=0.0)
    events = [seen(f"r{n}", n, slo_s, slo_s=slo_s) for n in (1, 2)]
    events += [status("b", held("r2")), forecast("r1"), forecast("r2")]
    assert settled_load(controller, *events) == {"r1": 0.9, "r2": 0.9}
    assert settled_load(controller, status("b", held("r2"), draining=True)) == {"r1": 0.5, "r2": 0.5}
    assert controller.load_state is not None
    assert controller.load_state.capacity_s == pytest.approx(slo_s)
    assert controller.load_state.floor_s == pytest.approx(2 * LOW_S)
    assert settled_load(controller, status("b", held("r2"))) == {"r1": 0.9, "r2": 0.9}


def test_as_long_as_no_instance_is_known_nobody_is_limited() -> None:
    """It may have reported already, as one that was stopped for a while when a fresh controller asked."""
    controller = make_controller()
    controller.handle(seen("r1"), 0.0)
    controller.handle(report("a", entry("r1")), 0.0)
    assert settled_load(controller) == {"r1": 0.9}
    controller.handle(status("a", draining=True), 0.0)
    controller.handle(e.Tick(), 0.1)
    assert caps(controller) == {"r1": 0.5}, "there is one, which has no time for anybody"


def test_what_a_draining_instance_can_still_do_is_not_hopeless() -> None:
    """It is the fastest, and it may finish what it holds."""
    controller = make_controller("a", load_every_s=0.0)
    controller.handle(report("a", ratio=2.0), 0.0)
    events = [status("b", held(), draining=True), seen(deadline=0.03, slo_s=1.0), forecast()]
    settled_load(controller, *events, status("b", held(), draining=True))
    assert decisions(controller) == {"r1": (0.5, "deadline")}


def test_a_newcomer_starts_at_the_cap_of_the_last_one_before_it() -> None:
    slo_s = 3 * LOW_S + 4.1 * STEP_S
    controller = make_controller("a")
    events: list[e.Event] = [seen(f"r{n}", n, slo_s, slo_s=slo_s) for n in (1, 2, 3)]
    settled_load(controller, *events, *(forecast(f"r{n}") for n in (1, 2, 3)))
    assert caps(controller) == {"r1": 0.9, "r2": 0.5, "r3": 0.5}
    controller.handle(seen("late", 4, slo_s, slo_s=slo_s), 0.01)
    controller.handle(seen("urgent", 5, slo_s, slo_s=slo_s, priority=1), 0.01)
    controller.handle(status("a", held("late"), held("urgent")), 0.01)
    assert (caps(controller)["late"], caps(controller)["urgent"]) == (0.5, 0.9)
    assert decisions(controller)["late"][0] == 0.5, "it is told no other first"


def test_a_cap_rises_only_with_a_margin_to_spare_and_falls_at_once() -> None:
    slo_s = 2 * LOW_S + 8.1 * STEP_S
    controller = make_controller("a", rise_margin=0.2, load_every_s=0.0)
    events: list[e.Event] = [seen(f"r{n}", n, slo_s, slo_s=slo_s) for n in (1, 2)]
    assert settled_load(controller, *events, forecast("r1"), forecast("r2")) == {"r1": 0.9, "r2": 0.9}
    crowd = seen("r0", 0, slo_s, slo_s=slo_s)
    assert settled_load(controller, crowd, forecast("r0")) == {"r1": 0.5, "r2": 0.5, "r0": 0.9}
    # it ends: of 109 ms both fit, but not of 87 ms
    gone = record("r0", "finished", seq=9)
    assert settled_load(controller, gone) == {"r1": 0.9, "r2": 0.5}
    # and with less to do it rises
    assert settled_load(controller, forecast("r1", (2.0, 3.0, 4.0, 5.0, 6.0), blocks_left=1.0)) == {
        "r1": 0.9,
        "r2": 0.9,
    }


def test_a_threshold_rises_only_with_a_margin_to_spare_and_falls_at_once() -> None:
    controller = make_controller("a", rise_margin=0.2)
    placed(controller, 0.0650)
    assert decisions(controller)["r1"][0] == 0.9, "the first is no rise"
    controller.handle(forecast(steps_left=(4.0, 6.0, 8.0, 10.0, 12.6)), 0.001)
    assert decisions(controller)["r1"][0] == 0.8, "65.7 ms of 64"
    controller.handle(forecast(), 0.001)
    assert decisions(controller)["r1"][0] == 0.9, "what is known at one time is decided as if known at once"
    controller.handle(forecast(steps_left=(4.0, 6.0, 8.0, 10.0, 12.6)), 0.001)
    controller.handle(forecast(), 0.0015)
    assert decisions(controller)["r1"][0] == 0.8, "63.2 ms of 63.5 would just do"
    controller.handle(forecast(steps_left=(3.0, 4.0, 5.0, 7.0, 8.0)), 0.002)
    assert decisions(controller)["r1"][0] == 0.9, "46.4 ms of 63"


def test_what_is_hopeless_stays_so_until_there_is_a_margin() -> None:
    controller = make_controller("a", rise_margin=0.2)
    placed(controller, 0.0290)
    controller.handle(e.Tick(), 0.05)
    for steps_left, reason in (((3.9, 6.0, 8.0, 10.0, 12.0), "hopeless"), ((2.2, 6.0, 8.0, 10.0, 12.0), "deadline")):
        controller = make_controller("a", rise_margin=0.2)
        placed(controller, 0.0290)
        settled_load(controller)
        controller.handle(forecast(steps_left=steps_left), 0.0)
        assert decisions(controller)["r1"][1] == reason


def test_events_of_one_moment_are_decided_once() -> None:
    controller = make_controller("a")
    commands = controller.handle_all([seen(), seen("r2", 2), status("a", held(), held("r2")), forecast()], 0.0)
    assert [len(c.decisions) for c in commands if isinstance(c, e.SendThresholds)] == [2]


def test_load_control_can_be_switched_off() -> None:
    controller = make_controller("a", load_control=False)
    events = [seen(f"r{n}", n, 0.05, slo_s=0.05) for n in range(1, 9)]
    assert set(settled_load(controller, *events).values()) == {0.9}


def test_a_pin_counts_at_the_pin() -> None:
    slo_s = 2 * LOW_S + 2.1 * STEP_S
    events = [forecast("r1"), forecast("r2")]
    pinned = [seen("r1", 1, slo_s, slo_s=slo_s, threshold=0.7), seen("r2", 2, slo_s, slo_s=slo_s)]
    assert settled_load(make_controller("a"), *pinned, *events)["r2"] == 0.5
    pinned[0] = seen("r1", 1, slo_s, slo_s=slo_s, threshold=0.6)
    assert settled_load(make_controller("a"), *pinned, *events)["r2"] == 0.6


def test_a_changed_cap_reaches_a_running_request_at_once() -> None:
    slo_s = LOW_S + 4.1 * STEP_S + 2 * LOW_S
    controller = make_controller("a")
    settled_load(controller, seen("r2", 2, slo_s, slo_s=slo_s), status("a", held("r2")), forecast("r2"))
    assert decisions(controller) == {"r2": (0.9, "slack")}
    controller.handle(seen("r1", 1, slo_s, slo_s=slo_s), 0.0)
    controller.handle(forecast("r1"), 0.0)
    controller.handle(seen("r0", 0, slo_s, slo_s=slo_s), 0.0)
    controller.handle(forecast("r0"), 0.0)
    commands = controller.handle(e.Tick(), 0.05)
    assert told(commands) == {"r2": (0.5, "cap")}


def test_a_lost_instance_is_capacity_no_more() -> None:
    slo_s = LOW_S + 4.1 * STEP_S
    controller = make_controller("a", "b", load_every_s=0.0)
    events = [seen(f"r{n}", n, slo_s, slo_s=slo_s) for n in (1, 2)]
    found = settled_load(controller, *events, forecast("r1"), forecast("r2"))
    assert found == {"r1": 0.9, "r2": 0.9}
    controller.handle(e.InstanceExited("b"), 0.0)
    controller.handle(e.Tick(), 0.0)
    assert caps(controller) == {"r1": 0.5, "r2": 0.5}


def test_load_control_runs_at_most_so_often(controller: ThresholdController) -> None:
    controller.handle(e.Tick(), 0.1)
    commands = controller.handle(seen("r1", deadline=1.0), 0.2)
    assert commands == [e.WakeAt(0.2)]
    assert any(isinstance(c, e.SendLoadState) for c in controller.handle(e.Tick(), 0.2))
    wakes = controller.handle(seen("r2", 2, deadline=1.0), 0.21)
    assert wakes == [e.WakeAt(0.25)]
    assert controller.handle(seen("r3", 3, deadline=1.0), 0.22) == [], "the run that is due serves both"


# --- where requests are -------------------------------------------------------------------------------------------


def test_a_request_is_where_its_newest_report_says(controller: ThresholdController) -> None:
    controller.handle(status("b"), 0.0)
    placed(controller, None)
    commands = controller.handle(report("b", entry(steps=3)), 0.0)
    assert [c.instance_id for c in commands if isinstance(c, e.SendThresholds)] == ["b"]
    assert controller.handle(report("a", entry(steps=2)), 0.0) == []
    assert controller.handle(report("a", entry(steps=3)), 0.0) == []
    commands = controller.handle(report("a", entry(steps=1, attempt=2)), 0.0)
    assert commands == [e.SendThresholds("a", (e.Decision("r1", 2, 0.9, "slack"),), "changed")]


def test_what_was_given_back_is_not_brought_back_by_an_old_status(controller: ThresholdController) -> None:
    placed(controller, None)
    controller.handle(record("r1", "released", seq=4), 0.0)
    assert decisions(controller) == {}
    controller.handle(status("a", held()), 0.0)
    assert decisions(controller) == {}
    commands = controller.handle(status("b", held()), 0.0)
    assert [c.instance_id for c in commands if isinstance(c, e.SendThresholds)] == ["b"]


def test_a_lost_instance_holds_nothing_and_does_not_come_back_by_late_news(controller: ThresholdController) -> None:
    placed(controller, None)
    controller.handle(e.InstanceExited("a"), 0.0)
    controller.handle(status("a", held()), 0.0)
    controller.handle(report("a", entry(steps=9)), 0.0)
    assert decisions(controller) == {}


def test_a_silent_instance_is_lost_and_a_cut_of_our_own_is_not_its_silence(controller: ThresholdController) -> None:
    placed(controller, None)
    controller.handle(e.Reconnected(), 2.9)
    controller.handle(e.Tick(), 3.0)
    assert decisions(controller) == {"r1": (0.9, "slack")}
    controller.handle(e.Tick(), 5.9)
    assert decisions(controller) == {}


def test_a_final_record_ends_it_and_its_late_request_does_not_bring_it_back(controller: ThresholdController) -> None:
    placed(controller, None)
    controller.handle(record("r1", "finished", blocks_done=2, seq=5), 0.0)
    assert controller.num_open == 0
    controller.handle(seen("r1"), 0.0)
    assert controller.num_open == 0


def test_what_has_run_its_last_step_weighs_nothing_any_more(controller: ThresholdController) -> None:
    placed(controller, 0.0640)
    controller.handle(seen("r2", 2), 0.0)
    controller.handle(report("a", entry("r2", steps=1)), 0.0)
    assert decisions(controller)["r1"] == (0.6, "deadline")
    controller.handle(report("a", entry("r2", steps=9, block_index=2, finished=True)), 0.0)
    assert decisions(controller)["r1"] == (0.9, "slack")


def test_a_request_for_another_model_is_none_of_ours(controller: ThresholdController) -> None:
    controller.handle(seen(builders.make_request("r1", model="another")), 0.0)
    assert controller.num_open == 0


def test_a_request_that_nobody_ends_is_forgotten_after_its_time_limit(controller: ThresholdController) -> None:
    controller.handle(seen("r1", expires_at=100.0), 0.0)
    controller.handle(e.Tick(), 159.0)
    assert controller.num_open == 1
    controller.handle(e.Tick(), 161.0)
    assert controller.num_open == 0


# --- start and repetition -----------------------------------------------------------------------------------------


def test_a_fresh_controller_asks_and_decides_once_it_has_heard() -> None:
    controller = make_fresh(settle_s=0.3)
    controller.handle(seen("r1", deadline=5.05), 4.9)
    controller.handle(record("r1", "running", blocks_done=1, blocks=[builders.make_cost()]), 4.9)
    assert controller.handle(e.CaughtUp(), 5.0) == [e.AskStatus(), e.WakeAt(5.3)]
    assert not told(controller.handle(status("a", held()), 5.1))
    commands = controller.handle(e.Tick(), 5.3)
    assert e.Settled() in commands
    assert told(commands) == {"r1": (0.5, "hopeless")}
    controller.check_invariants()


def test_thresholds_are_repeated_in_full(controller: ThresholdController) -> None:
    placed(controller, None)
    commands = controller.handle(e.Tick(), 1.0)
    assert [c for c in commands if isinstance(c, e.SendThresholds)] == [
        e.SendThresholds("a", (e.Decision("r1", 1, 0.9, "slack"),), "repeated")
    ]
    assert len([c for c in commands if isinstance(c, e.SendLoadState)]) == 1
    commands = controller.handle(e.Tick(), 2.0)
    assert told(commands) == {"r1": (0.9, "slack")}


def test_nothing_is_said_where_nothing_has_changed(controller: ThresholdController) -> None:
    placed(controller, None)
    assert controller.handle(forecast(), 0.0) == []
    assert controller.handle(status("a", held()), 0.0) == []


def test_requests_are_counted_by_their_reason(controller: ThresholdController) -> None:
    placed(controller, 0.0500)
    assert controller.num_decided() == {"pin": 0, "slack": 0, "cap": 0, "deadline": 1, "hopeless": 0}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("risk", 1.5),
        ("rise_margin", 1.0),
        ("repeat_s", 0),
        ("margin_s", -1),
        ("ahead_share", 1.0),
        ("metrics_port", 70000),
        ("load_every_s", float("nan")),
    ],
)
def test_wrong_settings_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        ThresholdControllerConfig(**{setting: value})  # type: ignore[arg-type]


def test_the_paper_s_rules_know_no_plan_but_flat() -> None:
    with pytest.raises(ValueError, match="flat"):
        ThresholdControllerConfig(policy="paper", plan="low_first")


def test_the_profile_s_mean_steps_are_given_or_follow_the_published_runs() -> None:
    assert PROFILE.decoding.mean_steps == (4.0, 5.0, 6.0, 7.0, 8.0)
    estimated = type(PROFILE.decoding)(thresholds=(0.5, 0.55, 0.9, 0.95), threshold=0.9, steps_per_block=8.6)
    assert estimated.mean_steps == pytest.approx((3.94, 4.22, 8.6, 8.6))
