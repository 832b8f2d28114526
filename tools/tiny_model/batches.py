"""Training batches: which texts, and what of them is hidden.

1. The batch of a step is a pure function of (seed, rank, step): a run that resumes sees what it would have seen.
2. Two kinds of text: a chat whose answer is to be filled in, and dense equations (arithmetic is learned there; their
   share falls as training goes on, that of numbered prompts rises).
3. A canvas is a multiple of CANVAS_BLOCK tokens, filled with end-of-text after the answer, as serving has it. Some end
   before the answer does: what a model sees that serves with `blocks_ahead`.
4. An answer is masked either uniformly (LLaDA's objective), or left to right by block, or from one "=" on: decoding
   by blocks visits the latter two kinds of state and rarely the first. On a canvas that ends early it is always by
   block, at one of the last `CUT_BLOCKS`.
5. A pool of texts serves POOL_STEPS steps: sorted by length, cut into batches of equal size, dealt out in random
   order. So a batch holds texts of like length and pads little.
"""
# ruff: noqa: N815 -- tensor names end in their shape

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tools.tiny_model.config import Mixture, TrainConfig
from tools.tiny_model.tasks import TAUGHT, Problem, equation, sample
from tools.tiny_model.tokenizer import BOS, EOS, EOT, MASK, ROLES, token_id_of

CANVAS_BLOCK = 32
MAX_CANVAS = 256
CUT_BLOCKS = 2
LENGTH_STEP = 16  # batches are padded to a multiple of this, so that only a few shapes occur
MASKED_STEP = 128
POOL_STEPS = 16
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be brief.",
    "You solve small arithmetic problems.",
    "Think step by step.",
    "Answer the question.",
)
# Of the answers; the others are hidden from one "=" on.
UNIFORM_SHARE = 0.25
BY_BLOCK_SHARE = 0.4
# How much the loss of a token counts beside the tokens that a state asks for.
LATER_WEIGHT = 0.3
TAIL_WEIGHT = 0.05
RESULT_WEIGHT = 3.0

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """B texts of padded length T; M counts the masked positions, padded with weight 0."""

    input_BT: Ints
    is_padding_BT: Bools
    masked_M: Ints  # flat positions in B * T
    target_M: Ints
    weight_M: Floats
    is_equations_M: Bools


@dataclass(frozen=True)
class Text:
    """Prompt tokens, then a canvas; `num_content` tokens of the canvas matter, the rest is end-of-text."""

    prompt: list[int]
    canvas: list[int]
    num_content: int
    is_equations: bool = False
    is_cut: bool = False  # the answer goes on

    def __len__(self) -> int:
        return len(self.prompt) + len(self.canvas)


class BatchMaker:
    """Draws the batch of a step."""

    def __init__(self, tokenizer: Tokenizer, config: TrainConfig) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._bos, self._eos, self._mask, self._eot = (token_id_of(tokenizer, name) for name in (BOS, EOS, MASK, EOT))
        self._roles = {role: token_id_of(tokenizer, name) for role, name in ROLES.items()}
        self._equals = token_id_of(tokenizer, "=")
        self._digits = {token_id_of(tokenizer, digit) for digit in "0123456789"}
        self._pool = lru_cache(maxsize=4)(self._draw_pool)

    def batch(self, rank: int, step: int) -> Batch:
        """The batch of this rank and step."""
        group = self._pool(rank, step // POOL_STEPS)[step % POOL_STEPS]
        return self._masked([self._fitted(text) for text in group], Random(f"mask/{self._config.seed}/{rank}/{step}"))

    def _fitted(self, text: Text) -> Text:
        """Without the oldest part of a conversation that is longer than the model's context."""
        num_kept = self._config.max_length - len(text.canvas) - 1
        if len(text.prompt) <= num_kept + 1:
            return text
        return replace(text, prompt=[self._bos, *text.prompt[-num_kept:]])

    def _draw_pool(self, rank: int, pool_index: int) -> list[list[Text]]:
        """The groups of texts of POOL_STEPS steps, one a step."""
        rng = Random(f"pool/{self._config.seed}/{rank}/{pool_index}")
        groups: list[list[Text]] = []
        while len(groups) < POOL_STEPS:
            mixture = self._config.mixture_at(pool_index * POOL_STEPS)
            pool = sorted((self._text(rng, mixture) for _ in range(self._config.pool_size)), key=len)
            groups += self._groups(pool)
        return rng.sample(groups, POOL_STEPS)

    def _groups(self, pool: list[Text]) -> list[list[Text]]:
        """Cut the sorted pool into groups that fill the token budget; the shortest texts may be left over."""
        groups: list[list[Text]] = []
        while pool:
            num_rows = max(1, self._config.tokens_per_step // _round_up(len(pool[-1]), LENGTH_STEP))
            if num_rows > len(pool) and groups:
                break
            groups.append(pool[-num_rows:])
            pool = pool[:-num_rows]
        return groups

    def _text(self, rng: Random, mixture: Mixture) -> Text:
        if rng.random() < mixture.equations:
            return self._equations(rng)
        problem = sample(rng, "train", replace(TAUGHT, share=mixture.numbered), mixture.drill)
        return self._chat(rng, problem, mixture)

    def _chat(self, rng: Random, problem: Problem, mixture: Mixture) -> Text:
        prompt = [self._bos]
        if rng.random() < 0.04:
            prompt += self._message("system", rng.choice(SYSTEM_PROMPTS))
        while rng.random() < 0.04:
            earlier = sample(rng, "train", replace(TAUGHT, share=0.1))
            prompt += self._message("user", earlier.prompt) + self._message("assistant", earlier.answer)
        prompt += [*self._message("user", problem.prompt), self._roles["assistant"]]
        answer = [*self._ids(problem.answer), self._eos]
        if len(answer) > CANVAS_BLOCK and rng.random() < mixture.cut_canvas:
            length = rng.randrange(CANVAS_BLOCK, len(answer), CANVAS_BLOCK)
            return Text(prompt, answer[:length], length, is_cut=True)
        return Text(prompt, self._canvas(rng, answer, mixture.long_canvas), len(answer))

    def _canvas(self, rng: Random, answer: list[int], long_canvas: float) -> list[int]:
        """The answer on a canvas that just holds it, or (a share of `long_canvas`) on a longer one."""
        length = _round_up(len(answer), CANVAS_BLOCK)
        if length < MAX_CANVAS and rng.random() < long_canvas:
            length = rng.choice((rng.randrange(length, MAX_CANVAS, CANVAS_BLOCK), MAX_CANVAS))
        return answer + [self._eos] * (length - len(answer))

    def _equations(self, rng: Random) -> Text:
        """A canvas full of unrelated equations, now and then behind a prompt that has nothing to do with them."""
        prompt = [self._bos, self._roles["assistant"]]
        if rng.random() < 0.3:
            distraction = self._message("user", sample(rng, "train", replace(TAUGHT, share=0.0)).prompt)
            prompt = [self._bos, *distraction, self._roles["assistant"]]
        canvas: list[int] = []
        length = rng.choice((32, 64, 64, 96))
        while len(canvas) < length:
            a, op, b, result = equation(rng)
            canvas += self._ids(f" {a}{op}{b}={result}.")
        return Text(prompt, canvas[:length], length, is_equations=True)

    def _message(self, role: str, content: str) -> list[int]:
        return [self._roles[role], *self._ids(content), self._eot]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    # --- masking ---

    def _masked(self, texts: list[Text], rng: Random) -> Batch:
        num_rows, width = len(texts), _round_up(max(map(len, texts)), LENGTH_STEP)
        noise = np.random.Generator(np.random.PCG64(rng.getrandbits(64)))
        input_BT = np.full((num_rows, width), self._eos, np.int64)
        is_padding_BT = np.ones((num_rows, width), np.bool_)
        weight_BT = np.zeros((num_rows, width), np.float32)
        is_equations_B = np.array([text.is_equations for text in texts])
        # One mask level per row, spread evenly over the batch: less noise than independent draws.
        levels = [(index + rng.random()) / num_rows for index in range(num_rows)]
        rng.shuffle(levels)
        for row, (text, level) in enumerate(zip(texts, levels, strict=True)):
            start, end = len(text.prompt), len(text)
            input_BT[row, :end] = text.prompt + text.canvas
            is_padding_BT[row, :end] = False
            weight_BT[row, start:end] = self._weights(text, 0.02 + 0.98 * level, rng, noise)
        masked_M = np.flatnonzero(weight_BT)
        target_M = input_BT.reshape(-1)[masked_M]
        input_BT.reshape(-1)[masked_M] = self._mask
        weight_M = weight_BT.reshape(-1)[masked_M]
        missing = _round_up(len(masked_M), MASKED_STEP) - len(masked_M)
        return Batch(
            input_BT,
            is_padding_BT,
            np.pad(masked_M, (0, missing)),
            np.pad(target_M, (0, missing)),
            np.pad(weight_M, (0, missing)),
            np.pad(is_equations_B[masked_M // width], (0, missing)),
        )

    def _weights(self, text: Text, level: float, rng: Random, noise: np.random.Generator) -> Floats:
        """The loss weight of each canvas position: above 0 where it is masked, 0 where it is visible."""
        canvas = np.array(text.canvas)
        if text.is_equations:
            return self._equation_weights(canvas, level, rng, noise)
        if text.is_cut:
            first = max(0, len(canvas) - CUT_BLOCKS * CANVAS_BLOCK)
            return _block_by_block(first, len(canvas), len(canvas), level, rng, noise)
        kind = rng.random()
        equals = np.flatnonzero(canvas == self._equals)
        if kind < UNIFORM_SHARE:
            weights = _uniform(len(canvas), level, noise)
        elif kind < UNIFORM_SHARE + BY_BLOCK_SHARE or not len(equals):
            weights = _block_by_block(0, text.num_content, len(canvas), level, rng, noise)
        else:
            weights = self._from_equals(canvas, int(rng.choice(equals)) + 1)
        weights[text.num_content :] *= TAIL_WEIGHT
        return weights

    def _from_equals(self, canvas: Ints, cut: int) -> Floats:
        """All that follows one "=" is hidden; its result counts most."""
        weights = np.zeros(len(canvas), np.float32)
        weights[cut:] = LATER_WEIGHT
        weights[cut : self._result_end(canvas, cut)] = RESULT_WEIGHT
        return weights

    def _result_end(self, canvas: Ints, start: int) -> int:
        """One past the sign that ends the number at `start`: the sign tells how many digits it has."""
        end = start
        while end < len(canvas) and int(canvas[end]) in self._digits:
            end += 1
        return min(end + 1, len(canvas))

    def _equation_weights(self, canvas: Ints, level: float, rng: Random, noise: np.random.Generator) -> Floats:
        weights = np.zeros(len(canvas), np.float32)
        starts = [int(position) + 1 for position in np.flatnonzero(canvas == self._equals)]
        if rng.random() < 0.4 and starts:
            return self._from_equals(canvas, rng.choice(starts))
        skip = False
        for index, start in enumerate(starts):
            end = self._result_end(canvas, start)
            if skip:  # hidden together with the one before
                skip = False
            elif rng.random() < 0.5 and index + 1 < len(starts):  # hide its length and the next equation too
                next_end = self._result_end(canvas, starts[index + 1])
                weights[start:next_end] = LATER_WEIGHT
                weights[start:end] = 1.0
                skip = True
            else:
                hidden = noise.random(end - start) < max(level, 0.3)
                weights[start:end] = hidden
        return weights


def _uniform(length: int, level: float, noise: np.random.Generator) -> Floats:
    """LLaDA's objective: each token hidden with probability `level`, weighted by its inverse."""
    hidden = noise.random(length) < level
    return hidden.astype(np.float32) / np.float32(max(level, 0.1))


def _block_by_block(
    first: int, last: int, length: int, level: float, rng: Random, noise: np.random.Generator
) -> Floats:
    """Everything before a cut visible, the block at the cut partly hidden, everything after it hidden.

    The cut is at one of the positions [first, last).
    """
    block = rng.choice((8, 16, 32, 32, 32))
    cut = rng.randrange(first, last)
    if rng.random() < 0.8:
        cut = cut // block * block
    weights = np.full(length, LATER_WEIGHT, np.float32)
    weights[:cut] = 0.0
    window = slice(cut, min(cut + block, length))
    weights[window] = noise.random(window.stop - window.start) < level
    return weights


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
