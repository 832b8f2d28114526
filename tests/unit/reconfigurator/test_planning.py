"""What is planned where the two stages have no answer, and the paper's example."""

import pytest
from msgspec.structs import replace

from contracts.messages import CacheMode
from services.reconfigurator import planning
from services.reconfigurator.demand import workload_of
from services.reconfigurator.milp import HighsSolver, Model, Solution, Terms
from services.reconfigurator.plan import Plan
from services.reconfigurator.planning import alternatives, plan
from services.reconfigurator.policy import judge
from services.reconfigurator.problem import Planning
from tests.unit.reconfigurator.build import (
    make_class,
    make_degree,
    make_instances,
    make_node,
    paper_example,
)

TWO_TP_4 = make_instances((0, 1, 2, 3), (4, 5, 6, 7))
EIGHT_TP_1 = make_instances(*((device,) for device in range(8)))


def figures_of(made: Plan) -> tuple[float, float]:
    assert made.figures is not None
    return made.figures.mean_threshold, made.figures.mean_latency_s


def test_low_load_takes_the_high_degree_and_high_load_the_low_one() -> None:
    low = plan(paper_example(0.5, today=EIGHT_TP_1))
    assert low.layout == {4: 2}
    assert figures_of(low) == pytest.approx((0.9, 2.0))
    assert judge(paper_example(0.5, today=EIGHT_TP_1), low).reason == "latency_gain"
    high = plan(paper_example(1.8, today=TWO_TP_4))
    assert high.layout == {1: 8}
    assert figures_of(high) == pytest.approx((0.9, 3.6))
    assert judge(paper_example(1.8, today=TWO_TP_4), high).reason == "today_infeasible"


def test_in_between_both_degrees_serve() -> None:
    """At TP-4 one instance takes 0.425 requests a second, four at TP-1 0.94."""
    made = plan(paper_example(1.2))
    assert made.layout == {1: 4, 4: 1}
    (chat,) = made.figures.classes if made.figures else ()
    assert chat.share_by_degree[4] == pytest.approx(0.425 / 1.2, rel=1e-4)


def test_alternatives_say_what_other_layouts_could_reach() -> None:
    problem = paper_example(1.2, today=TWO_TP_4)
    found = {other.name: other.figures for other in alternatives(problem)}
    assert found["today"] is None
    assert found["all TP-4"] is None
    assert found["all TP-1"] is not None
    assert found["all TP-1"].mean_latency_s == pytest.approx(3.6)
    assert found["all TP-1"].busiest == pytest.approx(1.2 * 3.6 / 8)


@pytest.mark.parametrize("classes", [(), (make_class(rate_per_s=0.0), make_class("other", rate_per_s=0.0))])
def test_without_requests_todays_layout_stays(classes: tuple[object, ...]) -> None:
    today = make_instances((0, 1, 2, 3), (5,))
    problem = paper_example(1.0, classes=classes, today=today)
    made = plan(problem)
    assert made.outcome == "no_requests"
    assert made.layout == {1: 1, 4: 1}
    assert {one.instance_id: one.devices for one in made.instances} == {"n0-0": (0, 1, 2, 3), "n0-5": (5,)}
    assert judge(problem, made).change is False


def test_one_device_is_one_instance_at_tp_1() -> None:
    made = plan(paper_example(0.1, nodes=(make_node(devices=1),)))
    assert made.layout == {1: 1}
    assert [(one.node_id, one.devices) for one in made.instances] == [("n0", (0,))]


def test_a_degree_that_fits_on_no_node_is_never_used() -> None:
    degrees = (make_degree(1, (512, 72.0)), make_degree(4, (512, 40.0)), make_degree(8, (512, 1.0)))
    nodes = (make_node("n0", 4), make_node("n1", 7))
    made = plan(paper_example(0.5, degrees=degrees, nodes=nodes))
    assert made.layout == {1: 3, 4: 2}, "and no device is left over"


def test_a_promise_below_one_step_is_taken_back_and_named() -> None:
    hopeless = make_class("hopeless", slo_s=0.03, rate_per_s=0.1)
    fine = make_class("fine", rate_per_s=0.3)
    problem = paper_example(0.5, classes=(hopeless, fine))
    made = plan(problem)
    assert made.outcome == "planned"
    assert made.softened == ("hopeless",)
    assert made.layout == plan(replace(problem, classes=(replace(hopeless, slo_s=None), fine))).layout == {4: 2}
    assert {one.name: one.slo_s for one in made.figures.classes} == {"hopeless": None, "fine": 10.0}  # type: ignore[union-attr]


def test_a_class_longer_than_any_batch_is_left_out_and_named() -> None:
    problem = paper_example(0.5, classes=(make_class("long", prompt_tokens=400), make_class("fine", rate_per_s=0.5)))
    made = plan(problem)
    assert made.too_long == ("long",)
    assert made.layout == {4: 2}
    only = plan(replace(problem, classes=problem.classes[:1], today=EIGHT_TP_1))
    assert (only.outcome, only.layout, only.too_long) == ("no_requests", {1: 8}, ("long",))


def test_too_much_load_is_all_tp_1_and_says_that_it_is_the_load() -> None:
    made = plan(paper_example(3.0))
    assert made.outcome == "overload"
    assert made.layout == {1: 8}
    assert made.figures is None
    assert "stability" in made.because
    assert "10.8 instances" in made.because
    assert "chat" in made.because


def test_promises_that_do_not_go_together_are_all_tp_1_and_those_of_low_priority_are_named() -> None:
    """Both want TP-4, which has room for 0.85 requests a second."""
    dear = make_class("dear", rate_per_s=0.6, slo_s=2.5, priority=1)
    cheap = make_class("cheap", rate_per_s=0.6, slo_s=2.5, priority=-1)
    problem = paper_example(0.0, classes=(dear, cheap))
    made = plan(problem)
    assert made.outcome == "broken_promises"
    assert made.layout == {1: 8}
    assert made.figures is not None
    assert made.figures.mean_latency_s == pytest.approx(3.6)
    assert "cheap" in made.because
    assert "dear" not in made.because
    assert "dear" in plan(replace(problem, classes=(replace(dear, priority=-2), cheap))).because


def test_the_lowest_degree_counts_where_tp_1_does_not_fit_the_model() -> None:
    degrees = (make_degree(2, (512, 72.0)), make_degree(4, (512, 40.0)))
    assert plan(paper_example(9.0, degrees=degrees)).layout == {2: 4}


def test_headroom_is_for_the_new_layout_alone() -> None:
    """0.8 requests a second fit on two TP-4 instances, 0.96 do not."""
    problem = paper_example(0.8, planning=Planning(solver="highs", headroom=1.2), today=TWO_TP_4)
    made = plan(problem)
    assert made.layout == {1: 4, 4: 1}
    assert made.today is not None
    assert made.today.mean_latency_s == pytest.approx(2.0)
    assert judge(problem, made).reason == "no_clear_gain"


class TooSlow:
    """A solver whose time is always up."""

    name = "too slow"

    def __init__(self, after: int) -> None:
        self._left = after

    def solve(self, model: Model, objective: Terms, time_limit_s: float) -> Solution:
        self._left -= 1
        return HighsSolver().solve(model, objective, 60.0) if self._left >= 0 else Solution("none", [])


def test_without_an_answer_in_time_todays_layout_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = paper_example(1.2, today=TWO_TP_4)
    monkeypatch.setattr(planning, "solver_named", lambda name: TooSlow(after=0))
    made = plan(problem)
    assert (made.outcome, made.layout, made.proven) == ("out_of_time", {4: 2}, False)
    assert "10 s" in made.because
    assert judge(problem, made).reason == "out_of_time"


def test_a_guess_is_used_where_there_is_no_time_for_more_and_its_gap_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one batch size a degree two solves of the relaxed program and two of the guess come first."""
    problem = paper_example(1.2, planning=Planning(solver="highs", time_sharing=False))
    best = plan(problem)
    monkeypatch.setattr(planning, "solver_named", lambda name: TooSlow(after=4))
    monkeypatch.setattr(planning, "place", lambda *arguments: ())
    made = plan(problem)
    assert (made.outcome, made.proven) == ("planned", False)
    assert figures_of(made) == pytest.approx(figures_of(best)), "there is but one batch size to guess"
    assert made.gap > 0


def test_sizes_that_differ_are_no_reason_for_a_degree_that_is_no_faster() -> None:
    """Two devices make no step faster. With one batch size a degree the short ones look as slow as the long ones until
    a degree of their own has passes of their size."""
    curve = (128, 10.0), (2048, 60.0)
    problem = paper_example(
        0.0,
        degrees=(make_degree(1, *curve), make_degree(2, *curve)),
        classes=(
            make_class("short", rate_per_s=1.0, prompt_tokens=64, output_tokens=64),
            make_class("long", rate_per_s=0.1, prompt_tokens=1920, output_tokens=128),
        ),
        batch_tokens=(128, 2048),
        today=EIGHT_TP_1,
    )
    assert Planning().time_sharing, "the default"
    made = plan(problem)
    assert judge(problem, made).reason == "same_layout"
    assert made.today is not None
    assert {one.name: one.latency_s for one in made.today.classes} == pytest.approx({"short": 0.125, "long": 1.5})
    assert figures_of(made) == pytest.approx((0.9, (0.125 + 0.1 * 1.5) / 1.1))
    one_size = replace(problem, planning=Planning(solver="highs", time_sharing=False))
    misjudged = plan(one_size)
    assert (judge(one_size, misjudged).reason, misjudged.layout) == ("latency_gain", {1: 2, 2: 3})
    assert figures_of(misjudged) == pytest.approx(figures_of(made)), "and all that it gains was there before"


def test_the_same_problem_gives_the_same_plan() -> None:
    problem = paper_example(1.2, today=TWO_TP_4)
    first, second = plan(problem), plan(problem)
    assert replace(first, seconds=0.0) == replace(second, seconds=0.0)


def test_steps_pass_what_the_model_sees() -> None:
    """2 blocks of 32 tokens after 36 of prompt, one block ahead: rows are 100 and 100; none ahead: 68 and 100."""
    one = make_class(prompt_tokens=36, output_tokens=64)
    latency = make_degree(1, (50, 5.0), (100, 10.0), (256, 25.6))

    def rows(blocks_ahead: int | None, cache: CacheMode = "dual") -> dict[str, float]:
        problem = replace(
            paper_example(0.1), degrees=(latency,), classes=(one,), cache=cache, blocks_ahead=blocks_ahead
        )
        options = workload_of(problem).demands[0].options
        return {option.kind: option.batch_tokens * option.instance_s / option.seconds for option in options}

    assert rows(None) == rows(1) == pytest.approx({"recompute": 100.0, "cache": 32.0})
    assert rows(0) == pytest.approx({"recompute": 84.0, "cache": 32.0})
    assert rows(None, "prefix")["cache"] == pytest.approx(48.0)
    assert rows(0, "prefix")["cache"] == pytest.approx(32.0)


def test_caching_has_one_recompute_a_block() -> None:
    """8 blocks of 32 tokens, 4 tokens a step: 8 recomputes at 100 ms and 56 cache steps at 10 ms."""
    plain = paper_example(0.1)
    problem = replace(
        plain,
        degrees=(make_degree(1, (256, 10.0), (512, 100.0)),),
        thresholds=(replace(plain.thresholds[0], tokens_per_step=4.0),),
        cache="dual",
        cache_batch_tokens=(256,),
    )
    assert figures_of(plan(problem)) == pytest.approx((0.9, 8 * 0.1 + 56 * 0.01))
