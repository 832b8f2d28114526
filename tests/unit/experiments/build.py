"""Rows of experiments, as tests need them."""

from tools.experiments.cells import Cell


def cell(system: str = "infaas", rate: float = 1.875, seed: int = 0, **changes: object) -> Cell:
    fields: dict[str, object] = {
        "setup": "llada-gsm8k",
        "system": system,
        "rate": rate,
        "rate_rps": 8 * rate,
        "slo_factor": 5.0,
        "slo_s": 9.5,
        "seed": seed,
        "requests": 660,
        "attainment": 0.4,
        "accuracy": 0.78,
        "accuracy_of_met": 0.75,
        "latency_mean_s": 7.0,
        "latency_p95_s": 9.0,
        "latency_p99_s": 10.0,
        "threshold_mean": 0.9,
        "steps_mean": 86.0,
        "moves_mean": 0.0,
        "code": "now",
    }
    return Cell(**(fields | changes))  # type: ignore[arg-type]
