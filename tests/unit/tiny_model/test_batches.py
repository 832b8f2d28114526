import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.tiny_model.batches import CANVAS_BLOCK, MAX_CANVAS, Batch, BatchMaker
from tools.tiny_model.config import TrainConfig
from tools.tiny_model.tokenizer import BOS, EOS, EOT, MASK, token_id_of

CONFIG = TrainConfig(tokens_per_step=1_024, pool_size=96)
STEPS = (0, 1, 40, 5_000)


@pytest.fixture(scope="module")
def maker(tokenizer: Tokenizer) -> BatchMaker:
    return BatchMaker(tokenizer, CONFIG)


def assert_same(one: Batch, other: Batch) -> None:
    for name in Batch.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def restored(batch: Batch) -> np.ndarray:
    """The texts with what was hidden put back; padding is -1."""
    text_BT = batch.input_BT.copy()
    kept = batch.weight_M > 0
    text_BT.reshape(-1)[batch.masked_M[kept]] = batch.target_M[kept]
    return np.where(batch.is_padding_BT, -1, text_BT)


def test_a_batch_depends_on_seed_rank_and_step_alone(tokenizer: Tokenizer, maker: BatchMaker) -> None:
    fresh = BatchMaker(tokenizer, CONFIG)  # asked for in another order than `maker`
    for step in reversed(STEPS):
        assert_same(fresh.batch(0, step), maker.batch(0, step))


def test_ranks_and_steps_see_different_texts(maker: BatchMaker) -> None:
    batches = [maker.batch(0, 5), maker.batch(1, 5), maker.batch(0, 6)]
    texts = {row[row >= 0].tobytes() for batch in batches for row in restored(batch)}
    assert len(texts) > 0.9 * sum(len(batch.input_BT) for batch in batches)


@pytest.mark.parametrize("step", STEPS)
def test_masked_positions_are_what_the_loss_asks_for(tokenizer: Tokenizer, maker: BatchMaker, step: int) -> None:
    batch, mask = maker.batch(0, step), token_id_of(tokenizer, MASK)
    asked = batch.masked_M[batch.weight_M > 0]
    np.testing.assert_array_equal(np.flatnonzero(batch.input_BT == mask), asked)
    assert not batch.is_padding_BT.reshape(-1)[asked].any()
    assert (batch.target_M != mask).all()
    assert len(batch.masked_M) % 128 == 0


@pytest.mark.parametrize("step", STEPS)
def test_prompts_stay_visible_and_canvases_are_whole_blocks(tokenizer: Tokenizer, maker: BatchMaker, step: int) -> None:
    assistant, mask = token_id_of(tokenizer, "<|assistant|>"), token_id_of(tokenizer, MASK)
    batch = maker.batch(1, step)
    for row, hidden in zip(restored(batch), batch.input_BT == mask, strict=True):
        ids = row[row >= 0].tolist()
        assert ids[0] == token_id_of(tokenizer, BOS)
        canvas_start = len(ids) - ids[::-1].index(assistant)
        assert not hidden[:canvas_start].any()
        canvas = len(ids) - canvas_start
        assert canvas % CANVAS_BLOCK == 0
        assert CANVAS_BLOCK <= canvas <= MAX_CANVAS


def test_answers_end_in_end_of_text_up_to_the_end_of_the_canvas(tokenizer: Tokenizer, maker: BatchMaker) -> None:
    eos, eot = token_id_of(tokenizer, EOS), token_id_of(tokenizer, EOT)
    chats = 0
    for row in restored(maker.batch(0, 5_000)):
        ids = row[row >= 0].tolist()
        if eot in ids and eos in ids:
            chats += 1
            assert set(ids[ids.index(eos) :]) == {eos}
    assert chats


def test_batches_keep_to_the_token_budget_and_pad_little(maker: BatchMaker) -> None:
    batches = [maker.batch(0, step) for step in range(5_000, 5_032)]
    sizes = [batch.input_BT.size for batch in batches]
    assert max(sizes) <= CONFIG.tokens_per_step
    assert min(sizes) > CONFIG.tokens_per_step // 2
    assert np.mean([batch.is_padding_BT.mean() for batch in batches]) < 0.25


def test_equations_give_way_to_problems(tokenizer: Tokenizer, maker: BatchMaker) -> None:
    def share(steps: range) -> float:
        return float(np.mean(np.concatenate([maker.batch(0, step).is_equations_M for step in steps])))

    assert share(range(16)) > 2 * share(range(4_800, 4_816))


def test_a_conversation_longer_than_the_context_loses_its_oldest_part(tokenizer: Tokenizer) -> None:
    """Positions beyond the context do not exist: one such text once ended a training run."""
    bos, assistant = token_id_of(tokenizer, BOS), token_id_of(tokenizer, "<|assistant|>")
    short = BatchMaker(tokenizer, TrainConfig(tokens_per_step=1_024, pool_size=96, max_length=300))
    batches = [short.batch(0, step) for step in range(5_000, 5_032)]
    assert max(batch.input_BT.shape[1] for batch in batches) <= 304  # 300, padded to a multiple of 16
    for row in restored(max(batches, key=lambda batch: batch.input_BT.shape[1])):
        ids = row[row >= 0].tolist()
        assert ids[0] == bos
        assert assistant in ids
