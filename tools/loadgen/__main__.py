"""python -m tools.loadgen: open-loop load on a live endpoint; prints a table, writes JSON.

Exit codes: 0 the run counts, 1 it does not (the client was late, too many in flight, interrupted), 2 wrong options, a
wrong file, or an endpoint that does not answer.
"""

import argparse
import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from services.settings import ConfigError
from tools.loadgen.answers import answers_file
from tools.loadgen.arrivals import Source, poisson, read_trace
from tools.loadgen.asks import Ask, built_in, read_asks
from tools.loadgen.client import Endpoint, open_endpoint
from tools.loadgen.run import OpenLoop
from tools.loadgen.schedule import Mix, Send, parse_mix, sends
from tools.loadgen.tally import Outcome, Report, Tally, describe

_REDRAW_S = 0.5
_SPARE_FILES = 64  # beside the connections


def main(words: Sequence[str] | None = None) -> int:
    options = _parse(words)
    try:
        source = _source(options)
        asks = built_in(options.problems, options.seed) if options.prompts is None else read_asks(options.prompts)
        allow_files(options.max_in_flight)
        report = asyncio.run(_load(options, source, asks))
        if options.out:
            _write(options, report)
    except ConfigError as error:
        print(f"loadgen: {error}", file=sys.stderr)
        return 2
    print(describe(report))
    return 0 if report.counts else 1


def allow_files(max_in_flight: int) -> None:
    """Lets this process have so many connections open. Raises ConfigError where the system does not."""
    wanted = max_in_flight + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        raise ConfigError(
            f"max-in-flight: {max_in_flight} connections are more than this system allows ({hard} files)"
        ) from None


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.loadgen", description="Open-loop load on an endpoint.")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add("--model", help="which to ask (default: the first that is served)")
    add("--api-key", help="sent as bearer token")
    add("--rate", type=_positive, help="requests a second; of a trace: the mean that it is scaled to")
    add("--trace", type=Path, help="CSV: a rate curve (start_s, total_rps), Azure LLM inference, or BurstGPT")
    add("--speed", type=_positive, help="of a trace: how much faster its time runs")
    add("--prompts", type=Path, help='JSONL with "prompt", "messages" or "question", and "expected" or "answer"')
    add("--problems", type=_count, default=500, help="without: so many held-out built-in ones (default: 500)")
    add("--slo-ms", type=_mix(_positive), help="of each request, such as 500, or a mix: 300:0.7,2000:0.3")
    add("--tier", type=_mix(str), help="service_tier, such as priority, or a mix: default:0.8,flex:0.2")
    add("--threshold", type=float, help="pins the threshold of all requests")
    add("--temperature", type=float)
    add("--max-tokens", type=_count)
    add("--ignore-eos", action="store_true", help="denoise all of max-tokens")
    add("--stream", action="store_true", help="stream the answers, and measure the first text")
    add("--duration", type=_positive, default=60.0, help="seconds that are measured (default: 60)")
    add("--warmup", type=_not_negative, default=5.0, help="seconds before them, which are not (default: 5)")
    add("--seed", type=int, default=0, help="of arrivals, prompts and mixes (default: 0)")
    add("--max-in-flight", type=_count, default=1000, help="what is due beyond is not sent (default: 1000)")
    add("--timeout-s", type=_positive, default=120.0, help="of one request (default: 120)")
    add("--max-lag-ms", type=_positive, default=50.0, help="the client's own p99 above it spoils the run (default: 50)")
    add("--out", type=Path, help="JSON file for options and results")
    add("--answers", type=Path, help="JSONL file for all answers, as tools.judge reads them")
    return parser.parse_args(words)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def _not_negative(text: str) -> float:
    return 0.0 if float(text) == 0 else _positive(text)


def _mix(value_of: Callable[[str], Any]) -> Callable[[str], Mix[Any]]:
    def parse(text: str) -> Mix[Any]:
        try:
            return parse_mix(text, value_of)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a value nor a mix (a:0.7,b:0.3): {error}") from None

    return parse


def _source(options: argparse.Namespace) -> Source:
    """The arrivals. Raises ConfigError where there are none, or where they end before the run does."""
    if options.trace is None:
        if options.rate is None or options.speed is not None:
            raise ConfigError("give --rate for Poisson arrivals, or --trace with --rate or --speed or neither")
        return poisson(options.rate)
    source = read_trace(options.trace).changed(options.speed, options.rate)
    wanted_s = options.warmup + options.duration
    if source.lasts_s < wanted_s:
        raise ConfigError(
            f"{options.trace} lasts {source.lasts_s:.1f} s at this speed; warm-up and duration are {wanted_s:g} s:"
            " choose a lower speed or rate, or a shorter duration"
        )
    return source


async def _load(options: argparse.Namespace, source: Source, asks: list[Ask]) -> Report:
    tally = Tally(options.warmup, options.duration, max_in_flight=options.max_in_flight, max_lag_ms=options.max_lag_ms)
    due = sends(
        source,
        options.seed,
        options.warmup + options.duration,
        asks=asks,
        slo_ms=options.slo_ms,
        tiers=options.tier,
    )
    async with open_endpoint(
        options.url,
        max_in_flight=options.max_in_flight,
        timeout_s=options.timeout_s,
        stream=options.stream,
        api_key=options.api_key,
    ) as endpoint:
        body = await _body(options, endpoint)
        with answers_file(options.answers) as keep_answer:
            await _run(endpoint, body, due, tally, keep_answer)
    return tally.report()


async def _body(options: argparse.Namespace, endpoint: Endpoint) -> dict[str, Any]:
    """What is the same in all requests. Raises ConfigError."""
    told = {name: getattr(options, name) for name in ("threshold", "temperature", "max_tokens")}
    told["ignore_eos"] = options.ignore_eos or None
    model = await endpoint.choose_model(options.model)
    return {"model": model} | {name: value for name, value in told.items() if value is not None}


async def _run(
    endpoint: Endpoint,
    body: dict[str, Any],
    due: Iterator[Send],
    tally: Tally,
    keep_answer: Callable[[Outcome], None],
) -> None:
    """Until all have ended, or Ctrl-C: then what there is counts as interrupted."""

    def on_outcome(outcome: Outcome) -> None:
        tally.add(outcome)
        keep_answer(outcome)

    loop = OpenLoop(endpoint, body, on_outcome, max_in_flight=tally.max_in_flight)
    running = asyncio.create_task(loop.run(due))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
    async with shown(loop, tally, sys.stderr):
        try:
            await running
        except asyncio.CancelledError:
            tally.interrupted = True
    tally.most_in_flight = loop.most_in_flight


@contextlib.asynccontextmanager
async def shown(loop: OpenLoop, tally: Tally, stream: TextIO) -> AsyncIterator[None]:
    """One line that is written over while the run goes on; on a terminal only."""

    async def redraw() -> None:
        while True:
            stream.write(f"\r{_line(loop, tally)}\x1b[K")
            stream.flush()
            await asyncio.sleep(_REDRAW_S)

    if not stream.isatty():
        yield
        return
    drawing = asyncio.create_task(redraw())
    try:
        yield
    finally:
        drawing.cancel()
        stream.write("\r\x1b[K")
        stream.flush()


def _line(loop: OpenLoop, tally: Tally) -> str:
    total_s = tally.warmup_s + tally.window_s
    phase = (
        "warm-up" if loop.ran_s < tally.warmup_s else "measuring" if loop.ran_s < total_s else "waiting for the rest"
    )
    met = f", {tally.met / tally.due:.1%} in time" if tally.met else ""
    return (
        f"{phase}: {min(loop.ran_s, total_s):.0f} of {total_s:.0f} s, {loop.due} due, {loop.in_flight} in flight,"
        f" {tally.finished} measured{met}, own lag p99 {tally.lag_p99_ms:.1f} ms"
    )


def _write(options: argparse.Namespace, report: Report) -> None:
    """Raises ConfigError."""
    told = {name: value for name, value in vars(options).items() if name != "api_key"}
    document = {"options": told, "report": report, "counts": report.counts}
    encoded = msgspec.json.format(msgspec.json.encode(document, enc_hook=str))
    try:
        options.out.write_bytes(encoded + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the results: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
