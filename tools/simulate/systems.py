"""The systems that are compared: by name, who decides in them.

The live policies, their ablations, and the baselines (baselines.py). The ablations differ from `tedi` in what their
name says, and in nothing else.
"""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from contracts.messages import CacheMode
from services.costs import Resident
from services.profile import Profile
from services.scheduler.config import SchedulerConfig
from services.scheduler.policy import Scheduler
from services.settings import ConfigError
from services.step_predictor.config import StepPredictorConfig
from services.step_predictor.model import StepModel
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.policy import ThresholdController
from services.threshold_controller.prices import Fleet, Supply, shared_prices
from tools.simulate.baselines import Fixed, LeastLoaded, Proteus, Variant
from tools.simulate.cluster import Policies, Setting
from tools.simulate.denoising import Behaviour
from tools.simulate.forecasts import Blur, CourseOf, First, Forecaster, ForecastKind, Oracle, Remembered, Trees

_EPOCH = 1
_STAY = {"move_gain_share": 1.0}


class Scene(NamedTuple):
    """What a system is made for."""

    setting: Setting
    behaviour: Behaviour
    forecasts: ForecastKind  # where the system has no kind of its own
    forecast_error: float  # of the blurred ones
    scheduler: SchedulerConfig = SchedulerConfig()
    controller: ThresholdControllerConfig = ThresholdControllerConfig()


Maker: TypeAlias = Callable[[Scene], Policies]


class System(NamedTuple):
    """One of those that are compared."""

    name: str
    about: str
    make: Maker
    cache: CacheMode | None = None  # that it needs; None: the profile's
    follows: bool = True  # it knows that instances come and go


# --- the live policies --------------------------------------------------------------------------------------------


def _live(
    scene: Scene,
    *,
    forecasts: ForecastKind | None = None,
    scheduler: dict[str, float] | None = None,
    controller: dict[str, object] | None = None,
) -> Policies:
    setting = scene.setting
    settings = replace(scene.controller, **(controller or {}))
    kind = forecasts or scene.forecasts
    forecaster, refresh_tokens = forecaster_of(kind, scene)
    return Policies(
        scheduler=Scheduler(
            replace(scene.scheduler, **(scheduler or {})), setting.profile, setting.latency, epoch=_EPOCH
        ),
        thresholds=ThresholdController(settings, setting.profile, setting.latency),
        forecaster=forecaster,
        refresh_tokens=refresh_tokens,
    )


def _fixed(threshold: float, scene: Scene) -> Policies:
    """The live scheduler alone, so that requests keep the threshold that they begin with."""
    setting = scene.setting
    profile = at_threshold(setting.profile, threshold)
    return Policies(Scheduler(scene.scheduler, profile, setting.latency, epoch=_EPOCH))


def at_threshold(profile: Profile, threshold: float) -> Profile:
    """With requests that begin there."""
    return replace(profile, decoding=replace(profile.decoding, threshold=threshold))


_REFRESH_TOKENS = 8  # of forecasts that no trained model makes: as the paper has it


def forecaster_of(kind: ForecastKind, scene: Scene) -> tuple[Callable[[CourseOf], Forecaster] | None, int]:
    """And how many tokens make a new forecast due. Raises ConfigError where the profile has no predictor."""
    thresholds = scene.setting.profile.decoding.thresholds
    if kind == "none":
        return None, 1
    if kind in ("trees", "remembered"):
        model = StepModel.of(scene.setting.profile)
        trees: Forecaster = Trees(model, thresholds, StepPredictorConfig().upper_level)
        made = Remembered(trees) if kind == "remembered" else trees
        return lambda course_of: made, model.card.refresh_tokens
    if kind == "first":
        return lambda course_of: First(scene.behaviour, thresholds), _REFRESH_TOKENS
    blur = None
    if kind == "blurred":
        blur = Blur(scene.forecast_error, Random(f"{scene.setting.seed}/forecasts"))
    return lambda course_of: Oracle(course_of, thresholds, blur), _REFRESH_TOKENS


# --- the baselines ------------------------------------------------------------------------------------------------


def _least_loaded(scene: Scene, *, binds: bool, drop_late: bool = False) -> Policies:
    """INFaaS, and Llumnix, which does not bind but moves."""
    fixed = Fixed(scene.setting.profile.decoding.threshold)
    return Policies(LeastLoaded(fixed, binds=binds, migrate=not binds, drop_late=drop_late))


def _proteus(scene: Scene) -> Policies:
    mixture = Proteus(variants(scene), len(scene.setting.tp_degrees))
    return Policies(LeastLoaded(mixture, binds=True, migrate=False))


def variants(scene: Scene) -> list[Variant]:
    """Each threshold with its accuracy (where nobody knows: the threshold itself) and the work of a mean request."""
    behaviour, decoding = scene.behaviour, scene.setting.profile.decoding
    found = []
    for threshold in decoding.thresholds:
        mean, accuracy = behaviour.mean(threshold), behaviour.accuracy(threshold)
        work_s = work_of(scene.setting, behaviour, mean.steps, mean.blocks)
        found.append(Variant(threshold, threshold if accuracy is None else accuracy, work_s))
    return found


def mean_lengths(behaviour: Behaviour, block_size: int) -> tuple[float, float]:
    """Tokens of prompts and of outputs, these in whole blocks."""
    prompts = range(behaviour.num_prompts)
    prompt_tokens = sum(behaviour.prompt_tokens(prompt) for prompt in prompts)
    output_tokens = sum(-(-behaviour.max_tokens(prompt) // block_size) * block_size for prompt in prompts)
    return prompt_tokens / len(prompts), output_tokens / len(prompts)


def work_of(setting: Setting, behaviour: Behaviour, steps: float, blocks: float) -> float:
    """Instance-seconds of a request of mean prompt, that takes so many steps, on instances full of such requests."""
    decoding, engine = setting.profile.decoding, setting.profile.engine
    prompt_tokens, output_tokens = mean_lengths(behaviour, decoding.block_size)
    canvas = int(prompt_tokens) + int(output_tokens)
    left = int(output_tokens) - int((blocks - 1) / 2) * decoding.block_size  # halfway
    resident = Resident(canvas, decoding.block_size, decoding.cache, left, decoding.blocks_ahead)
    fleet = Fleet(Supply(degree, engine.max_requests, setting.kv_tokens, 1.0) for degree in setting.tp_degrees)
    ends = decoding.mean_steps[0], decoding.mean_steps[-1]
    prices = shared_prices(setting.latency, fleet, resident, ends, "tedi")
    recomputes = steps if decoding.cache == "none" else blocks
    return recomputes * prices.recompute + (steps - recomputes) * prices.cache


# --- by name ------------------------------------------------------------------------------------------------------

_SYSTEMS = (
    System("tedi", "the live policies as they are configured", _live),
    System("paper", "the threshold-controller's rules of the paper", partial(_live, controller={"policy": "paper"})),
    System(
        "infaas",
        "least-loaded by tokens on arrival; the profile's threshold for all",
        partial(_least_loaded, binds=True),
        follows=False,
    ),
    System(
        "llumnix",
        "one queue, moves at block ends; the profile's threshold for all",
        partial(_least_loaded, binds=False),
        follows=False,
    ),
    System(
        "proteus",
        "a mixture of thresholds for the rate of arrivals, kept by each request; else as infaas",
        _proteus,
        follows=False,
    ),
    System(
        "infaas-drop",
        "infaas; who waits past its deadline is dropped",
        partial(_least_loaded, binds=True, drop_late=True),
        follows=False,
    ),
    System(
        "llumnix-drop",
        "llumnix; who waits past its deadline is dropped",
        partial(_least_loaded, binds=False, drop_late=True),
        follows=False,
    ),
    System("no-load-control", "no caps", partial(_live, controller={"load_control": False})),
    System(
        "no-deadline-control", "each request runs at its cap", partial(_live, controller={"deadline_control": False})
    ),
    System("one-shot", "forecasts say the mean request, once", partial(_live, forecasts="first")),
    System("oracle", "forecasts say the truth", partial(_live, forecasts="oracle")),
    System("no-migration", "requests stay where they begin", partial(_live, scheduler=_STAY)),
    System("no-caching", "every step is a recompute step", _live, cache="none"),
)
NAMES: Sequence[str] = tuple(system.name for system in _SYSTEMS)


def system(name: str) -> System:
    """By its name, or `fixed-0.7` for a threshold that all keep. Raises ConfigError."""
    for one in _SYSTEMS:
        if one.name == name:
            return one
    if name.startswith("fixed-"):
        try:
            threshold = float(name.removeprefix("fixed-"))
        except ValueError:
            threshold = -1.0
        if 0.0 <= threshold <= 1.0:
            return System(name, f"the live scheduler; all requests at {threshold:g}", partial(_fixed, threshold))
    raise ConfigError(f"there is no system {name!r}; there are {', '.join(NAMES)}, and fixed-0.7 for any threshold")


def about() -> str:
    """The systems, one a line."""
    lines = [f"  {one.name:20} {one.about}" for one in _SYSTEMS]
    return "\n".join([*lines, f"  {'fixed-0.7':20} the live scheduler; all requests at this threshold"])
