import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools.tiny_model.config import LaterCycle, TrainConfig
from tools.tiny_model.plot import plot_loss
from tools.tiny_model.train import LOG_FIELDS, TrainJob, train

CONFIG = TrainConfig(
    first_cycle_steps=12,
    later_cycles=(LaterCycle(4, 0.5), LaterCycle(8, 0.4, restarts=True)),
    warmup_steps=2,
    tokens_per_step=256,
    pool_size=32,
    checkpoint_every_steps=5,
)


def run(
    folder: Path, stop_at_step: int | None = None, config: TrainConfig = CONFIG, start_folder: Path | None = None
) -> None:
    job = TrainJob(
        model_folder=folder / "model",
        work_folder=folder / "work",
        train=config,
        model={"d_model": 16, "mlp_hidden_size": 32, "n_layers": 2},
        compile=False,
        stop_at_step=stop_at_step,
        vocabulary_problems=500,
        start_folder=start_folder,
    )
    train(job)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run from the first step to the last: several processes, some 6 s."""
    folder = tmp_path_factory.mktemp("straight")
    run(folder)
    return folder


def test_a_run_that_was_interrupted_ends_exactly_as_one_that_was_not(straight: Path, tmp_path: Path) -> None:
    run(tmp_path / "interrupted", stop_at_step=8)
    assert not (tmp_path / "interrupted" / "model").exists()
    run(tmp_path / "interrupted")
    folders = [straight, tmp_path / "interrupted"]
    models = [folder / "model" / "model.safetensors" for folder in folders]
    assert models[0].read_bytes() == models[1].read_bytes()
    states = [torch.load(folder / "work" / "checkpoint.pt") for folder in folders]
    for name, tensor in states[0]["model"].items():
        assert torch.equal(tensor, states[1]["model"][name]), name
    assert_log_and_plot(straight / "work" / "log.csv", tmp_path / "loss.svg")


def test_the_last_cycle_run_alone_from_the_model_before_it_ends_as_in_one_run(straight: Path, tmp_path: Path) -> None:
    run(tmp_path / "before", config=replace(CONFIG, later_cycles=CONFIG.later_cycles[:1], first_cycle_steps=12))
    run(tmp_path / "alone", start_folder=tmp_path / "before" / "model")
    folders = [tmp_path / "before", tmp_path / "alone", straight]
    models = [folder / "model" / "model.safetensors" for folder in folders]
    assert models[1].read_bytes() == models[2].read_bytes() != models[0].read_bytes()


def test_only_a_last_cycle_that_restarts_begins_from_a_finished_model(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="restarts"):
        run(tmp_path, config=replace(CONFIG, later_cycles=(LaterCycle(8, 0.5),), num_ranks=1), start_folder=tmp_path)


def assert_log_and_plot(log: Path, plot: Path) -> None:
    with log.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == LOG_FIELDS
    assert [int(row["step"]) for row in rows] == [20]
    assert float(rows[0]["chat_loss"]) > 1
    assert float(rows[0]["cpu_s"]) > 0
    plot_loss(log, plot)
    assert plot.read_text().count("<polyline") == 2
