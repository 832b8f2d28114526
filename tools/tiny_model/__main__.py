"""`python -m tools.tiny_model train|evaluate|sample|plot|readme`."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from random import Random


def main() -> None:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_model", description=__doc__)
    commands = parser.add_subparsers(required=True)
    _add_train(commands)
    _add_evaluate(commands)
    _add_sample(commands)
    _add_plot(commands)
    _add_readme(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("train", help="train the model from scratch, or on from its last checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--work", type=Path, default=Path("var/tiny_model"), help="folder for checkpoint and log")
    parser.add_argument("--steps", type=int, help="another number of steps than the recipe's, in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--last-cycle-from", type=Path, help="run the last cycle alone, from this model's weights")
    parser.add_argument("--no-compile", action="store_true", help="without a C++ compiler: half as fast")
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> None:
    from tools.tiny_model.config import TrainConfig
    from tools.tiny_model.train import TrainJob, train

    config = TrainConfig(seed=arguments.seed)
    if arguments.steps:
        scale = arguments.steps / config.num_steps
        later = tuple(replace(cycle, steps=int(cycle.steps * scale)) for cycle in config.later_cycles)
        first = arguments.steps - sum(cycle.steps for cycle in later)
        config = replace(config, first_cycle_steps=first, later_cycles=later)
    compile_loss = not arguments.no_compile
    start = arguments.last_cycle_from
    train(TrainJob(arguments.out, arguments.work, config, compile=compile_loss, start_folder=start))


def _add_evaluate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("evaluate", help="accuracy and steps on held-out problems")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--thresholds", default="0.5,0.6,0.7,0.8,0.9")
    parser.add_argument("--cache", default="none,prefix,dual")
    parser.add_argument(
        "--opening-share", type=float, default=0.0, help="also thresholds below 0.9 after such an opening, dual cache"
    )
    parser.add_argument("--count", type=int, default=1_500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--blocks-ahead", type=int, help="that the model sees beyond the current one (default: all)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--show-wrong", type=int, default=0, help="print so many wrong answers of each setting")
    parser.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> None:
    from services.denoiser.loader import choose_dtype
    from tools.tiny_model.evaluate import (
        OPENING_THRESHOLD,
        EvaluationJob,
        Setting,
        evaluate,
        markdown,
        problems_of,
        report,
    )

    thresholds = [float(text) for text in arguments.thresholds.split(",")]
    if not 0 <= arguments.opening_share <= 1:
        sys.exit(f"opening_share {arguments.opening_share:g} is not between 0 and 1")
    settings = [Setting(cache, threshold) for cache in arguments.cache.split(",") for threshold in thresholds]
    if arguments.opening_share:
        lower = [threshold for threshold in thresholds if threshold < OPENING_THRESHOLD]
        settings += [Setting("dual", threshold, arguments.opening_share) for threshold in lower]
    job = EvaluationJob(
        model_folder=arguments.model,
        settings=tuple(settings),
        count=arguments.count,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        block_size=arguments.block_size,
        blocks_ahead=arguments.blocks_ahead,
        dtype=choose_dtype(arguments.dtype, "cpu"),
        num_processes=arguments.processes,
    )
    outcomes = evaluate(job)
    content = report(job, outcomes)
    print(markdown(content))
    for setting, found in outcomes.items():
        wrong = [pair for pair in zip(problems_of(job.count, job.seed), found, strict=True) if not pair[1].is_correct]
        for problem, outcome in wrong[: arguments.show_wrong]:
            print(f"{setting.cache} {setting.words}: {problem.prompt!r}")
            print(f"    got  {outcome.text!r}\n    want {problem.answer!r}")
    if arguments.out:
        arguments.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(markdown(content))


def _add_sample(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("sample", help="print problems with their answers, one JSON object a line")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="only problems that training never shows")
    parser.set_defaults(run=_sample)


def _sample(arguments: argparse.Namespace) -> None:
    from tools.tiny_model.tasks import sample

    rng = Random(arguments.seed)
    for _ in range(arguments.count):
        problem = sample(rng, "held_out" if arguments.held_out else "train")
        print(json.dumps(asdict(problem)))


def _add_plot(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("plot", help="draw the loss curve of a training log as SVG")
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    parser.set_defaults(run=_plot)


def _plot(arguments: argparse.Namespace) -> None:
    from tools.tiny_model.plot import plot_loss

    plot_loss(arguments.log, arguments.out)


def _add_readme(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("readme", help="fill the measured parts of a profile's README, draw its loss curve")
    parser.add_argument("profile", type=Path)
    parser.set_defaults(run=_readme)


def _readme(arguments: argparse.Namespace) -> None:
    from tools.tiny_model.readme import fill_readme

    fill_readme(arguments.profile)


if __name__ == "__main__":
    main()
