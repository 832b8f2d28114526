"""The tokenizer of the built-in model: all bytes, single digits, and the words of its tasks as whole tokens.

It is a byte-level BPE without merges and with `ignore_merges`: a word that is in the vocabulary is one token, any
other text falls back to its UTF-8 bytes, so nothing is unknown. Whole words without merges, because every merge
would spend a token on a fragment that no text of ours contains.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tools.tiny_model.tasks import TAUGHT, sample

BOS, EOS, MASK, EOT = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|eot_id|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (BOS, EOS, MASK, EOT, *ROLES.values())
VOCAB_SIZE = 576
# As LLaDA's template: it always ends with the assistant header, asked for or not.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{{ '<|' + role + '|>' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{{ '<|assistant|>' }}"
)
Message = dict[str, str]


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([split_digits, to_bytes])


def build_tokenizer(extra_texts: Iterable[str] = (), seed: int = 7, num_problems: int = 20_000) -> Tokenizer:
    """Build the vocabulary from generated problems; the most frequent words get a token of their own.

    `extra_texts` are counted as if each occurred in every hundredth problem (system prompts, for instance).
    """
    pre_tokenizer, rng = _pre_tokenizer(), Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(num_problems):
        problem = sample(rng, "train", TAUGHT)
        for text in (problem.prompt, problem.answer):
            counts.update(word for word, _ in pre_tokenizer.pre_tokenize_str(text))
    for text in extra_texts:
        counts.update({word: num_problems // 100 for word, _ in pre_tokenizer.pre_tokenize_str(text)})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Ties sort by the word itself, so that the vocabulary is the same on every run.
    words = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
    tokens = [*SPECIAL_TOKENS, *alphabet, *words][:VOCAB_SIZE]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def token_id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that is in the vocabulary."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def render_chat(messages: list[Message], template: str = CHAT_TEMPLATE) -> str:
    """The text that the model sees for `messages`, as the gateway renders it."""
    return ImmutableSandboxedEnvironment().from_string(template).render(messages=messages, bos_token=BOS)


def tokenizer_config(max_length: int) -> dict[str, object]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [EOT, *ROLES.values()],
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(max_length), indent=2) + "\n")
