"""Settings of the workload-monitor. Table `[workload_monitor]`."""

import msgspec

_POSITIVE = ("window_s", "half_life_s", "buckets", "bin_tokens", "max_classes", "snapshot_every_s")


class WorkloadMonitorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[workload_monitor]`."""

    profile: str = "profiles/tiny-cpu"  # folder; requests for its model are counted
    metrics_port: int = 0  # Prometheus metrics there; 0: nowhere
    window_s: float = 300.0  # older requests are forgotten
    half_life_s: float = 60.0  # a request so old counts half
    buckets: int = 60  # of the window: requests of one bucket count as of the same age
    bin_tokens: int = 256  # prompts, and outputs, whose lengths fall into one bin are of one class
    max_classes: int = 16  # one more: its requests are counted with the class that is nearest
    snapshot_every_s: float = 5.0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")
        if not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics_port: {self.metrics_port} is no port")

    @property
    def bucket_s(self) -> float:
        return self.window_s / self.buckets
