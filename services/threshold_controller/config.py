"""Settings of the threshold-controller. Table `[threshold_controller]`."""

from typing import Literal

import msgspec

_POSITIVE = ("repeat_s", "instance_silent_s")
_NOT_NEGATIVE = ("margin_s", "load_every_s", "settle_s")

PolicyName = Literal["tedi", "paper"]
Plan = Literal["flat", "low_first", "high_first"]


class ThresholdControllerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[threshold_controller]`."""

    profile: str = "profiles/tiny-cpu"  # folder of the profile that is served
    metrics_port: int = 0  # Prometheus metrics there; 0: nowhere
    policy: PolicyName = "tedi"  # or "paper": the TeDiServe paper's rules; they know no opening, so use a plain profile
    plan: Plan = "flat"  # in which order a request's rest runs at low and at high thresholds; "paper" knows only flat
    risk: float = 0.5  # steps planned for: 0 the forecast's mean, 1 its upper bound; "paper" takes the mean
    margin_s: float = 0.02  # of the time to the deadline, kept for the way back to the client
    ahead_share: float = 0.25  # of the SLO: thresholds aim at an end so much ahead, twice with openings; "paper": 0
    rise_margin: float = 0.2  # share of time or capacity that a rise must leave free, or thresholds flap; "paper": 0
    deadline_control: bool = True  # false: every request runs at its cap
    load_control: bool = True  # false: every cap is the profile's threshold
    load_every_s: float = 0.05  # load control runs at most so often
    repeat_s: float = 1.0  # thresholds and load state are said at least so often
    instance_silent_s: float = 3.0  # without a sign of life, an instance is no capacity any more
    settle_s: float = 0.3  # for instances to say what they hold, before a fresh controller decides

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative")
        if not 0 <= self.risk <= 1:
            raise ValueError(f"risk: {self.risk} is not between 0 (the mean) and 1 (the upper bound)")
        if not 0 <= self.ahead_share < 1:
            raise ValueError(f"ahead_share: {self.ahead_share} is not a share, from 0 to below 1")
        if not 0 <= self.rise_margin < 1:
            raise ValueError(f"rise_margin: {self.rise_margin} is not a share, from 0 to below 1")
        if not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics_port: {self.metrics_port} is no port")
        if self.policy == "paper" and self.plan != "flat":
            raise ValueError(f'plan: "{self.plan}" is no rule of policy "paper", which knows "flat" alone')
