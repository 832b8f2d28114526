"""Settings of the scheduler. Table `[scheduler]`."""

from typing import Literal

import msgspec

_POSITIVE = (
    "instance_silent_s",
    "gateway_silent_s",
    "adoption_grace_s",
    "max_attempts",
    "ageing_s",
    "retry_s",
    "assign_limit_s",
    "move_every_s",
    "max_moves",
    "load_silent_s",
)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[scheduler]`."""

    profile: str = "profiles/tiny-cpu"  # folder of the profile that is served
    metrics_port: int = 0  # Prometheus metrics there; 0: nowhere
    instance_silent_s: float = 3.0  # without a sign of life, what an instance holds is placed anew
    gateway_silent_s: float = 10.0  # without a sign of life, a gateway's requests are cancelled
    adoption_grace_s: float = 1.5  # for instances to say what they hold, before a fresh scheduler places anything
    max_attempts: int = 3  # a request lost that often with its instance fails
    ageing_s: float = 10.0  # so long a wait is worth one level of priority
    max_overtakes: int = 16  # a request that does not fit is overtaken that often, then an instance is kept for it
    retry_s: float = 0.1  # pause before an instance that had no room after all is tried again
    assign_limit_s: float = 0.25  # for the answer to an assignment, before it is repeated
    expiry_margin_s: float = 1.0  # after a request's time limit, for its gateway to end it first
    fill_share: float = 0.6  # of an SLO: an instance takes no more requests than take so long together; 0: any number
    admission: Literal["best_effort", "reject"] = "best_effort"  # of requests that cannot meet their deadline
    move_gain_share: float = 0.2  # a request moves only where its steps take that share less time; 1: nowhere
    move_every_s: float = 0.1  # between two looks for requests that should move
    max_moves: int = 2  # that an instance is about to release at once, and as many that are to come; drains excepted
    load_silent_s: float = 3.0  # a load state that is older says nothing

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")
        for name in ("max_overtakes", "expiry_margin_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative")
        if not 0 <= self.move_gain_share <= 1:
            raise ValueError(f"move_gain_share: {self.move_gain_share} is not between 0 and 1")
        if not 0 <= self.fill_share < 1:
            raise ValueError(f"fill_share: {self.fill_share} is not a share, from 0 to below 1")
        if not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics_port: {self.metrics_port} is no port")
