"""`python -m tools.traces record | show`."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.settings import ConfigError
from tools.traces import schedules
from tools.traces.runs import CACHES

if TYPE_CHECKING:
    from tools.traces.recorder import ShardDone

_REPLAYED_PROMPTS = 300


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line (or these words) and run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.traces", description=__doc__)
    commands = parser.add_subparsers(required=True)
    _add_record(commands)
    _add_show(commands)
    arguments = parser.parse_args(words)
    try:
        arguments.run(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _add_record(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "record", help="record prompts at every threshold and at changing ones; can be resumed"
    )
    parser.add_argument("--profile", type=Path, default=Path("profiles/tiny-cpu"), help="folder (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the recording")
    parser.add_argument("--prompts", type=int, metavar="N", help="how many; of a file by default all")
    parser.add_argument("--file", type=Path, help='JSONL with {"prompt": ...} or {"messages": [...]} on each line')
    parser.add_argument(
        "--split", choices=("train", "held_out"), default="train", help="without a file: which built-in problems"
    )
    parser.add_argument("--seed", type=int, default=0, help="of problems and random thresholds (default: 0)")
    parser.add_argument("--thresholds", type=_numbers, help="such as 0.5,0.9 (default: the profile's set)")
    parser.add_argument(
        "--schedules",
        type=_words,
        default=schedules.DEFAULT,
        help="thresholds that change: blocks and steps at random, or letters l, m, h for the lowest, middle and "
        f"highest by equal parts of the output (default: {','.join(schedules.DEFAULT)})",
    )
    parser.add_argument("--caches", type=_words, help=f"of {', '.join(CACHES)} (default: the profile's)")
    parser.add_argument("--max-tokens", type=int, help="output tokens (default: the profile's)")
    parser.add_argument("--temperature", type=float, help="(default: the profile's)")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="denoise all output tokens, past the end of the answer"
    )
    parser.add_argument(
        "--opening-share", type=float, help="of each block, at the highest threshold; 0: none (default: the profile's)"
    )
    parser.add_argument("--blocks-ahead", type=int, help="that the model sees (default: the profile's)")
    parser.add_argument("--processes", type=int, default=1, help="each with a copy of the model (default: 1)")
    parser.set_defaults(run=_record)


def _record(arguments: argparse.Namespace) -> None:
    from tools.traces.recorder import ProcessLost, RecordJob, record

    if unknown := set(arguments.caches or ()) - set(CACHES):
        raise ConfigError(f"caches: {', '.join(sorted(unknown))} is not of {', '.join(CACHES)}")
    job = RecordJob(
        profile=arguments.profile,
        out=arguments.out,
        num_prompts=arguments.prompts,
        file=arguments.file,
        split=arguments.split,
        seed=arguments.seed,
        thresholds=arguments.thresholds,
        changing=arguments.schedules,
        caches=arguments.caches,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        opening_share=arguments.opening_share,
        blocks_ahead=arguments.blocks_ahead,
        num_processes=arguments.processes,
    )
    try:
        record(job, _progress())
    except ProcessLost as error:
        sys.exit(f"\n{error}; the same command goes on from here")
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    print(f"recorded in {arguments.out}; python -m tools.traces show {arguments.out} tells what")


def _progress() -> "Callable[[ShardDone], None]":
    """One line that is written over on a terminal; elsewhere a line for each shard."""
    started = time.monotonic()
    on_terminal = sys.stderr.isatty()

    def show(done: "ShardDone") -> None:
        recording, made = done.recording, done.shards - done.shards_before
        share = done.shards / recording.num_shards
        text = f"{share:4.0%}, {done.shards} of {recording.num_shards} shards of {recording.runs_per_shard} runs"
        if made:
            seconds = (time.monotonic() - started) / made
            left = seconds * (recording.num_shards - done.shards)
            text += f", {recording.runs_per_shard / seconds:.1f} runs/s, {left / 60:.0f} min left"
        over = done.shards == recording.num_shards
        print(f"\r{text:100}" if on_terminal else text, end="\n" if over or not on_terminal else "", file=sys.stderr)
        sys.stderr.flush()

    return show


def _add_show(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("show", help="what a recording holds")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--replay",
        type=int,
        nargs="?",
        const=_REPLAYED_PROMPTS,
        metavar="N",
        help=f"also how well replays predict runs, over the first N prompts (default: {_REPLAYED_PROMPTS})",
    )
    parser.add_argument(
        "--profile", type=Path, help="with --replay: its tokenizer tells whether replayed answers are correct"
    )
    parser.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> None:
    from tools.traces.reader import open_traces
    from tools.traces.summary import describe, describe_replays

    traces = open_traces(arguments.folder)
    print(describe(traces))
    if arguments.replay:
        print()
        print(describe_replays(traces, arguments.replay, _decoder(arguments.profile)))


def _decoder(profile: Path | None) -> Callable[[Sequence[int]], str] | None:
    if profile is None:
        return None
    from services.profile import load_profile
    from tools.traces.prompts import codec_of

    return codec_of(load_profile(profile)).decode


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between them") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


if __name__ == "__main__":
    main()
