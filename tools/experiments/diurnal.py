"""The paper's two-hour trace, whose load follows a day, with a layout that follows the load; and what layouts the
planner makes of the same day at other rates.

Published are the arrivals of each minute, the attainment of each three minutes, and the SLO of 12.5 s, on 16 GH200.
Neither the lengths of the requests nor the latency curves of that run are. So:
0. Half of that cluster is simulated, two nodes of four GPUs, under half the arrivals: it takes half as long.
1. Lengths are made up: log-normal, with the means that vLLM's authors published for ShareGPT (161 tokens of prompt, 338
   of output), outputs of at most 1,024 tokens. Steps a block are those that were counted on GSM8K.
2. Latencies at TP-1 are those that were published for H100. One number stands for all that is not known:
   `EXTRA_STEP_MS`, what each step costs in its pass, the same for all systems and known to all policies. It is fitted
   to one thing: INFaaS keeps up until about 15 requests/s on 16 GPUs, as published. What is to be seen is whether the
   other systems then do what was published of them.
3. At TP-2 and TP-4 all takes the share of that time which the authors measured with CUDA graphs and a cache
   (`TP_EFFECT`). By the H100 curves, which are of before that, higher degrees make cache steps no faster.
4. A launch takes `LAUNCH_S`: the published change of eight launches, one after the other, took 2.5 to 3 minutes.
5. The published baselines dropped who waited past the deadline; `infaas-drop` and `llumnix-drop` do.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

import msgspec

from services.profile import load_profile
from services.reconfigurator.config import ReconfiguratorConfig
from services.reconfigurator.plan import Layout
from services.settings import ConfigError
from tools.simulate.denoising import Lengths
from tools.simulate.fleet import Change, Decision, FleetSetting
from tools.simulate.results import Outcome, percentile
from tools.simulate.run import Job, Result, simulate
from tools.simulate.workload import Phase

PUBLISHED = Path(__file__).parent / "published_diurnal.json"
PROFILE = Path("profiles/llada-8b-h100")
SLO_S = 12.5
EXTRA_STEP_MS = 7.0
TP_EFFECT = ((2, 0.8548), (4, 0.6994))  # rule 3: github.com/tauChang/TeDiServe, plot/tp_effect/plot.py@4b80d786
SCALE = 0.5  # rule 0
NODES, DEVICES = 2, 4
LAUNCH_S = 20.0  # rule 4
LOW_MINUTES = 45  # the paper's low-load period
_PROMPTS, _OUTPUTS = (161.0, 1.6), (338.0, 0.7)  # mean, and sigma of a log-normal distribution; tokens
_NUM_LENGTHS = 2048
_FIRST_S = 1.0  # that the simulator waits before the first arrival


class Variant(NamedTuple):
    """A system, on a layout that follows the load or stays at TP-1 everywhere."""

    system: str
    reconfigures: bool = False

    @property
    def name(self) -> str:
        return f"{self.system}+layouts" if self.reconfigures else self.system


VARIANTS = (
    Variant("tedi", True),
    Variant("paper", True),
    Variant("tedi"),
    Variant("infaas-drop"),
    Variant("llumnix-drop"),
    Variant("infaas"),
    Variant("llumnix"),
    Variant("proteus"),
)


MAIN = tuple(one for one in VARIANTS if one.system not in ("infaas", "llumnix"))  # as the authors ran them, and ours


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """`published_diurnal.json`."""

    source: str
    arrivals_rps: list[float]  # of each minute
    bin_minutes: int
    attainment_percent: dict[str, list[float]]  # by system, of each bin
    threshold_mean: list[float]  # TeDiServe's, of each bin
    layouts: list[tuple[float, Layout]]  # from that minute on
    peaks_source: str
    window_minutes: int
    arrivals_rps_at_peak_10: list[float]  # of each window
    peaks: dict[int, list[Layout]]  # by peak rate, of each window

    def attainment(self, system: str, first: int, last: int) -> float:
        """In minutes `first` to `last`, weighed by arrivals."""
        found = weight = 0.0
        for number, percent in enumerate(self.attainment_percent[system]):
            for minute in range(number * self.bin_minutes, (number + 1) * self.bin_minutes):
                if first <= minute < min(last, len(self.arrivals_rps)):
                    found += self.arrivals_rps[minute] * percent / 100
                    weight += self.arrivals_rps[minute]
        return found / weight


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """Some minutes of a run, by arrival. Latency, threshold and accuracy are of the finished."""

    requests: int
    finished: int
    attainment: float
    latency_mean_s: float | None
    latency_p95_s: float | None
    threshold_mean: float | None
    accuracy: float | None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    variant: str
    minutes: int  # of the trace, from its beginning
    seed: int
    periods: dict[str, Period]  # all, low, high
    bins: list[Period]
    changes: list[Change]  # of the layout
    decisions: list[Decision]
    code: str  # digest of the code that it is of


class Errand(NamedTuple):
    """A run that is wanted."""

    variant: Variant
    minutes: int
    seed: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.variant.name, self.minutes, self.seed


def read_published() -> Published:
    return msgspec.json.decode(PUBLISHED.read_bytes(), type=Published, strict=False)


def made_up_lengths(seed: int = 0) -> tuple[Lengths, ...]:
    """Rule 1."""
    profile = load_profile(PROFILE)
    block_size, limits = profile.decoding.block_size, profile.limits
    rng = Random(f"{seed}/lengths")
    found: list[Lengths] = []
    while len(found) < _NUM_LENGTHS:
        prompt, output = (
            max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))
            for mean, sigma in (_PROMPTS, _OUTPUTS)
        )
        output = -(-output // block_size) * block_size
        if output <= limits.max_output_tokens and prompt + output <= limits.max_context_tokens:
            found.append(Lengths(prompt, output))
    return tuple(found)


def job_of(variant: Variant, minutes: int, seed: int) -> Job:
    fleet = None
    if variant.reconfigures:
        fleet = FleetSetting(NODES, DEVICES, launch_s=LAUNCH_S, reconfigurator=ReconfiguratorConfig())
    return Job(
        profile=PROFILE,
        system=variant.system,
        workload="gsm8k",
        phases=tuple(Phase(SCALE * rate, 60.0) for rate in read_published().arrivals_rps[:minutes]),
        tp_degrees=(1,) * (NODES * DEVICES),
        slo_s=SLO_S,
        lengths=made_up_lengths(),
        step_overhead_s=0.0,
        extra_step_ms=EXTRA_STEP_MS,
        tp_effect=TP_EFFECT,
        seed=seed,
        fleet=fleet,
    )


def run(errand: Errand, code: str) -> Run:
    """`code`: the digest that it gets. Raises ConfigError."""
    return run_of(errand, simulate(job_of(*errand)), code)


def run_of(errand: Errand, result: Result, code: str) -> Run:
    """What came of it."""
    minutes = errand.minutes
    width = read_published().bin_minutes
    periods = {"all": (0, minutes), "low": (0, min(LOW_MINUTES, minutes)), "high": (LOW_MINUTES, minutes)}
    return Run(
        variant=errand.variant.name,
        minutes=minutes,
        seed=errand.seed,
        periods={
            name: period for name, (first, last) in periods.items() if (period := _period(result.outcomes, first, last))
        },
        bins=[
            period
            for first in range(0, minutes, width)
            if (period := _period(result.outcomes, first, min(first + width, minutes)))
        ],
        changes=result.changes,
        decisions=result.decisions,
        code=code,
    )


def _period(outcomes: Iterable[Outcome], first: int, last: int) -> Period | None:
    """None: nobody came."""
    begin, end = _FIRST_S + 60.0 * first, _FIRST_S + 60.0 * last
    came = [outcome for outcome in outcomes if begin <= outcome.arrived_at < end]
    done = [outcome for outcome in came if outcome.state == "finished"]
    if not came:
        return None
    latencies = [outcome.latency_s for outcome in done]
    return Period(
        requests=len(came),
        finished=len(done),
        attainment=round(fmean(bool(outcome.met) for outcome in came), 6),
        latency_mean_s=_mean(latencies),
        latency_p95_s=percentile(latencies, 95),
        threshold_mean=_mean([o.mean_threshold for o in done if o.mean_threshold is not None]),
        accuracy=_mean([o.correctness for o in done if o.correctness is not None]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 6) if values else None


# --- the file -----------------------------------------------------------------------------------------------------


def read_runs(path: Path) -> list[Run]:
    """Raises ConfigError for a file that is none of these."""
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Run], strict=False)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds other runs than this experiment's: {error}; remove it") from None


def write_runs(path: Path, runs: Iterable[Run]) -> None:
    """A line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    order = [variant.name for variant in VARIANTS]
    lines = [
        msgspec.json.encode(one) for one in sorted(runs, key=lambda r: (order.index(r.variant), r.minutes, r.seed))
    ]
    path.write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")


def missing(path: Path, errands: Sequence[Errand], code: str, *, anew: bool = False) -> list[Errand]:
    """What the file lacks. Runs of other code, and (`anew`) those that are wanted, are taken out of it."""
    wanted = {errand.key for errand in errands} if anew else set()
    found = read_runs(path)
    still = [one for one in found if one.code == code and (one.variant, one.minutes, one.seed) not in wanted]
    if still != found:
        write_runs(path, still)
    known = {(one.variant, one.minutes, one.seed) for one in still}
    return [errand for errand in errands if errand.key not in known]


def add_run(path: Path, made: Run) -> None:
    write_runs(path, [*read_runs(path), made])
