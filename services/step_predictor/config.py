"""Settings of the step-predictor. Table `[step_predictor]`."""

import msgspec

# In the profile's folder: what a predictor consists of.
MODEL_FILE = "step_predictor.onnx"
CARD_FILE = "step_predictor.json"


class StepPredictorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[step_predictor]`."""

    profile: str = "profiles/tiny-cpu"  # folder of the profile that is served; its step_predictor.onnx is used
    metrics_port: int = 0  # Prometheus metrics there; 0: nowhere
    refresh_tokens: int = 0  # a forecast is renewed once so many more tokens are committed; 0: as measured (g)
    upper_level: float = 0.9  # share of requests that must need no more than the upper bound says
    forget_after_s: float = 60.0  # without a report, a request is forgotten
    max_requests: int = 65_536  # known at once; beyond, the one that was silent longest is forgotten

    def __post_init__(self) -> None:
        if self.refresh_tokens < 0:
            raise ValueError(f"refresh_tokens: {self.refresh_tokens} is negative")
        if not 0.5 <= self.upper_level < 1.0:
            raise ValueError(f"upper_level: {self.upper_level} is not between 0.5 and 1")
        for name in ("forget_after_s", "max_requests"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")
        if not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics_port: {self.metrics_port} is no port")
