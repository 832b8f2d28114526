"""From logits to the tokens that a step commits.

Scores, on the device, for the rows alone that predict an eligible position:
1. the mask token's logit is minus infinity (a predicted mask would stay masked for ever);
2. the token is argmax(logits - T ln(-ln u)), the plain argmax at temperature 0; ties: the lowest id;
3. u is a pure function of (seed, position, step in block, token id): neither batch nor layout nor a move changes it;
4. the confidence is the token's softmax probability under the logits without noise or temperature.
Of several ranks each scores its own share of the vocabulary; then a few numbers a token are exchanged, never logits.
Choice, on the host, for one request at a time, from confidences by ascending position:
5. Threshold commits all that reach it, and always the most confident one; its opening may ask for more early in a
   block (services/opening.py);
6. Factor commits ranks 1 to k - 1, where k is the first rank whose confidence is below 1 - factor / (k + 1); the first
   rank always passes, and if only the last fails, it is committed too;
7. FixedSchedule commits the step's quota, the most confident first.
Two more are there to compare with Dream's reference, whose uncached decoding knows no blocks:
8. Budget is Threshold among the most confident that the steps so far would have committed in a fixed schedule;
9. EntropySchedule commits a share of the masks, the surest first, by the negative entropy of their distributions.
Ties: the lowest position. A committed position is final.

Shapes: M rows of all requests in a pass, V token ids (of this rank), R ranks.
"""

from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.denoiser.parallel import Alone, Ranks
from services.opening import NO_OPENING, Opening

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

ALONE = Alone()
_LAST_TIME = 1e-3  # of an entropy schedule
_LEAST_EXPONENT = -80.0  # adds nothing to a sum from 1 on in float32; below -104 a CPU's exp takes fifty times as long


class Threshold(msgspec.Struct, frozen=True, tag=True):
    """Commit what is at least this confident (0 to 1). Can be turned while the request runs."""

    value: float
    opening: Opening = NO_OPENING


class Factor(msgspec.Struct, frozen=True, tag=True):
    """Commit the more at once, the surer the model is; 1.0 is usual, larger commits more."""

    value: float


class FixedSchedule(msgspec.Struct, frozen=True, tag=True):
    """Spread the tokens evenly over this many steps for the whole output area; a multiple of its blocks."""

    steps: int


class Budget(msgspec.Struct, frozen=True, tag=True):
    """A threshold (0 to 1) that commits no more than was due in a fixed schedule of so many steps."""

    value: float
    steps: int


class EntropySchedule(msgspec.Struct, frozen=True, tag=True):
    """Time runs evenly from 1 to almost 0 in so many steps, and each commits its share of what is still masked."""

    steps: int


ChoiceRule: TypeAlias = Threshold | Factor | FixedSchedule | Budget | EntropySchedule


def quota(num_masks: int, steps_per_block: int, step: int) -> int:
    """Tokens that step `step` of a block commits, of the `num_masks` it starts with."""
    return num_masks // steps_per_block + (step < num_masks % steps_per_block)


def budget(num_masks: int, steps_per_block: int, step: int) -> int:
    """Tokens that a block of `num_masks` may have committed by the end of step `step`."""
    return num_masks * min(step + 1, steps_per_block) // steps_per_block


def share_of_time(num_masked: int, steps_per_block: int, step: int) -> int:
    """Tokens that step `step` commits of those still masked, in float32 as in the reference; the last step all."""
    if step >= steps_per_block - 1:
        return num_masked
    time = torch.linspace(1.0, _LAST_TIME, steps_per_block + 1)
    return int(num_masked * (1.0 - time[step + 1] / time[step]))


def choose_by_threshold(confidence: FloatArray, threshold: float) -> BoolArray:
    """Which positions reach the threshold, and in any case the most confident."""
    chosen = confidence >= threshold
    chosen[confidence.argmax()] = True
    return chosen


def choose_by_factor(confidence: FloatArray, factor: float) -> BoolArray:
    """Which positions pass the bound of their rank."""
    order = np.argsort(-confidence, kind="stable")
    rank = np.arange(1, len(order) + 1)
    fails = confidence[order] < 1.0 - factor / (rank + 1)
    fails[0] = False
    fails[-1] = False  # the last rank never holds itself back: if it is the first to fail, all are committed
    return _the_first(order, int(fails.argmax()) if fails.any() else len(order))


def choose_by_budget(confidence: FloatArray, threshold: float, count: int) -> BoolArray:
    """Which of the `count` most confident positions reach the threshold, and in any case the most confident."""
    return choose_by_threshold(confidence, threshold) & choose_by_quota(confidence, count)


def choose_by_quota(confidence: FloatArray, count: int) -> BoolArray:
    """The `count` most confident positions."""
    return _the_first(np.argsort(-confidence, kind="stable"), count)


def _the_first(order: IntArray, count: int) -> BoolArray:
    chosen = np.zeros(len(order), dtype=np.bool_)
    chosen[order[:count]] = True
    return chosen


class Noise(msgspec.Struct, frozen=True):
    """Sampling noise for the rows of a pass whose temperature is above 0: N of M."""

    rows: IntArray  # [N], which ones, ascending
    keys: IntArray  # [N], from `noise_keys`
    temperature: FloatArray  # [N]

    def between(self, first: int, last: int) -> "Noise | None":
        """The part for rows `first` to `last` - 1, counted from `first`."""
        start, end = np.searchsorted(self.rows, (first, last))
        if start == end:
            return None
        return Noise(self.rows[start:end] - first, self.keys[start:end], self.temperature[start:end])


def score(
    logits_MV: Tensor, mask_id: int, noise: Noise | None = None, *, first_id: int = 0, ranks: Ranks = ALONE
) -> tuple[Tensor, Tensor]:
    """Token [M] int64 and its confidence [M] for each row; overwrites the logits, which are of ids from `first_id` on.

    Every rank gets the same bits.
    """
    logits_MV = _without_mask(logits_MV, mask_id - first_id)
    best_M, token_M = logits_MV.max(-1)
    value_M, logit_M = best_M, best_M  # of the token: what decides between ranks, and what its confidence comes from
    if noise is not None:
        value_M = best_M.double()
        _sample(logits_MV, noise, first_id, token_M, value_M)
        logit_M = logits_MV.gather(-1, token_M.unsqueeze(-1)).squeeze(-1)
    # exp(l - logsumexp) in one pass: the largest term of the sum is 1, so it can neither overflow nor vanish
    total_M = logits_MV.sub_(best_M.unsqueeze(-1)).clamp_min_(_LEAST_EXPONENT).exp_().sum(-1)
    if ranks.size > 1:
        numbers = [best_M, total_M, token_M + first_id] + ([value_M, logit_M] if noise is not None else [])
        best_M, total_M, token_M, logit_M = _merge(ranks.all_gather(torch.stack([x.double() for x in numbers])))
    return token_M, total_M.reciprocal() if noise is None else (logit_M - best_M).exp() / total_M


def _without_mask(logits_MV: Tensor, mask_column: int) -> Tensor:
    logits_MV = logits_MV.float()
    if 0 <= mask_column < logits_MV.shape[-1]:  # or it is another rank's
        logits_MV[:, mask_column] = -torch.inf
    return logits_MV


def _sample(logits_MV: Tensor, noise: Noise, first_id: int, token_M: Tensor, value_M: Tensor) -> None:
    """Overwrites token and value of the noisy rows."""
    device = logits_MV.device
    rows, keys = torch.from_numpy(noise.rows).to(device), torch.from_numpy(noise.keys).to(device)
    temperature = torch.from_numpy(noise.temperature).to(device)
    uniform_MV = uniforms(keys, logits_MV.shape[-1], first_id)
    value_M[rows], token_M[rows] = gumbel_max(logits_MV[rows], uniform_MV, temperature)


def _merge(numbers_RNM: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Best logit, sum of exp(l - best), token and its logit over the whole vocabulary, from every rank's own."""
    best_RM, total_RM, token_RM, *noisy = numbers_RNM.unbind(1)
    value_RM, logit_RM = noisy or (best_RM, best_RM)
    best_M = best_RM.amax(0)
    total_M = total_RM.mul((best_RM - best_M).exp()).sum(0)
    winner_1M = value_RM.argmax(0, keepdim=True)  # the first of equals has the lower ids
    return best_M, total_M, token_RM.gather(0, winner_1M)[0].long(), logit_RM.gather(0, winner_1M)[0]


def negative_entropy(logits_MV: Tensor, mask_id: int, *, first_id: int = 0, ranks: Ranks = ALONE) -> Tensor:
    """Sum of p ln p of each row [M]: 0 where it is sure of a token, less where it is not. Overwrites the logits."""
    logits_MV = _without_mask(logits_MV, mask_id - first_id)
    best_M = logits_MV.amax(-1)
    weight_MV = logits_MV.sub_(best_M.unsqueeze(-1)).exp_()
    mine_3M = torch.stack([best_M, weight_MV.sum(-1), torch.xlogy(weight_MV, weight_MV).sum(-1)]).double()
    best_RM, total_RM, sum_RM = ranks.all_gather(mine_3M).unbind(1)
    drop_RM = best_RM - best_RM.amax(0)  # a rank's sums are relative to its own best
    total_M = total_RM.mul(drop_RM.exp()).sum(0)
    return sum_RM.add(drop_RM * total_RM).mul(drop_RM.exp()).sum(0) / total_M - total_M.log()


def gumbel_max(logits_MV: Tensor, uniform_MV: Tensor, temperature_M: Tensor) -> tuple[Tensor, Tensor]:
    """The largest noisy logit of each row and its index, both [M], given uniform numbers in (0, 1).

    float64 as in the reference.
    """
    noise_MV = uniform_MV.log().neg_().log_().mul_(temperature_M.unsqueeze(-1))
    value_M, index_M = (logits_MV.double() - noise_MV).max(-1)
    return value_M, index_M


# SplitMix64: a counter, times an odd constant, through a mixer whose every output bit depends on every input bit.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def noise_keys(seed_M: IntArray, position_M: IntArray, step_M: IntArray) -> IntArray:
    """One key for each row [M], from its request's seed, its absolute position and the step in the block."""
    key_M = _mix_numpy(seed_M.astype(np.uint64))
    key_M = _mix_numpy(key_M ^ position_M.astype(np.uint64))
    return _mix_numpy(key_M ^ step_M.astype(np.uint64)).view(np.int64)


def uniforms(key_M: Tensor, vocab_size: int, first_id: int = 0) -> Tensor:
    """Uniform numbers in (0, 1), float64 [M, vocab_size], for token ids from `first_id` on."""
    counter_V = torch.arange(first_id + 1, first_id + vocab_size + 1, device=key_M.device) * _signed(_GOLDEN)
    bits_MV = _mix(key_M.unsqueeze(-1) + counter_V)
    return _shift_right(bits_MV, 12).double().add_(0.5).mul_(2.0**-52)  # + 0.5: never 0 or 1


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's mixer on int64, whose products wrap as unsigned ones do."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix_numpy(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(_GOLDEN)  # so that 0 does not stay 0
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))
