"""`python -m tools.simulate`: the cluster in virtual time. Without options it compares a few systems on the built-in
profile, which takes seconds."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from services.profile import load_profile
from services.reconfigurator.config import ReconfiguratorConfig
from services.scheduler.config import SchedulerConfig
from services.settings import ConfigError
from services.threshold_controller.config import ThresholdControllerConfig
from tools.simulate.cluster import Cluster
from tools.simulate.fleet import FleetSetting, layout_text
from tools.simulate.forecasts import ForecastKind
from tools.simulate.results import write_csv
from tools.simulate.run import Job, Result, simulate
from tools.simulate.systems import about
from tools.simulate.workload import Phase, read_lengths

_DEFAULT_SYSTEMS = "tedi,infaas,llumnix,proteus"
_SHOW_EVERY_S = 0.2


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line (or these words) and run."""
    arguments = _parser().parse_args(words)
    try:
        jobs = _jobs(arguments)
        results = {job.system: simulate(job, _progress(job)) for job in jobs}
        _save(arguments, results)
    except (ConfigError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    print(_table(results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.simulate",
        description=__doc__,
        epilog=f"systems:\n{about()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--systems", type=_words, default=_words(_DEFAULT_SYSTEMS), metavar="A,B", help=f"(default: {_DEFAULT_SYSTEMS})"
    )
    add("--profile", type=Path, default=Path("profiles/tiny-cpu"), help="folder (default: %(default)s)")
    add(
        "--workload",
        default="profile",
        help='"profile": made-up requests of the profile\'s mean steps; "gsm8k": published step counts of LLaDA-8B; '
        "or a folder that tools.traces has recorded (default: profile)",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--rate", type=_positive, help="requests per second, of all instances together")
    load.add_argument("--rate-per-instance", type=_positive, help="the same, of each (default: 2.4)")
    load.add_argument("--seconds", type=_positive, default=60.0, help="of arrivals (default: %(default)g)")
    load.add_argument(
        "--phases", type=_phases, metavar="RATE*SECONDS,...", help="rates one after the other, such as 10*60,25*30"
    )
    load.add_argument("--requests", type=int, help="at most so many")
    load.add_argument("--slo-ms", type=_positive, help="(default: 5 times what a mean request takes alone)")
    load.add_argument("--prompt-tokens", type=_range, metavar="LOW-HIGH", help="length of prompts")
    load.add_argument("--output-tokens", type=int, help="length of answers, in whole blocks")
    load.add_argument(
        "--lengths", type=Path, help="CSV of prompt and output tokens, such as the Azure trace, instead of these two"
    )
    load.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--instances", type=int, default=4, help="(default: %(default)s)")
    cluster.add_argument("--tp", type=int, default=1, help="tensor-parallel degree of each (default: 1)")
    cluster.add_argument("--layout", type=_layout, metavar="COUNT*TP,...", help="instead of these two, such as 8*1,2*4")
    cluster.add_argument("--kv-tokens", type=int, help="K/V pool of each (default: the profile's)")
    cluster.add_argument("--thresholds", type=_numbers, help="some of the profile's set, such as 0.7,0.8,0.9")
    cluster.add_argument("--delay-ms", type=_not_negative, default=0.5, help="of a message (default: %(default)g)")
    cluster.add_argument(
        "--jitter-ms", type=_not_negative, default=0.5, help="at most so much more (default: %(default)g)"
    )
    cluster.add_argument(
        "--step-overhead-ms",
        type=_not_negative,
        default=0.5,
        help="of each pass beside the model (default: %(default)g)",
    )
    cluster.add_argument(
        "--extra-pass-ms",
        type=_not_negative,
        default=0.0,
        help="of each pass, on top of the latency profile (default: 0)",
    )
    cluster.add_argument("--extra-step-ms", type=_not_negative, default=0.0, help="of each step in a pass (default: 0)")
    cluster.add_argument(
        "--pass-noise", type=_not_negative, default=0.0, help="relative deviation of passes (default: 0)"
    )
    fleet = parser.add_argument_group("instances that come and go")
    fleet.add_argument("--reconfigure", action="store_true", help="the layout follows the load")
    fleet.add_argument(
        "--reconfigurator", type=_settings, default={}, metavar="KEY=VALUE,...", help="as in [reconfigurator]"
    )
    fleet.add_argument("--losses", type=_numbers, default=(), help="seconds at which an instance dies, such as 20,45")
    fleet.add_argument("--nodes", type=int, default=4, help="(default: 4)")
    fleet.add_argument("--devices", type=int, default=4, help="of each node (default: 4)")
    fleet.add_argument("--launch-s", type=_not_negative, default=150.0, help="a launch takes (default: 150)")
    policy = parser.add_argument_group("policies")
    policy.add_argument(
        "--forecasts",
        choices=get_args(ForecastKind),
        help="of steps left (default: the profile's predictor, `trees`, for recorded traces; else `blurred`)",
    )
    policy.add_argument(
        "--forecast-error", type=_not_negative, default=0.19, help="of blurred ones (default: %(default)g)"
    )
    policy.add_argument("--scheduler", type=_settings, default={}, metavar="KEY=VALUE,...", help="as in [scheduler]")
    policy.add_argument(
        "--controller", type=_settings, default={}, metavar="KEY=VALUE,...", help="as in [threshold_controller]"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--csv", type=Path, help="a row for each request; the system's name goes before the suffix")
    output.add_argument("--json", type=Path, help="the summaries")
    return parser


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    if arguments.instances < 1 or arguments.tp < 1:
        raise ConfigError("instances and tp must be at least 1")
    scheduler = _convert(arguments.scheduler, SchedulerConfig, "--scheduler")
    controller = _convert(arguments.controller, ThresholdControllerConfig, "--controller")
    degrees = arguments.layout or (arguments.tp,) * arguments.instances
    rate = arguments.rate or (arguments.rate_per_instance or 2.4) * len(degrees)
    lengths = None
    if arguments.lengths:
        lengths = read_lengths(arguments.lengths, load_profile(arguments.profile))
    return [
        Job(
            profile=arguments.profile,
            system=name,
            workload=arguments.workload,
            phases=arguments.phases or (Phase(rate, arguments.seconds),),
            tp_degrees=degrees,
            most_requests=arguments.requests,
            slo_s=arguments.slo_ms / 1e3 if arguments.slo_ms else None,
            output_tokens=arguments.output_tokens,
            prompt_tokens=arguments.prompt_tokens,
            lengths=lengths,
            kv_tokens=arguments.kv_tokens,
            thresholds=arguments.thresholds,
            forecasts=arguments.forecasts,
            forecast_error=arguments.forecast_error,
            delay_s=arguments.delay_ms / 1e3,
            jitter_s=arguments.jitter_ms / 1e3,
            step_overhead_s=arguments.step_overhead_ms / 1e3,
            pass_noise=arguments.pass_noise,
            extra_pass_ms=arguments.extra_pass_ms,
            extra_step_ms=arguments.extra_step_ms,
            seed=arguments.seed,
            fleet=_fleet(arguments),
            scheduler=scheduler,
            controller=controller,
        )
        for name in dict.fromkeys(arguments.systems)
    ]


def _fleet(arguments: argparse.Namespace) -> FleetSetting | None:
    if not (arguments.reconfigure or arguments.losses):
        return None
    if arguments.nodes < 1 or arguments.devices < 1:
        raise ConfigError("nodes and devices must be at least 1")
    follows = _convert(arguments.reconfigurator, ReconfiguratorConfig, "--reconfigurator")
    return FleetSetting(
        nodes=arguments.nodes,
        devices=arguments.devices,
        launch_s=arguments.launch_s,
        losses=arguments.losses,
        reconfigurator=follows if arguments.reconfigure else None,
    )


def _convert(settings: dict[str, str], config: type[Any], option: str) -> Any:
    try:
        return msgspec.convert(settings, config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{option}: {error}") from None


# --- words --------------------------------------------------------------------------------------------------------


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_not_negative(word) for word in _words(text))


def _positive(text: str) -> float:
    if (value := _not_negative(text)) == 0:
        raise argparse.ArgumentTypeError("0 is not positive")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
    return value


def _phases(text: str) -> tuple[Phase, ...]:
    pairs = [word.split("*") for word in _words(text)]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form RATE*SECONDS,RATE*SECONDS")
    return tuple(Phase(_not_negative(rate), _positive(seconds)) for rate, seconds in pairs)


def _layout(text: str) -> tuple[int, ...]:
    degrees: list[int] = []
    for word in _words(text):
        count, _, degree = word.partition("*")
        if not (count.isdecimal() and degree.isdecimal() and int(count) and int(degree)):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form 8*1,2*4: instances and their TP degree")
        degrees += [int(degree)] * int(count)
    return tuple(degrees)


def _range(text: str) -> tuple[int, int]:
    try:
        low, _, high = text.partition("-")
        found = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 900-1100") from None
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first must be at least 1 and at most the second")
    return found


def _settings(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in _words(text)]
    if any(not sign for _, sign, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value,key=value")
    return {key: value for key, _, value in pairs}


# --- what is shown ------------------------------------------------------------------------------------------------


def _progress(job: Job) -> Callable[[Cluster], None] | None:
    """A line that is written over, on a terminal."""
    if not sys.stderr.isatty():
        return None
    started = last = time.monotonic()
    expected = sum(phase.rate * phase.seconds for phase in job.phases)
    expected = min(expected, job.most_requests or expected)

    def show(cluster: Cluster) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _SHOW_EVERY_S:
            return
        last = now
        ended = len(cluster.outcomes)
        share = min(1.0, ended / expected)
        bar = "#" * int(30 * share)
        speed = cluster.clock.now / (now - started)
        counts = f"{ended} requests, {cluster.num_arrived - ended} open"
        text = f"{job.system:20} [{bar:30}] {share:4.0%}, {counts}, {speed:.0f} x"
        print(f"\r{text:100}", end="", file=sys.stderr, flush=True)

    return show


def _save(arguments: argparse.Namespace, results: dict[str, Result]) -> None:
    if arguments.csv:
        for name, result in results.items():
            write_csv(arguments.csv.with_suffix(f".{name}{arguments.csv.suffix}"), result.outcomes)
    if arguments.json:
        found = {
            name: {
                "slo_s": r.slo_s,
                "virtual_s": r.virtual_s,
                "load": r.load,
                **msgspec.to_builtins(r.summary),
                "layouts": r.changes,
                "decisions": r.decisions,
            }
            for name, r in results.items()
        }
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


_COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("requests", lambda r: str(r.summary.requests)),
    ("in time", lambda r: _percent(r.summary.attainment)),
    ("mean s", lambda r: _number(r.summary.latency_mean_s)),
    ("p95 s", lambda r: _number(r.summary.latency_p95_s)),
    ("waiting s", lambda r: _number(r.summary.queue_mean_s)),
    ("steps", lambda r: _number(r.summary.steps_mean, 1)),
    ("threshold", lambda r: _number(r.summary.threshold_mean)),
    ("accuracy", lambda r: _percent(r.summary.accuracy)),
    ("moves", lambda r: _number(r.summary.moves_mean, 2)),
    ("busy", lambda r: _percent(r.load)),
)


def _table(results: dict[str, Result]) -> str:
    """Of Markdown."""
    if sys.stderr.isatty():
        print(f"\r{'':110}\r", end="", file=sys.stderr)
    slo_s = next(iter(results.values())).slo_s
    rows = [["system", *(name for name, _ in _COLUMNS)]]
    rows += [[name, *(show(result) for _, show in _COLUMNS)] for name, result in results.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([f"SLO {slo_s:.3f} s", "", *lines, *_layouts(results)])


def _layouts(results: dict[str, Result]) -> list[str]:
    """How they changed, where they could."""
    lines: list[str] = []
    for name, result in results.items():
        if result.changes:
            lines += ["", f"{name}, instances from second to second:"]
            lines += [f"{change.at:8.1f}  {layout_text(change.layout)}" for change in result.changes]
    return lines


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
