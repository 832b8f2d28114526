"""What holds in every cluster: requests of all kinds on instances of all kinds, whatever is known of them."""

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from services.profile import Profile
from services.threshold_controller import events as e
from services.threshold_controller.policy import ThresholdController
from tests import builders
from tests.unit.threshold_controller.build import (
    PROFILE,
    THRESHOLDS,
    caps,
    decisions,
    entry,
    make_controller,
    opened,
    report,
    seen,
    status,
)
from tests.unit.threshold_controller.build import forecast as forecast_of

NOW = 5.0
LATER = 5.01


class Known(NamedTuple):
    """All that is known of a request. Its id and its arrival are its place in the list."""

    slack: float | None
    slo_s: float
    pin: float | None
    priority: int
    cache: str
    blocks_ahead: int | None
    blocks: int
    instance: str | None
    steps: int
    blocks_done: int
    forecast: tuple[float, float] | None  # mean steps left at the lowest threshold, spread
    later: float | None = None  # the former, as a second forecast says

    @property
    def held(self) -> bool:
        return self.instance is not None


@st.composite
def known(draw: st.DrawFn) -> Known:
    blocks = draw(st.integers(1, 5))
    return Known(
        slack=draw(st.none() | st.floats(-0.2, 2.0)),
        slo_s=draw(st.sampled_from([0.1, 0.2, 0.3, 1.0, 5.0])),
        pin=draw(st.none() | st.none() | st.sampled_from([0.3, 0.65, 0.9, 1.0])),
        priority=draw(st.integers(-1, 1)),
        cache=draw(st.sampled_from(["none", "prefix", "dual"])),
        blocks_ahead=draw(st.sampled_from([None, 0, 1])),
        blocks=blocks,
        instance=draw(st.none() | st.sampled_from(["a", "b"])),
        steps=draw(st.integers(1, 30)),
        blocks_done=draw(st.integers(0, blocks - 1)),
        forecast=draw(st.none() | st.tuples(st.floats(0.5, 40.0), st.floats(0.0, 0.8))),
        later=draw(st.none() | st.floats(0.5, 40.0)),
    )


worlds = st.lists(known(), min_size=1, max_size=7)


def arrival(number: int, one: Known) -> e.RequestSeen:
    request = builders.make_request(
        f"r{number}",
        max_tokens=32 * one.blocks,
        cache=one.cache,
        blocks_ahead=one.blocks_ahead,
        threshold=one.pin,
        priority=one.priority,
        deadline_at=None if one.slack is None else 1000.0 + one.slo_s,
    )
    return seen(request, number + 1, None if one.slack is None else NOW + one.slack)


def signs(number: int, one: Known) -> list[e.Event]:
    """What is heard of it after its arrival, in any order."""
    heard: list[e.Event] = []
    if one.instance is not None:
        standing: dict[str, Any] = {"block_index": one.blocks_done, "steps_in_block": min(one.steps, 3)}
        heard.append(report(one.instance, entry(f"r{number}", one.steps, num_blocks=one.blocks, **standing)))
    if one.forecast is not None:
        heard.append(forecast_made(number, one, *one.forecast))
    return heard


def later_signs(number: int, one: Known) -> list[e.Event]:
    return [] if one.later is None else [forecast_made(number, one, one.later, 0.2)]


def forecast_made(number: int, one: Known, least: float, spread: float) -> e.ForecastSeen:
    left = tuple(least * (1 + 0.3 * k) for k in range(len(THRESHOLDS)))
    return forecast_of(f"r{number}", left, spread=spread, steps=one.steps, blocks_left=one.blocks / 2)


def begin(policy: str = "tedi", rise_margin: float = 0.2, **config: Any) -> ThresholdController:
    controller = make_controller("a", "b", load_every_s=0.0, policy=policy, rise_margin=rise_margin, **config)
    controller.handle(status("a"), NOW)
    controller.handle(status("b", tp_degree=2, kv_tokens=4096), NOW)
    return controller


def run(world: list[Known], *, skip: int | None = None, **config: Any) -> ThresholdController:
    """All of it heard, at one time, and later the later forecasts; but nothing of the request `skip`."""
    controller = begin(**config)
    heard = [(number, one) for number, one in enumerate(world) if number != skip]
    for now, said in ((NOW, lambda *of: [arrival(*of), *signs(*of)]), (LATER, later_signs)):
        for number, one in heard:
            for event in said(number, one):
                controller.handle(event, now)
        controller.handle(e.Tick(), now)
        controller.check_invariants()
    return controller


@given(worlds, st.sampled_from(["tedi", "paper"]), st.sampled_from(["flat", "low_first", "high_first"]))
@settings(max_examples=30)
def test_each_is_told_a_threshold_of_the_set_not_above_its_cap_or_its_pin(
    world: list[Known], policy: str, plan: str
) -> None:
    controller = run(world, policy=policy, plan="flat" if policy == "paper" else plan)
    told = decisions(controller)
    assert told.keys() == {f"r{number}" for number, one in enumerate(world) if one.held}
    for request_id, (threshold, reason) in told.items():
        one, cap = world[int(request_id[1:])], caps(controller)[request_id]
        assert (reason == "pin") == (one.pin is not None)
        if one.pin is not None:
            assert threshold == one.pin
            continue
        assert threshold in THRESHOLDS
        assert threshold <= cap
        assert reason != "slack" or threshold == THRESHOLDS[-1]
        assert reason != "cap" or threshold == cap < THRESHOLDS[-1]
        assert reason != "deadline" or (threshold < cap and one.slack is not None)
        assert reason != "hopeless" or threshold == THRESHOLDS[0]


@given(worlds, st.randoms(use_true_random=False), st.sampled_from(["tedi", "paper"]))
@settings(max_examples=30)
def test_the_order_of_events_with_equal_times_does_not_matter(world: list[Known], rng: Any, policy: str) -> None:
    in_order = run(world, policy=policy)
    controller = begin(policy=policy)
    arrivals: list[e.Event] = [arrival(number, one) for number, one in enumerate(world)]
    heard = [event for number, one in enumerate(world) for event in signs(number, one)]
    later = [event for number, one in enumerate(world) for event in later_signs(number, one)]
    for events in (arrivals, heard, later):
        rng.shuffle(events)
    for event in arrivals + heard:
        controller.handle(event, NOW)
    controller.handle(e.Tick(), NOW)
    controller.handle_all(later, LATER)
    controller.handle(e.Tick(), LATER)
    assert caps(controller) == {r: caps(in_order)[r] for r in caps(controller)}
    assert decisions(controller) == decisions(in_order)
    assert controller.load_state == in_order.load_state


@given(worlds, st.data())
@settings(max_examples=30)
def test_one_request_more_raises_nobody_s_cap(world: list[Known], data: st.DataObject) -> None:
    extra = data.draw(st.integers(0, len(world) - 1))
    fewer, more = run(world, skip=extra), run(world)
    before, after = caps(fewer), caps(more)
    assert all(after[r] <= before[r] for r in before)


@given(worlds, st.data())
@settings(max_examples=30)
def test_a_hopeless_request_changes_nobody_s_cap(world: list[Known], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(world) - 1))
    world[place] = world[place]._replace(slack=-0.1)
    with_it = caps(run(world))
    with_it.pop(f"r{place}")
    assert with_it == caps(run(world, skip=place))


@given(
    worlds,
    st.data(),
    st.floats(0.0, 2.0),
    st.sampled_from(["flat", "low_first", "high_first"]),
    st.sampled_from([PROFILE, opened(0.0), opened(0.7)]),
)
@settings(max_examples=60)
def test_more_slack_never_lowers_a_threshold(
    world: list[Known], data: st.DataObject, more: float, plan: str, profile: Profile
) -> None:
    """Of the request itself, nor of another one; at equal caps."""
    rules: dict[str, Any] = {"plan": plan, "profile": profile, "ahead_share": 0.2, "load_control": False}
    place = data.draw(st.integers(0, len(world) - 1))
    slack = world[place].slack
    world[place] = world[place]._replace(slack=0.1 if slack is None else slack)
    before = decisions(run(world, **rules))
    world[place] = world[place]._replace(slack=(world[place].slack or 0.0) + more)
    after = decisions(run(world, **rules))
    name = f"r{place}"
    if name in before:
        assert after[name][0] >= before[name][0]
    if plan == "flat":
        assert all(after[r][0] >= before[r][0] for r in before)


@given(worlds, st.sampled_from(["tedi", "paper"]))
@settings(max_examples=30)
def test_no_more_work_is_granted_than_there_is_capacity_unless_all_are_at_the_lowest(
    world: list[Known], policy: str
) -> None:
    """Of those that count: by our rules those that are not hopeless, by the paper's where there is any SLO."""
    controller = run(world, policy=policy)
    state = controller.load_state
    assert state is not None
    counted = [o for o in controller._open.values() if policy == "paper" or not o.hopeless]
    granted = [o.cap for o in counted]
    if not any(g for g, o in zip(granted, counted, strict=True) if o.pin is None) or all(
        o.slack is None for o in world
    ):
        return
    if policy == "paper":
        assert state.demand_s <= state.capacity_s * (1 + 1e-9)
    for claims in controller._claims(counted) if policy == "tedi" else []:
        assert claims.demand_s(granted) <= 2 * claims.length_s * (1 + 1e-9), "of two instances"


@given(worlds, st.floats(0.0, 3.0))
@settings(max_examples=40)
def test_the_same_events_give_the_same_commands(world: list[Known], later: float) -> None:
    def play() -> list[list[e.Command]]:
        controller = begin()
        said = []
        for number, one in enumerate(world):
            said += [controller.handle(event, NOW) for event in (arrival(number, one), *signs(number, one))]
        return [*said, controller.handle(e.Tick(), NOW), controller.handle(e.Tick(), NOW + later)]

    assert play() == play()
