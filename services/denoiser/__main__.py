"""`python -m services.denoiser worker | agent | profile | plot`."""

import argparse
import logging
import os
import signal
import sys
from functools import partial

from msgspec.structs import replace

from services import runtime
from services.denoiser.adoption import Origin, is_locked, origin_of
from services.denoiser.config import AgentConfig, WorkerConfig
from services.denoiser.spawn import start_ranks
from services.profile import load_profile
from services.settings import ConfigError, load_section


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.denoiser", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("worker", help="one instance of the model; settings: [worker]")
    commands.add_parser("agent", help="the supervisor of a node's workers; settings: [agent]")
    profile = commands.add_parser("profile", help="measure step latencies and write the profile's latency.json")
    profile.add_argument("--profile", default="profiles/tiny-cpu", help="profile folder (default: %(default)s)")
    profile.add_argument("--quick", action="store_true", help="fewer sizes and repeats: a rough fit in seconds")
    profile.add_argument("--tp", type=tp_degrees, default=[], help="TP degrees, as in 1,2 (default: the profile's)")
    profile.add_argument("--minutes", type=float, default=10.0, help="about, at most, for each (default: %(default)g)")
    plot = commands.add_parser("plot", help="draw the profile's latency.json")
    plot.add_argument("--profile", default="profiles/tiny-cpu", help="profile folder (default: %(default)s)")
    plot.add_argument("--out", help="image to write (default: docs/latency-<profile>.svg)")
    rank = commands.add_parser("rank")  # without help: only a worker starts one
    rank.add_argument("--name", required=True, help="in its log")
    rank.add_argument("--line", type=int, required=True, help="file descriptor of its line to rank 0")
    rank.add_argument("--parent", type=int, required=True, help="process of rank 0")
    arguments = parser.parse_args()
    try:
        match arguments.command:
            case "worker":
                run_worker()
            case "agent":
                run_agent()
            case "profile":
                run_profiler(arguments)
            case "plot":
                run_plot(arguments.profile, arguments.out)
            case "rank":
                run_rank(arguments.name, arguments.line, arguments.parent)
    except ConfigError as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        sys.exit(2)


# torch is imported late: an agent needs none, and a worker is tied to its agent before it loads.


def run_worker() -> None:
    if origin := origin_of(os.environ):
        tie_to_agent(origin)
    config = load_section(WorkerConfig, "worker")
    profile = load_profile(config.profile)  # a mistake in it is told before torch has loaded
    if config.tp_degree:
        profile = replace(profile, engine=replace(profile.engine, tp_degree=config.tp_degree))
    name = f"worker {config.instance_id}".strip()
    ranks = start_ranks(profile.engine.tp_degree, name=name)
    from services.denoiser.worker import serve

    # A thread that wants the interpreter gets it after this long; the default of 5 ms is a whole step.
    sys.setswitchinterval(0.0005)
    runtime.main(name, partial(serve, config=config, profile=profile, ranks=ranks), metrics_port=config.metrics_port)


def tie_to_agent(origin: Origin) -> None:
    """This worker ends with its agent, or, where it shall outlive it, with its lifelines."""
    from services.denoiser.lifeline import leave_if_orphaned, tie_to, tie_to_parent

    if not origin.lock_file:
        tie_to_parent(origin.agent_pid)
        return
    for lifeline in origin.lifelines:
        tie_to(partial(is_locked, lifeline.file), lifeline.limit_s, name=f"lifeline {lifeline.file}")
    leave_if_orphaned(origin.agent_pid)  # whoever comes after it may not have seen this process


def run_agent() -> None:
    from services.denoiser.adoption import take_lock
    from services.denoiser.agent import lock_file_of, serve

    config = load_section(AgentConfig, "agent")
    lock_file = lock_file_of(config)
    if lock_file is not None:
        take_lock(lock_file)
    runtime.main("agent", partial(serve, config=config, lock_file=lock_file), metrics_port=config.metrics_port)


def tp_degrees(text: str) -> list[int]:
    """From "1,2"."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1,2")
    return [int(part) for part in parts]


def run_profiler(arguments: argparse.Namespace) -> None:
    from services.denoiser.plan import RankFailed
    from services.denoiser.profiler import profile_latency

    try:
        path = profile_latency(
            arguments.profile, tp_degrees=arguments.tp, quick=arguments.quick, limit_s=60 * arguments.minutes
        )
    except RankFailed as failed:
        print(f"profile: {failed}", file=sys.stderr)
        sys.exit(1)
    print(path)


def run_plot(folder: str, out: str | None) -> None:
    from services.denoiser.latency_plot import plot_latency

    print(plot_latency(folder, out))


def run_rank(name: str, line_fd: int, parent_pid: int) -> None:
    from services.denoiser.lifeline import tie_to_parent

    tie_to_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # told to the whole process group: rank 0 has to drain first
        signal.signal(number, signal.SIG_IGN)
    runtime.set_up_logging(name)
    from services.denoiser.ranks import serve

    exit_code = serve(line_fd)
    logging.shutdown()
    os._exit(exit_code)  # at once: there is nothing left that could matter


if __name__ == "__main__":
    main()
