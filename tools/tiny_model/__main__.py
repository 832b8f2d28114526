"""`python -m tools.tiny_model train|evaluate|sample`."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random


def main() -> None:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_model", description=__doc__)
    commands = parser.add_subparsers(required=True)
    _add_train(commands)
    _add_sample(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("train", help="train the model from scratch, or on from its last checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--work", type=Path, default=Path("runs/tiny_model"), help="folder for checkpoint and log")
    parser.add_argument("--steps", type=int, help="another number of steps than the recipe's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="without a C++ compiler: half as fast")
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> None:
    from tools.tiny_model.config import TrainConfig
    from tools.tiny_model.train import TrainJob, train

    config = TrainConfig(seed=arguments.seed)
    if arguments.steps:
        config = replace(config, num_steps=arguments.steps)
    train(TrainJob(arguments.out, arguments.work, config, compile=not arguments.no_compile))


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


if __name__ == "__main__":
    main()
