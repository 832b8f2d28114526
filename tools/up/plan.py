"""What the stack consists of, and what is done when a part of it ends. Pure.

Starting and stopping:
1. All processes start at once: the services wait for NATS by themselves.
2. They stop one after another, in STOP_ORDER: first who takes requests in, last who stores them. The scheduler stays
   until the workers have handed back what they hold.
3. Instances are the agent's: it starts them, stops them and tells of their death. They are not in this list. The
   step-predictor is there if the profile has a model for it; workload-monitor and reconfigurator if the latter is
   enabled, and then the agent follows its plan.
When a process ends by itself:
4. Exit code 2 means a wrong configuration, which another start does not mend: the stack is given up, or goes on
   without a process that is optional.
5. Otherwise it starts again after a pause, which doubles from FIRST_PAUSE_S to LONGEST_PAUSE_S with each end in a row.
6. After STEADY_S seconds of work an end counts as the first one again.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from tools.secrets.store import Secrets
from tools.up.config import UpConfig

STOP_ORDER = (
    *("gateway", "reconfigurator", "agent", "workload-monitor", "threshold-controller", "step-predictor"),
    *("scheduler", "nats"),
)

EXIT_WRONG_CONFIG = 2  # services/runtime.py, rule 3
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
STEADY_S = 10.0

_NATS_CONFIGS = Path(__file__).parents[2] / "deploy" / "nats"


class Process(NamedTuple):
    """One process of the stack."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]  # beside what this process has
    stop_limit_s: float  # from SIGTERM to SIGKILL
    optional: bool = False  # the others do without it


def processes_of(
    config: UpConfig,
    nats_server: str,
    *,
    has_predictor: bool = False,
    reconfigures: bool = False,
    secrets: Secrets | None = None,
) -> tuple[Process, ...]:
    """The stack. `nats_server`: path of that program; `has_predictor`: whether the profile has a step predictor."""
    shared = {
        "TEDISERVE_NATS_URL": config.nats_url,
        "TEDISERVE_NATS_REPLICAS": "1",
        **(secrets.client_variables() if secrets else {}),
    }
    of_gateway = (
        {
            "GATEWAY_TLS_CERTIFICATE": secrets.certificate("gateway"),
            "GATEWAY_TLS_KEY": secrets.private_key("gateway"),
            "GATEWAY_KEY_FILE": secrets.key_file,
        }
        if secrets
        else {}
    )

    def service(name: str, *command: str, stop_limit_s: float, **environment: object) -> Process:
        own = {f"TEDISERVE_{key}": str(value) for key, value in environment.items()}
        return Process(name, (sys.executable, "-m", *command), shared | own, stop_limit_s)

    predictor = service(
        "step-predictor", "services.step_predictor", stop_limit_s=5.0, STEP_PREDICTOR_PROFILE=config.profile
    )._replace(optional=True)
    planners = (
        service(
            "workload-monitor", "services.workload_monitor", stop_limit_s=5.0, WORKLOAD_MONITOR_PROFILE=config.profile
        ),
        service(
            "reconfigurator",
            "services.reconfigurator",
            stop_limit_s=5.0,
            RECONFIGURATOR_PROFILE=config.profile,
        ),
    )
    return (
        Process("nats", _nats_command(config, nats_server), secrets.nats_variables() if secrets else {}, 5.0),
        service("scheduler", "services.scheduler", stop_limit_s=5.0, SCHEDULER_PROFILE=config.profile),
        service(
            "threshold-controller",
            "services.threshold_controller",
            stop_limit_s=5.0,
            THRESHOLD_CONTROLLER_PROFILE=config.profile,
        ),
        service(
            "gateway",
            "services.gateway",
            stop_limit_s=10.0,
            GATEWAY_HOST=config.host,
            GATEWAY_PORT=config.port,
            GATEWAY_PROFILE=config.profile,
            GATEWAY_DRAIN_LIMIT_S=5,  # whoever presses Ctrl-C does not wait for long
            **of_gateway,
        ),
        service(
            "agent",
            "services.denoiser",
            "agent",
            stop_limit_s=15.0,
            AGENT_PROFILE=config.profile,
            AGENT_WORKERS=config.workers,
            AGENT_STOP_LIMIT_S=12,
            AGENT_RUN_FOLDER=config.folder,
            AGENT_LIFELINE=config.lock_file,
            **({"AGENT_PLANNED": True} if reconfigures else {}),
            WORKER_DRAIN_LIMIT_S=10,
        ),
        *([predictor] if has_predictor else []),
        *(planners if reconfigures else []),
    )


def _nats_command(config: UpConfig, nats_server: str) -> tuple[str, ...]:
    store = str(config.folder / "nats")
    file = str(_NATS_CONFIGS / ("single-secure.conf" if config.secure else "single.conf"))
    return (nats_server, "-c", file, "-a", "127.0.0.1", "-p", str(config.nats_port), "-sd", store)


class Restart(NamedTuple):
    """Start it again."""

    after_s: float


class GiveUp(NamedTuple):
    """Stop the whole stack."""

    reason: str


class RestartPolicy:
    """Rules 4 to 6, for one process."""

    def __init__(self) -> None:
        self._ends_in_a_row = 0

    def ended(self, exit_code: int, ran_s: float) -> Restart | GiveUp:
        """The process ended by itself. `exit_code`: negative is a signal."""
        if exit_code == EXIT_WRONG_CONFIG:
            return GiveUp("its configuration is wrong")
        self._ends_in_a_row = 1 if ran_s >= STEADY_S else self._ends_in_a_row + 1
        return Restart(min(FIRST_PAUSE_S * 2 ** (self._ends_in_a_row - 1), LONGEST_PAUSE_S))
