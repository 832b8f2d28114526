"""The paper's figures 6 and 7 with our numbers: error against progress, error and cost against refresh tokens."""

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from tools.predictor.evaluate import PARTS, Evaluation

mpl.rcParams |= {"svg.hashsalt": "step predictor", "svg.fonttype": "none"}

_LABELS = {
    "one-shot": "one-shot mean",
    "progress": "progress features",
    "paper": "progress and confidences",
    "all": "all features and rules",
}


def plot_progress(evaluation: Evaluation, path: Path) -> None:
    """Error of each variant against progress."""
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, errors in evaluation.errors.items():
        percents = [100 * (part + 0.5) / PARTS for part in range(len(errors))]
        axes.plot(percents, [100 * error for error in errors], marker="o", markersize=3, label=_LABELS[name])
    axes.set(xlabel="progress: steps run of all, %", ylabel="error of the steps left, %", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _save(figure, path)


def plot_refresh(evaluation: Evaluation, path: Path) -> None:
    """Error and cost against the tokens between two forecasts; the chosen number is marked."""
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    tokens = [one.tokens for one in evaluation.refreshes]
    axes.plot(tokens, [100 * one.error for one in evaluation.refreshes], marker="o", color="C0")
    axes.axvline(evaluation.refresh_tokens, color="grey", linestyle=":")
    axes.set(xlabel="tokens between two forecasts", xscale="log", ylim=(0, None))
    axes.set_ylabel("error of the steps left, %", color="C0")
    axes.set_xticks(tokens, [str(number) for number in tokens], minor=False)
    axes.minorticks_off()
    cost = axes.twinx()
    cost.plot(tokens, [one.forecasts for one in evaluation.refreshes], marker="s", color="C1")
    cost.set_ylabel("forecasts a request", color="C1")
    cost.set_ylim(0, None)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
