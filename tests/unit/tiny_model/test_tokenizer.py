import json
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tools.tiny_model.batches import MAX_CANVAS, SYSTEM_PROMPTS
from tools.tiny_model.tasks import TAUGHT, sample
from tools.tiny_model.tokenizer import (
    BOS,
    EOS,
    MASK,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    build_tokenizer,
    render_chat,
    token_id_of,
    tokenizer_config,
)


@given(text=st.text())
def test_any_text_comes_back_unchanged(tokenizer: Tokenizer, text: str) -> None:
    plain = text.replace("<|", "<")  # special tokens are not text
    assert tokenizer.decode(tokenizer.encode(plain).ids, skip_special_tokens=False) == plain


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12+107=119").tokens == list("12+107=119")


def test_words_of_the_tasks_are_single_tokens(tokenizer: Tokenizer) -> None:
    words = "Then he has 1+2=3 apples. #### 3"
    assert tokenizer.encode(words).tokens == (
        ["Then", "Ġhe", "Ġhas", "Ġ", "1", "+", "2", "=", "3", "Ġapples", ".", "Ġ####", "Ġ", "3"]
    )


def test_special_tokens_have_the_first_ids(tokenizer: Tokenizer) -> None:
    assert [token_id_of(tokenizer, token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


def test_every_build_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert build_tokenizer(SYSTEM_PROMPTS).to_str() == tokenizer.to_str()


def test_a_chat_ends_with_the_assistant_header(tokenizer: Tokenizer) -> None:
    text = render_chat([{"role": "user", "content": "  12+7=? "}])
    assert text == f"{BOS}<|user|>12+7=?<|eot_id|><|assistant|>"
    assert len(tokenizer.encode(text).ids) == 4 + 5  # four tokens around the content


def test_a_conversation_keeps_all_its_messages() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "1+1=2. #### 2"},
        {"role": "user", "content": "2+2=?"},
    ]
    assert render_chat(messages) == (
        f"{BOS}<|system|>Be brief.<|eot_id|><|user|>1+1=?<|eot_id|><|assistant|>1+1=2. #### 2<|eot_id|>"
        "<|user|>2+2=?<|eot_id|><|assistant|>"
    )


def test_every_answer_fits_the_longest_canvas(tokenizer: Tokenizer) -> None:
    rng = Random(5)
    lengths = [len(tokenizer.encode(sample(rng, "any", TAUGHT).answer).ids) for _ in range(5_000)]
    assert max(lengths) < MAX_CANVAS  # one place is left for end-of-text
    assert max(lengths) > 160  # and long answers do occur


def test_the_config_names_the_special_tokens() -> None:
    config = json.loads(json.dumps(tokenizer_config(768)))
    assert (config["bos_token"], config["eos_token"], config["pad_token"], config["mask_token"]) == (
        BOS,
        EOS,
        EOS,
        MASK,
    )
