from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from services.denoiser.engine import Engine, EngineConfig, Job, Threshold
from services.denoiser.loader import load_model
from tools.tiny_model.config import LAST_MIXTURE, LaterCycle, Mixture, ModelConfig, TrainConfig, mixture_at
from tools.tiny_model.export import export_model
from tools.tiny_model.network import TinyLLaDA, rotation_table
from tools.tiny_model.train import make_model_config


@pytest.fixture(scope="module")
def config(tokenizer: Tokenizer) -> ModelConfig:
    return make_model_config(tokenizer, d_model=64, n_layers=3, mlp_hidden_size=96)


@pytest.fixture(scope="module")
def network(config: ModelConfig) -> TinyLLaDA:
    torch.manual_seed(3)
    network = TinyLLaDA(config)
    with torch.no_grad():
        for parameter in network.parameters():  # as exported: bfloat16 values, and norms that matter
            parameter.mul_(1.0 if parameter.dim() == 2 else 0.7).copy_(parameter.bfloat16())
    return network


def logits(network: TinyLLaDA, rows: list[list[int]], wanted_M: torch.Tensor) -> torch.Tensor:
    width = max(map(len, rows))
    input_BT = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    padding_BT = torch.tensor([[False] * len(row) + [True] * (width - len(row)) for row in rows])
    bias_B11T = torch.where(padding_BT, -1e4, 0.0)[:, None, None, :]
    return network.logits(input_BT, bias_B11T, rotation_table(network.config, width), wanted_M).detach()


def test_the_products_engine_sees_the_network_that_was_trained(
    tokenizer: Tokenizer, config: ModelConfig, network: TinyLLaDA, tmp_path: Path
) -> None:
    export_model(tmp_path, config, network.state_dict(), tokenizer)
    engine = Engine(load_model(tmp_path), config=EngineConfig(kv_budget_tokens=256))
    prompt = tokenizer.encode("What is 12 + 7?").ids
    engine.admit(
        Job(request_id="a", prompt_ids=prompt, max_tokens=32, choice=Threshold(0.0), ignore_eos=True, cache="none")
    )
    commits = engine.step().requests[0].commits
    canvas = prompt + [config.mask_token_id] * 32
    expected_MV = logits(network, [canvas], torch.arange(len(prompt), len(canvas)))
    expected_MV[:, config.mask_token_id] = -torch.inf
    confidence_M, token_M = expected_MV.softmax(-1).max(-1)
    assert commits.token_ids == token_M.tolist()
    torch.testing.assert_close(torch.tensor(commits.confidences), confidence_M.double().float(), atol=1e-4, rtol=1e-3)


def test_padding_and_other_rows_change_nothing(network: TinyLLaDA) -> None:
    row = list(range(20, 50))
    alone = logits(network, [row], torch.tensor([7]))
    beside = logits(network, [list(range(40, 104)), row], torch.tensor([64 + 7]))
    torch.testing.assert_close(alone, beside, atol=1e-4, rtol=1e-4)


def test_tokens_see_what_comes_after_them(network: TinyLLaDA) -> None:
    one = logits(network, [[20, 21, 22, 23]], torch.tensor([0]))
    other = logits(network, [[20, 21, 22, 24]], torch.tensor([0]))
    assert (one - other).abs().max() > 1e-3


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="n_heads 5"):
        ModelConfig(vocab_size=8, bos_token_id=0, eos_token_id=1, mask_token_id=2, n_heads=5)


def test_the_learning_rate_warms_up_stays_and_falls_to_zero_in_each_cycle() -> None:
    cycles = (LaterCycle(40, 0.4), LaterCycle(20, 0.2), LaterCycle(20, 0.2, restarts=True))
    config = TrainConfig(
        first_cycle_steps=120, later_cycles=cycles, warmup_steps=10, decay_start=0.5, learning_rate=1.0
    )
    rates = [config.rate_at(step) for step in range(config.num_steps)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert set(rates[10:61]) == {1.0}
    assert rates[90] == pytest.approx(0.5)
    assert rates[119] == pytest.approx(1 / 60)
    assert rates[120] == pytest.approx(0.4)
    assert rates[140] == pytest.approx(0.2)
    assert rates[159] == pytest.approx(0.01)
    assert rates[160] == pytest.approx(0.2)
    assert rates[179] == pytest.approx(0.01)
    assert rates[180] == pytest.approx(0.02)  # a new optimizer warms up
    assert rates[189] == pytest.approx(0.2 * 11 / 20)
    assert [step for step in range(config.num_steps) if config.restarts_at(step)] == [180]


def test_mixtures_run_linearly_and_follow_the_cycle_whatever_its_length() -> None:
    table = (Mixture(0.0, 0.5, 0.0, 0.2), Mixture(0.5, 0.1, 0.4, 0.2))
    assert mixture_at(0.25, table) == Mixture(0.25, pytest.approx(0.3), pytest.approx(0.2), 0.2)
    assert mixture_at(0.5, table) == mixture_at(0.99, table) == table[-1]
    short, long = TrainConfig(first_cycle_steps=100), TrainConfig(first_cycle_steps=10_000)
    assert short.mixture_at(60) == long.mixture_at(6_000)
    assert long.mixture_at(9_000).numbered > 3 * long.mixture_at(3_000).numbered
    assert short.mixture_at(99).drill == 0
    assert short.mixture_at(100) == LAST_MIXTURE
