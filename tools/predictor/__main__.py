"""`python -m tools.predictor train | export | evaluate`: in this order, from recordings to a profile's predictor."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from services.settings import ConfigError

_PROFILE = Path("profiles/tiny-cpu")
_TRAINED = Path("var/predictor")


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line (or these words) and run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.predictor", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    train = commands.add_parser("train", help="fit the trees to a recording")
    train.add_argument("--traces", type=Path, default=Path("var/traces/train"), help="(default: %(default)s)")
    train.add_argument("--out", type=Path, default=_TRAINED, help="folder for the trees (default: %(default)s)")
    train.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    train.set_defaults(run=_train)
    export = commands.add_parser("export", help="put trained trees into a profile, as ONNX")
    export.add_argument("--trained", type=Path, default=_TRAINED, help="folder of the trees (default: %(default)s)")
    export.add_argument("--profile", type=Path, default=_PROFILE, help="(default: %(default)s)")
    export.set_defaults(run=_export)
    evaluate = commands.add_parser("evaluate", help="measure a profile's predictor on prompts that it has not seen")
    evaluate.add_argument("--traces", type=Path, default=Path("var/traces/held_out"), help="(default: %(default)s)")
    evaluate.add_argument("--profile", type=Path, default=_PROFILE, help="(default: %(default)s)")
    evaluate.add_argument("--trained", type=Path, default=_TRAINED, help="what to compare with (default: %(default)s)")
    evaluate.add_argument("--plots", type=Path, help="folder for step_predictor_{progress,refresh}.svg")
    evaluate.add_argument("--keep", action="store_true", help="write g and the errors into the profile's card")
    evaluate.set_defaults(run=_evaluate)
    arguments = parser.parse_args(words)
    try:
        arguments.run(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


# The libraries for training are imported late: who only asks for help needs none.


def _train(arguments: argparse.Namespace) -> None:
    from tools.predictor.train import train
    from tools.traces.reader import open_traces

    card = train(open_traces(arguments.traces), arguments.out, arguments.threads)
    print(f"trained on {card.trained_on}: {arguments.out}")


def _export(arguments: argparse.Namespace) -> None:
    from tools.predictor.export import export

    print(f"wrote {export(arguments.trained, arguments.profile)}")


def _evaluate(arguments: argparse.Namespace) -> None:
    from services.profile import load_profile
    from services.step_predictor.config import CARD_FILE
    from services.step_predictor.model import StepModel
    from tools.predictor.evaluate import describe, evaluate
    from tools.predictor.train import write_card
    from tools.traces.reader import open_traces

    model, traces = StepModel.of(load_profile(arguments.profile)), open_traces(arguments.traces)
    if traces.recording.weights != model.card.weights:
        raise ConfigError(
            f"{arguments.traces} was recorded with weights {traces.recording.weights}, the predictor trained for "
            f"{model.card.weights}: record anew, or train anew"
        )
    found = evaluate(traces, model, arguments.trained)
    print(describe(found))
    if arguments.plots:
        from tools.predictor.plot import plot_progress, plot_refresh

        plot_progress(found, arguments.plots / "step_predictor_progress.svg")
        plot_refresh(found, arguments.plots / "step_predictor_refresh.svg")
    if arguments.keep:
        card = replace(model.card, refresh_tokens=found.refresh_tokens, evaluation=found.kept())
        write_card(arguments.profile / CARD_FILE, card)


if __name__ == "__main__":
    main()
