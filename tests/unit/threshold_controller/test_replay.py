"""What the decisions come to over some seconds of a busy cluster: how often thresholds turn."""

from statistics import fmean
from typing import Any

from services.costs import load_latency
from services.profile import load_profile
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.policy import ThresholdController
from tests.processes import ROOT
from tests.unit.threshold_controller.replay import Kind, Replay, Run

SECONDS = 6.0


def play(kinds: list[Kind], **config: Any) -> list[list[Run]]:
    """The requests that have ended, by kind."""
    profile = load_profile(ROOT / "profiles/tiny-cpu")
    latency = load_latency(profile.latency_file)
    controller = ThresholdController(ThresholdControllerConfig(**config), profile, latency)
    runs = Replay(controller, profile, latency, instances=2, seed=3).run(kinds, SECONDS)
    controller.check_invariants()
    return [[run for run in runs if run.kind == number] for number in range(len(kinds))]


def test_with_a_margin_thresholds_turn_round_less_than_half_as_often() -> None:
    (with_it,) = play([Kind(per_s=30, slo_s=1.5)], ahead_share=0.0)
    (without,) = play([Kind(per_s=30, slo_s=1.5)], ahead_share=0.0, rise_margin=0.0)
    assert len(with_it) == len(without) > 80
    assert fmean(run.flaps for run in with_it) < 0.5 * fmean(run.flaps for run in without)
    assert fmean(run.in_time for run in with_it) > fmean(run.in_time for run in without) - 0.05
