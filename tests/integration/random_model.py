"""A served profile with random weights, so that tests of the stack need no trained model.

1. Everything follows from a seed: the same weights, hence the same answers, on every machine.
2. It is wide enough that a step takes some milliseconds, so that a fault meets requests that run.
3. Its head's rows of EOS and of the special tokens are zero: they are never the best, so an answer has exactly
   `max_tokens` tokens and its length, in steps, is known beforehand.
4. Answers hold spaces, upper and lower case and digits; every token is one character.
5. A random model decides on narrow margins, and float32 sums differ in their last digits with what rides along. So the
   prompts are chosen (`stable_prompts`, run by hand): their answers stay the same when all weights are disturbed by
   far more than that.
"""

import json
import math
import random
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from services.costs import DegreeProfile, PassCost, dump_latency
from services.denoiser.engine import Job, Threshold
from services.denoiser.instance import build_engine
from services.gateway.text import load_codec
from services.profile import load_profile
from tests.integration.stack import chat_body

MODEL = "random-llada"
BLOCK_SIZE = 16
MAX_CONTEXT_TOKENS = 512
MAX_OUTPUT_TOKENS = 256

_SPECIAL = ("<|pad|>", "<|endoftext|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|unk|>")
_PAD, _EOS, _MASK, _USER, _ASSISTANT, _UNKNOWN = range(len(_SPECIAL))
_CHARACTERS = string.ascii_letters + string.digits + " .,?+-=#"
_VOCABULARY = 80


class Shape(NamedTuple):
    """How large it is."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    mlp: int = 704


WIDE = Shape(width=2048, layers=1, heads=16, mlp=5632)  # two cores make a step of it faster, together, than one

_TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_profile(
    folder: Path,
    *,
    max_requests: int = 24,
    kv_tokens: int = 8192,
    tp_degree: int = 1,
    degrees: Sequence[int] = (),
    time_limit_s: float = 100,
    disturbance: float = 0.0,
    seed: int = 0,
    shape: Shape = Shape(),  # noqa: B008 (it cannot change)
) -> Path:
    """Makes the profile in `folder` and returns that. `degrees`: that it gives latencies for; (): `tp_degree`."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (folder / "profile.toml").write_text(
        f"""
model = "{MODEL}"
[decoding]
block_size = {BLOCK_SIZE}
cache = "dual"
threshold = 0.9
max_tokens = 64
steps_per_block = {BLOCK_SIZE - 1}
[limits]
max_context_tokens = {MAX_CONTEXT_TOKENS}
max_output_tokens = {MAX_OUTPUT_TOKENS}
time_limit_s = {time_limit_s}
[engine]
dtype = "float32"
device = "cpu"
threads = 1
tp_degree = {tp_degree}
kv_tokens = {kv_tokens}
max_requests = {max_requests}
max_pass_tokens = 2048
""",
        encoding="utf-8",
    )
    dump_latency(
        folder / "latency.json",
        "a guess",
        [DegreeProfile(tp_degree=degree, cost=_guess(degree / tp_degree)) for degree in degrees or (tp_degree,)],
    )
    _write_config(model, shape)
    _write_tokenizer(model)
    save_file(_weights(shape, seed, disturbance), model / "model.safetensors")
    return folder


def _guess(more_ranks: float) -> PassCost:
    """Twice the ranks take two thirds of the time."""
    share = more_ranks ** math.log2(2 / 3)
    return PassCost(curve=((16, 6 * share), (128, 15 * share), (512, 50 * share), (2048, 200 * share)))


def _write_config(model: Path, shape: Shape) -> None:
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": shape.width,
        "n_heads": shape.heads,
        "n_kv_heads": shape.heads,
        "n_layers": shape.layers,
        "mlp_hidden_size": shape.mlp,
        "vocab_size": _VOCABULARY,
        "embedding_size": _VOCABULARY,
        "max_sequence_length": MAX_CONTEXT_TOKENS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "weight_tying": False,
        "mask_token_id": _MASK,
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
    }
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _write_tokenizer(model: Path) -> None:
    """Characters as tokens: a WordLevel vocabulary over text that is split everywhere."""
    assert len(_SPECIAL) + len(_CHARACTERS) <= _VOCABULARY
    ids = {token: i for i, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": ids[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in _SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": _SPECIAL[_UNKNOWN]},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {
        "eos_token": _SPECIAL[_EOS],
        "pad_token": _SPECIAL[_PAD],
        "mask_token": _SPECIAL[_MASK],
        "chat_template": _TEMPLATE,
    }
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _weights(shape: Shape, seed: int, disturbance: float) -> dict[str, NDArray[Any]]:
    """Tensors by their names in the checkpoint; each entry is off by a share of about `disturbance`."""
    width, layers, _, mlp = shape
    rng = np.random.default_rng(seed)
    noise = np.random.default_rng(seed + 1_000_003)

    def matrix(rows: int, columns: int, scale: float) -> NDArray[Any]:
        exact = rng.standard_normal((rows, columns)) * scale / columns**0.5
        if disturbance:
            exact *= 1 + disturbance * noise.standard_normal(exact.shape)
        return exact.astype(np.float32)

    def ones() -> NDArray[Any]:
        return np.ones(width, dtype=np.float32)

    head = matrix(_VOCABULARY, width, 4.0)
    head[: len(_SPECIAL)] = 0.0
    head[len(_SPECIAL) + len(_CHARACTERS) :] = 0.0
    tensors = {
        "model.transformer.wte.weight": matrix(_VOCABULARY, width, width**0.5),
        "model.transformer.ln_f.weight": ones(),
        "model.transformer.ff_out.weight": head,
    }
    for index in range(layers):
        prefix = f"model.transformer.blocks.{index}."
        tensors |= {
            prefix + "attn_norm.weight": ones(),
            prefix + "ff_norm.weight": ones(),
            # sharp attention: positions differ, though all masks look alike
            prefix + "q_proj.weight": matrix(width, width, 2.0),
            prefix + "k_proj.weight": matrix(width, width, 2.0),
            prefix + "v_proj.weight": matrix(width, width, 2.0),
            prefix + "attn_out.weight": matrix(width, width, 1.0),
            prefix + "ff_proj.weight": matrix(mlp, width, 1.0),
            prefix + "up_proj.weight": matrix(mlp, width, 1.0),
            prefix + "ff_out.weight": matrix(width, mlp, 1.0),
        }
    return tensors


# --- prompts ------------------------------------------------------------------------------------------------------

# What `stable_prompts(range(90))` found.
STABLE_PROMPTS = (
    *(2, 5, 8, 17, 19, 21, 23, 26, 27, 31, 32, 37, 39, 41, 44, 47, 48, 63, 66, 67, 69, 70, 71, 76, 79, 85, 87, 89),
)
SELECTION_DISTURBANCE = 3e-4
PROMPT_TOKENS = 96  # to be asked for: six blocks, time enough for a fault to come in the middle
PROMPT_THRESHOLD = 0.9


def prompt(number: int) -> str:
    """The prompt of that number: 12 to 40 characters."""
    rng = random.Random(number)  # only `random()` promises the same numbers in every version of Python
    return "".join(_CHARACTERS[int(rng.random() * len(_CHARACTERS))] for _ in range(12 + int(rng.random() * 29)))


def body_of(number: int) -> dict[str, object]:
    """A chat call that asks for the answer to it, the same each time."""
    return chat_body(
        MODEL,
        prompt(number),
        max_tokens=PROMPT_TOKENS,
        threshold=PROMPT_THRESHOLD,
        temperature=temperature_of(number),
        seed=number,
    )


def temperature_of(number: int) -> float:
    """Half of the prompts are answered greedily, half sampled, with their number as the seed."""
    return 0.0 if number % 2 else 0.8


def stable_prompts(numbers: Iterable[int], folder: Path) -> tuple[int, ...]:
    """Those whose answers a disturbance of SELECTION_DISTURBANCE does not change (rule 5). Takes a while."""
    exact, disturbed = (
        _answers(write_profile(folder / str(share), disturbance=share), numbers)
        for share in (0.0, SELECTION_DISTURBANCE)
    )
    return tuple(number for number in numbers if exact[number] == disturbed[number])


def _answers(folder: Path, numbers: Iterable[int]) -> dict[int, list[int]]:
    profile = load_profile(folder)
    engine = build_engine(profile)
    codec = load_codec(profile.weights_folder)
    answers = {}
    for number in numbers:
        job = Job(
            request_id="only",
            prompt_ids=codec.encode_chat([{"role": "user", "content": prompt(number)}]),
            max_tokens=PROMPT_TOKENS,
            block_size=BLOCK_SIZE,
            choice=Threshold(PROMPT_THRESHOLD),
            temperature=temperature_of(number),
            seed=number,
        )
        engine.admit(job)
        while engine.progress("only").finished is None:
            engine.step()
        answers[number] = engine.output_ids("only")
        engine.remove("only")
    return answers
