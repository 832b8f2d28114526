"""What steps cost: to the request itself in its batch, and as a share of a full instance."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.messages import CacheMode
from services.costs import LatencyProfile, PassCost, Resident
from services.threshold_controller.prices import (
    Fleet,
    StepPrices,
    Supply,
    alone_prices,
    own_prices,
    paper_own_prices,
    shared_prices,
    window_tokens,
)
from tests.unit.threshold_controller.build import LATENCY

SMALL = Resident(96, 32, "dual", 32)
LONG = Resident(400, 32, "dual", 32)
ONE = Supply(tp_degree=1, max_requests=4, kv_tokens=384, latency_ratio=1.0)


def seconds(*ms: float) -> StepPrices:
    return StepPrices(*(pytest.approx(value / 1000) for value in ms))


def own(
    instance: Supply, resident: Resident, *others: tuple[Resident, float], share: float = 0.5, latency: Any = LATENCY
) -> StepPrices:
    """`others`: each with its share of recompute steps; `share`: its own."""
    batch, shares = [resident, *(other for other, _ in others)], [share, *(of for _, of in others)]
    return own_prices(latency, instance, batch, shares, [0])[0]


def test_alone_a_step_lasts_as_long_as_its_own_pass() -> None:
    # 1 ms and 0.1 ms a token: 96 tokens, 32 tokens
    assert own(ONE, SMALL) == seconds(10.6, 4.2)
    assert own(ONE._replace(latency_ratio=2.0), SMALL) == seconds(21.2, 8.4)


def test_others_add_what_they_put_into_a_pass_on_average() -> None:
    # a recompute pass: 96 + 124 and 48 tokens; a cache pass: 32 + 48, and 124 more on average
    assert own(ONE, SMALL, (LONG, 0.25), (SMALL, 0.25)) == seconds(1 + 9.6 + 12.4 + 4.8, 1 + 8.0 + 12.4)


shares = st.sampled_from([0.1, 0.5, 1.0])


@given(
    st.lists(st.tuples(st.integers(33, 900).map(lambda canvas: Resident(canvas, 32, "dual", 32)), shares), max_size=5),
    shares,
    shares,
)
def test_what_a_step_costs_a_request_does_not_depend_on_how_often_it_recomputes_itself(
    others: list[tuple[Resident, float]], share: float, another: float
) -> None:
    assert own(ONE, LONG, *others, share=share) == pytest.approx(own(ONE, LONG, *others, share=another))


def test_a_pass_without_a_recompute_step_does_not_pay_for_one() -> None:
    """What a recompute pass costs is paid as often as there is one, not always a little."""
    latency = LatencyProfile({1: PassCost(curve=((100.0, 2.0), (200.0, 40.0)))})
    other = Resident(200, 32, "dual", 32)
    without, where_any = 2.0, 40.0 + 0.38 * (32 + 28.8)
    prices = own(ONE, SMALL, (other, 0.1), latency=latency)
    assert prices.cache == pytest.approx((0.1 * where_any + 0.9 * without) / 1000)


def test_by_the_paper_s_rule_all_recomputes_of_a_batch_coincide_and_all_cache_steps() -> None:
    assert paper_own_prices(LATENCY, ONE, [SMALL, LONG]) == seconds(1 + 49.6, 1 + 6.4)


def test_the_prefix_cache_s_window_shrinks_to_a_block_at_the_end() -> None:
    assert window_tokens(Resident(500, 32, "prefix", 128)) == 80.0
    assert window_tokens(Resident(500, 32, "prefix", 32)) == 32.0
    assert window_tokens(Resident(500, 32, "dual", 128)) == 32.0


@pytest.mark.parametrize("steps", [4.0, 8.0])
def test_the_shares_of_a_full_instance_add_up_to_its_time(steps: float) -> None:
    """Four requests in their real block pattern: a recompute step in `steps`."""
    prices = shared_prices(LATENCY, Fleet([ONE]), SMALL, (4.0, 8.0), "tedi")
    block_s = prices.recompute + (steps - 1) * prices.cache
    recompute, cache = 4 * 96 / steps, 4 * 32 * (1 - 1 / steps)
    assert 4 * block_s == pytest.approx(steps * (1 + 0.1 * (recompute + cache)) / 1000)


def test_without_a_cache_a_share_is_that_of_a_pass_of_recomputes() -> None:
    prices = shared_prices(LATENCY, Fleet([ONE]), Resident(96, 32, "none", 32), (4.0, 8.0), "tedi")
    assert prices.recompute == pytest.approx((1 + 0.1 * 4 * 96) / 4 / 1000)


def test_a_full_instance_holds_what_its_pool_has_room_for() -> None:
    roomy, narrow = ONE._replace(kv_tokens=10_000), ONE._replace(kv_tokens=100)
    four = shared_prices(LATENCY, Fleet([roomy]), SMALL, (4.0, 8.0), "tedi")
    single = shared_prices(LATENCY, Fleet([narrow]), SMALL, (4.0, 8.0), "tedi")
    assert four == shared_prices(LATENCY, Fleet([ONE]), SMALL, (4.0, 8.0), "tedi")
    assert single.cache > four.cache, "what a pass costs once is not shared"


def test_over_instances_work_is_spread_so_that_all_end_together() -> None:
    slow = ONE._replace(latency_ratio=3.0)
    one = shared_prices(LATENCY, Fleet([ONE]), SMALL, (4.0, 8.0), "tedi")
    both = shared_prices(LATENCY, Fleet([ONE, slow]), SMALL, (4.0, 8.0), "tedi")
    # in 3 s of each the fast one runs 3 parts and the slow one 1: 6 instance-seconds for 4 parts
    assert both.cache == pytest.approx(1.5 * one.cache)
    assert shared_prices(LATENCY, Fleet([ONE] * 5), SMALL, (4.0, 8.0), "tedi") == pytest.approx(one)


def test_the_paper_s_price_is_by_the_token_from_requests_of_1536_with_a_step_for_each_token() -> None:
    instance = ONE._replace(kv_tokens=2 * 1536)
    prices = shared_prices(LATENCY, Fleet([instance]), SMALL, (4.0, 8.0), "paper")
    ms = (1 + 0.1 * 2 * 1536) + 31 * (1 + 0.1 * 2 * 32)
    per_token = ms / (2 * (1536 + 31 * 32)) / 1000
    assert prices == pytest.approx((96 * per_token, 32 * per_token))


@given(
    st.integers(33, 2000),
    st.sampled_from(["none", "prefix", "dual"]),
    st.lists(st.builds(Supply, st.integers(1, 4), st.integers(1, 16), st.integers(1, 9000), st.floats(0.5, 4))),
)
def test_nothing_is_free_and_nobody_is_faster_than_alone_on_the_fastest(
    canvas: int, cache: CacheMode, instances: list[Supply]
) -> None:
    resident = Resident(canvas, 32, cache, 32)
    fleet = Fleet(instances)
    shared = shared_prices(LATENCY, fleet, resident, (4.0, 8.0), "tedi")
    assert shared.recompute > 0
    assert shared.cache > 0
    alone = alone_prices(LATENCY, fleet, resident)
    for instance in instances:
        beside = own(instance, resident, (LONG, 0.25))
        assert beside.recompute >= alone.recompute
        assert beside.cache >= alone.cache
