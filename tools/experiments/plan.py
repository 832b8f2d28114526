"""Which experiments there are, each a table of the results: points, each one run of one system."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tools.experiments.setups import VARIANTS

COMPARED = ("tedi", "paper", "llumnix", "infaas", "proteus")
ABLATIONS = ("tedi", "paper", "infaas", "proteus", "no-load-control", "no-deadline-control")
ONE_PART_LESS = ("one-shot", "oracle", "no-migration", "no-caching")


class Point(NamedTuple):
    """One run. A system's name may go on with the kind of its forecasts: `no-load-control:oracle`."""

    experiment: str
    setup: str  # in SETUPS
    system: str
    rate: float  # in the setup's unit
    slo_factor: float  # SLO over what a request takes alone
    seed: int


class Sweep(NamedTuple):
    """All combinations of these."""

    setup: str
    systems: Sequence[str]
    rates: Sequence[float]
    slo_factors: Sequence[float] = (5.0,)
    seeds: Sequence[int] = (0,)

    def points(self, experiment: str) -> Iterator[Point]:
        for seed in self.seeds:
            for rate in self.rates:
                for factor in self.slo_factors:
                    for system in self.systems:
                        yield Point(experiment, self.setup, system, rate, factor, seed)


class Experiment(NamedTuple):
    """A table of the results."""

    name: str
    title: str
    text: str  # under the title, Markdown
    sweeps: Sequence[Sweep]

    def points(self) -> list[Point]:
        return [point for sweep in self.sweeps for point in sweep.points(self.name)]


_GH200_SLO = 10.0 / 1.045  # 10 s, over the published time alone
_FIVE = range(5)
_BUILT_IN = ("builtin-eos", "builtin-same-work")
_LENGTHS = ("2-shot", "8-shot", "out-64", "out-256", "out-1024")
_BUILT_IN_RATES = (0.7, 0.85, 1.0, 1.15)
EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "rates",
        "Over the rate of arrivals",
        "SLO five times what a request takes alone. Figure 10 of the paper, upper half.",
        (
            Sweep("llada-gsm8k", (*COMPARED, "fixed-0.5"), (1.5, 1.625, 1.6874, 1.75, 1.875)),
            Sweep("llada-gsm8k", (*COMPARED, "fixed-0.5"), (1.6874, 1.875), seeds=_FIVE[1:]),
            *(Sweep(name, (*COMPARED, *VARIANTS, "fixed-0.5"), _BUILT_IN_RATES, seeds=_FIVE) for name in _BUILT_IN),
            Sweep("llada-mmlu", COMPARED, (1.25, 1.375, 1.5)),
            Sweep("llada-mbpp", COMPARED, (2.25, 2.5, 2.75)),
            *(Sweep(name, COMPARED, (1.1, 1.25)) for name in ("dream-gsm8k", "dream-mmlu", "dream-mbpp")),
        ),
    ),
    Experiment(
        "slos",
        "Over the SLO",
        "The SLO as a multiple of what a request takes alone, at a rate that all systems can serve. Figure 10 of the\n"
        "paper, lower half, whose points were not published; the paper says of 3 and more: up to +33.9 points over\n"
        "INFaaS and +42.3 over Llumnix, with 0.1 points less accuracy.",
        (
            Sweep("llada-gsm8k", COMPARED, (1.5,), (4.0, 3.0, 2.0), seeds=_FIVE),
            *(Sweep(name, (*COMPARED, *VARIANTS), (0.5,), (4.0, 3.0, 2.0), seeds=_FIVE) for name in _BUILT_IN),
            Sweep("llada-mmlu", COMPARED, (1.125,), (3.0,)),
            Sweep("llada-mbpp", COMPARED, (2.0,), (3.0,)),
            *(Sweep(name, COMPARED, (0.8,), (3.0,)) for name in ("dream-gsm8k", "dream-mmlu", "dream-mbpp")),
        ),
    ),
    Experiment(
        "ablations",
        "Threshold control, part by part",
        "Figure 11 of the paper. `no-load-control` has deadline control alone, `no-deadline-control` load control\n"
        "alone, `infaas` the fixed threshold. `one-shot` hears the mean request's steps once, `oracle` the truth.\n"
        "Without caching every step is a recompute step, which no rate of this table leaves time for.",
        (
            Sweep("gh200", ABLATIONS, (2.0, 2.125, 2.25), (_GH200_SLO,)),
            Sweep("gh200", ONE_PART_LESS, (2.125,), (_GH200_SLO,)),
            *(Sweep(name, (*ABLATIONS, *ONE_PART_LESS[:3]), (1.0,), seeds=_FIVE[:3]) for name in _BUILT_IN),
        ),
    ),
    Experiment(
        "forecasts",
        "What forecasts are worth",
        "Deadline control alone, with forecasts of three kinds. Figure 6 of the paper: `oracle` says the truth,\n"
        "`blurred` stands for its trained predictor (mean error 19 %), `first` for its one estimate;\n"
        "`trees` is our predictor.",
        (
            Sweep(
                "gh200-all",
                ("no-load-control:oracle", "no-load-control:blurred", "no-load-control:first"),
                (1.75,),
                (5.0, 2.0),
            ),
            Sweep(
                "builtin-eos",
                ("no-load-control:oracle", "no-load-control:trees", "no-load-control:first"),
                (1.0,),
                (5.0, 2.0),
                seeds=_FIVE[:3],
            ),
        ),
    ),
    Experiment(
        "lengths",
        "Input and output length",
        "GSM8K with fewer and more examples, and shorter and longer answers, at 1.1 times C. Figure 13 of the paper,\n"
        "whose points were not published; the paper says: up to +81.0 points over the fixed threshold by input length\n"
        "and +82.3 by output length, with at most 1.0 points less accuracy. Steps are GSM8K's, in proportion to the\n"
        "output.",
        tuple(Sweep(name, ("tedi", "paper", "infaas"), (1.1,)) for name in _LENGTHS),
    ),
    Experiment(
        "migration",
        "Moving requests",
        "Requests move at block ends, where the canvas is recomputed anyway. Published, without a cache, where every\n"
        "step would do: mean latency 2 to 9 % lower than without, 99th percentile 7 to 19 %.",
        (
            Sweep("llada-gsm8k", ("tedi", "no-migration", "llumnix", "infaas"), (1.375,)),
            Sweep("builtin-eos", ("tedi", "no-migration", "llumnix", "infaas"), (0.85,), seeds=_FIVE[:3]),
        ),
    ),
)
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
