"""python -m tools.bench.simulator: how fast the simulator is, on one core. Prints Markdown.

1. 16 instances at 2 requests/s each, with the live policies. Processor time counts, of this process alone.
2. Recorded requests of the built-in tasks, with their profile: with the trained predictor asked anew each time, and
   with what it said before remembered. And the published GSM8K requests on LLaDA-8B's latency on H100, which take ten
   times as many steps; their forecasts are made up. `infaas` has no forecasts: what it takes is the simulator's own.
3. Each is simulated for a second first, so that files are read and code is warm.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

from tools.bench.machine import describe_machine
from tools.experiments.recordings import folder_of
from tools.simulate.forecasts import ForecastKind
from tools.simulate.run import Job, simulate
from tools.simulate.workload import Phase

INSTANCES, RATE_PER_INSTANCE = 16, 2.0
BUILT_IN, LARGE = "profiles/tiny-cpu", "profiles/llada-8b-h100"


class Speed(NamedTuple):
    """Of one simulation."""

    virtual_s: float
    cpu_s: float
    request_steps: int

    @property
    def times_real(self) -> float:
        return self.virtual_s / self.cpu_s

    @property
    def step_us(self) -> float:
        return 1e6 * self.cpu_s / self.request_steps


def measure_speed(profile: str, workload: str, forecasts: ForecastKind, seconds: float, system: str = "tedi") -> Speed:
    """Raises ConfigError where profile and workload do not fit."""
    rate = INSTANCES * RATE_PER_INSTANCE
    job = Job(Path(profile), system, workload, (Phase(rate, 1.0),), (1,) * INSTANCES, forecasts=forecasts)
    simulate(job)
    began = time.process_time()
    result = simulate(job._replace(phases=(Phase(rate, seconds),)))
    return Speed(result.virtual_s, time.process_time() - began, sum(outcome.steps for outcome in result.outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.simulator", description="The simulator's speed.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals (default: %(default)g)")
    parser.add_argument(
        "--recording",
        default=str(folder_of("eos", BUILT_IN)),
        help=f"folder of requests that were recorded with {BUILT_IN} (default: the experiments')",
    )
    options = parser.parse_args()
    print(f"Hardware: {describe_machine()}. {INSTANCES} instances at {RATE_PER_INSTANCE:g} requests/s each.\n")
    print("| requests | system | forecasts | request-steps | virtual s | processor s | times real time | µs a step |")
    print("|---|---|---|---|---|---|---|---|")
    built_in = (BUILT_IN, options.recording)
    rows: list[tuple[str, tuple[str, str], str, ForecastKind]] = [
        ("recorded", built_in, "tedi", "trees"),
        ("recorded", built_in, "tedi", "remembered"),
        ("recorded", built_in, "infaas", "none"),
        ("GSM8K", (LARGE, "gsm8k"), "tedi", "blurred"),
        ("GSM8K", (LARGE, "gsm8k"), "infaas", "none"),
    ]
    for name, (profile, workload), system, forecasts in rows:
        speed = measure_speed(profile, workload, forecasts, options.seconds, system)
        print(
            f"| {name} | {system} | {forecasts} | {speed.request_steps} | {speed.virtual_s:.1f} | {speed.cpu_s:.2f} |"
            f" {speed.times_real:.1f} | {speed.step_us:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
