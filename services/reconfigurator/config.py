"""Settings of the reconfigurator. Table `[reconfigurator]`, and `[reconfigurator.planning]` for how it plans."""

import msgspec

from services.reconfigurator.problem import Planning

_POSITIVE = ("period_s", "launch_limit_s", "node_silent_s", "snapshot_limit_s", "retry_pause_s", "soon_s")


class ReconfiguratorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[reconfigurator]`."""

    enabled: bool = False  # `make up` starts it, and agents that follow its plan
    profile: str = "profiles/tiny-cpu"  # folder of the profile that is served
    metrics_port: int = 0  # Prometheus metrics there; 0: nowhere
    period_s: float = 300.0  # from plan to plan
    soon_s: float = 5.0  # until a plan is made after a node has come or gone
    stay_periods: int = 6  # that a layout runs, at least, before it is left for lower latency alone
    min_covered_s: float = 60.0  # of the workload, before anything is planned from it
    snapshot_limit_s: float = 60.0  # older snapshots are not planned from: the workload-monitor is dead
    launch_limit_s: float = 600.0  # from the stop of what is in its way until an instance runs
    node_silent_s: float = 10.0  # a node whose agent has said nothing for so long is gone
    retry_pause_s: float = 600.0  # after a launch that failed; doubles with each further one, up to a day
    planning: Planning = Planning()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")
        if not self.stay_periods >= 0:
            raise ValueError(f"stay_periods: {self.stay_periods} is negative")
        if not self.min_covered_s >= 0:
            raise ValueError(f"min_covered_s: {self.min_covered_s} is negative")
        if not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics_port: {self.metrics_port} is no port")
