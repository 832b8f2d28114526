"""What is served on what: the workloads of the experiments, and which of them count.

1. What is measured counts: GSM8K on LLaDA, whose steps the paper's authors counted, and the built-in tasks, recorded by
   us. Of the others no steps are known; they have GSM8K's, so many times over that a request alone takes the published
   time. They are shown and labelled, and count for nothing.
2. An SLO is a multiple of what a request takes alone: as published, or else as simulated.
3. Rates are requests a second and instance, as published, or multiples of C: of what instances end at the profile's
   threshold while more comes than they can do, placed as by `infaas`.
4. Published profiles know nothing of what a step took beside the model. On H100 two numbers stand for that, the same
   for all systems, known to all policies, and fitted to two published figures of GSM8K on LLaDA: a request alone takes
   the published latency, and INFaaS keeps up with about the rate it did (5.4 ms a pass, 2.4 ms a step).
5. Openings and quality floors are of this repository, not of the paper: on the built-in tasks the paper's system and
   the baselines run on a profile without, ours on the one that is served. `no-opening` is `tedi` on theirs; `flex` is
   `tedi` with requests of the tier without a floor, so that thresholds without an opening are their last resort. SLO
   and C are of the profile without.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from tools.experiments import recordings
from tools.experiments.recordings import ROOT
from tools.simulate.run import Job, alone_s, make_setting, read_behaviour, read_profile, simulate
from tools.simulate.systems import work_of
from tools.simulate.workload import Phase

_EXTRA_PASS_MS, _EXTRA_STEP_MS = 5.4, 2.4  # rule 4
_NO_SLO_S = 1e6
_FEW_SHOT = (900, 1100)  # tokens of a prompt: estimated, lengths were not published


class Setup(NamedTuple):
    """A model, a workload and a cluster."""

    title: str
    about: str
    profile: str
    workload: Literal["gsm8k", "eos", "ignore-eos"]  # the latter two: recordings of the built-in tasks
    instances: int
    requests: int
    is_measured: bool = True  # rule 1
    base_s: float | None = None  # of a request alone, published; None: as simulated
    rate_unit: Literal["a GPU", "x C"] = "a GPU"
    extra_pass_ms: float = 0.0
    extra_step_ms: float = 0.0
    prompt_tokens: tuple[int, int] | None = None
    output_tokens: int | None = None
    thresholds: tuple[float, ...] | None = None
    plain: str = ""  # profile of those that know no opening and no floor (rule 5); "": there is neither

    @property
    def is_recorded(self) -> bool:
        return self.workload != "gsm8k"


_HALF = "8 H100 and half the requests, instead of 16, one instance each"
_SMALLER = "2 H100 and an eighth of the requests, instead of 16"
_SMALL = "4 H100 and a quarter of the requests, instead of 16"
_H100 = "profiles/llada-8b-h100"
_GH200 = "profiles/llada-8b-gh200"
_DREAM = "profiles/dream-7b-h100"
_TINY, _TINY_PLAIN = recordings.PROFILES
_OURS = (
    "tedi",
    "no-load",
    "no-deadline",
    "no-migration",
    "no-caching",
    "one-shot",
    "oracle",
    "flex",
)  # how names begin
NO_OPENING, FLEX = VARIANTS = "no-opening", "flex"


def _llada(title: str, about: str) -> Setup:
    """On H100."""
    setup = Setup(title, about, _H100, "gsm8k", instances=8, requests=660)
    setup = setup._replace(extra_pass_ms=_EXTRA_PASS_MS, extra_step_ms=_EXTRA_STEP_MS)
    return setup._replace(prompt_tokens=_FEW_SHOT, output_tokens=256)


def _made_up(title: str, base_s: float, prompt_tokens: tuple[int, int]) -> Setup:
    about = (
        "Steps are made up, and prompts of such lengths that INFaaS keeps up with about the published rate; " + _SMALLER
    )
    setup = _llada(title, about)._replace(is_measured=False, instances=2, requests=165)
    return setup._replace(base_s=base_s, prompt_tokens=prompt_tokens)


def _dream(title: str, base_s: float, prompt_tokens: tuple[int, int]) -> Setup:
    about = "Steps and lengths are made up, the profile was measured without CUDA graphs; " + _SMALLER
    setup = Setup(
        title, about, _DREAM, "gsm8k", is_measured=False, instances=2, requests=165, base_s=base_s, rate_unit="x C"
    )
    return setup._replace(prompt_tokens=prompt_tokens, output_tokens=256, extra_step_ms=_EXTRA_STEP_MS)


def _long(title: str, prompt_tokens: tuple[int, int], output_tokens: int, requests: int = 330) -> Setup:
    setup = _llada(title, _SMALL)._replace(instances=4, requests=requests, rate_unit="x C")
    return setup._replace(prompt_tokens=prompt_tokens, output_tokens=output_tokens)


_GH200_SETUP = Setup(
    "GSM8K, LLaDA-8B on GH200",
    "2 GH200 and half the requests, instead of 4, one instance each; thresholds 0.7 to 0.9. The published profile is "
    "of before all passes had CUDA graphs: a request alone takes 2.3 s here and took 1.05 s there, but both serve "
    "about 1.9 requests/s a GPU at 0.9",
    _GH200,
    "gsm8k",
    instances=2,
    requests=660,
    prompt_tokens=_FEW_SHOT,
    output_tokens=256,
    thresholds=(0.7, 0.8, 0.9),
)
_TINY_SETUP = Setup(
    "",
    "2 instances of the built-in model on CPU cores",
    _TINY,
    "eos",
    instances=2,
    requests=400,
    rate_unit="x C",
    plain=_TINY_PLAIN,
)
SETUPS: dict[str, Setup] = {
    "llada-gsm8k": _llada("GSM8K, LLaDA-8B", _HALF + "; published steps, run to the end of 256 tokens")._replace(
        base_s=1.9
    ),
    "builtin-eos": _TINY_SETUP._replace(title="Built-in tasks, to EOS", requests=1000),
    "builtin-same-work": _TINY_SETUP._replace(
        title="Built-in tasks, the same work for all (ignore_eos)", workload="ignore-eos", requests=400
    ),
    "llada-mmlu": _made_up("MMLU-Pro, LLaDA-8B", 2.4, (800, 1000)),
    "llada-mbpp": _made_up("MBPP, LLaDA-8B", 1.482, (350, 550)),
    "dream-gsm8k": _dream("GSM8K, Dream-7B", 1.6, _FEW_SHOT),
    "dream-mmlu": _dream("MMLU-Pro, Dream-7B", 2.3, (800, 1000)),
    "dream-mbpp": _dream("MBPP, Dream-7B", 2.0, (400, 600)),
    "gh200": _GH200_SETUP._replace(base_s=1.045),  # so that the SLO is the published 10 s
    "gh200-all": _GH200_SETUP._replace(thresholds=None),
    "2-shot": _long("2 examples, 256 tokens out", (400, 500), 256),
    "8-shot": _long("8 examples, 256 tokens out", (1400, 1600), 256),
    "out-64": _long("5 examples, 64 tokens out", _FEW_SHOT, 64),
    "out-256": _long("5 examples, 256 tokens out", _FEW_SHOT, 256),
    "out-1024": _long("5 examples, 1,024 tokens out", _FEW_SHOT, 1024, 165),
}


def job_of(setup: Setup, system: str) -> Job:
    """Without arrivals and SLO; with rule 1's steps."""
    profile = setup.profile if system.startswith(_OURS) else setup.plain or setup.profile
    return Job(
        profile=ROOT / profile,
        system="tedi" if system in VARIANTS else system,
        tier="flex" if system == FLEX else "default",
        workload="gsm8k" if setup.workload == "gsm8k" else str(recordings.folder_of(setup.workload, profile)),
        phases=(),
        tp_degrees=(1,) * setup.instances,
        most_requests=setup.requests,
        output_tokens=setup.output_tokens,
        prompt_tokens=setup.prompt_tokens,
        steps_scale=steps_scale(setup),
        thresholds=setup.thresholds,
        step_overhead_s=0.0 if setup.workload == "gsm8k" else 0.0005,
        extra_pass_ms=setup.extra_pass_ms,
        extra_step_ms=setup.extra_step_ms,
    )


@lru_cache
def base_s(setup: Setup) -> float:
    """Seconds of a request alone (rule 2). Raises ConfigError where a recording is missing, as the next two do."""
    return setup.base_s or _look(setup, 1.0).alone_s


@lru_cache
def steps_scale(setup: Setup) -> float:
    """Rule 1."""
    if setup.is_measured:
        return 1.0
    assert setup.base_s is not None, "what is made up goes by the published time"
    once, twice = _look(setup, 1.0).alone_s, _look(setup, 2.0).alone_s
    return 1.0 + (setup.base_s - once) / (twice - once)  # a request's time is linear in its steps


@lru_cache
def capacity(setup: Setup) -> float:
    """C, of an instance (rule 3): what ends in the second half of the time of arrivals."""
    rate = 1.5 * setup.instances * _look(setup, steps_scale(setup)).expected_capacity
    job = job_of(setup, "infaas")._replace(phases=(Phase(rate, setup.requests / rate),), slo_s=_NO_SLO_S)
    outcomes = simulate(job).outcomes
    until = outcomes[-1].arrived_at
    begin = (outcomes[0].arrived_at + until) / 2
    ended = sum(begin <= one.arrived_at + one.latency_s < until for one in outcomes)
    return ended / (until - begin) / setup.instances


class _Look(NamedTuple):
    alone_s: float  # a mean request
    expected_capacity: float  # of an instance, by the prices that the policies go by


def _look(setup: Setup, scale: float) -> _Look:
    job = job_of(setup._replace(is_measured=True), "infaas")._replace(slo_s=1.0, steps_scale=scale)
    profile, latency = read_profile(job, None)
    behaviour = read_behaviour(job, profile)
    setting = make_setting(job, profile, latency, behaviour)
    mean = behaviour.mean(profile.decoding.threshold)
    return _Look(alone_s(setting, behaviour), 1 / work_of(setting, behaviour, mean.steps, mean.blocks))
