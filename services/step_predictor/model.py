"""The trained predictor: what it was made for, and its forecasts.

Two files in the profile's folder: `step_predictor.onnx`, two ensembles of trees (steps left and blocks left, as shares
of the output length and of the blocks), and `step_predictor.json` (`Card`). A forecast keeps what is certain whatever
the trees say:
1. blocks left: at least one if the request stands between two blocks, none once its block holds an EOS, never more
   than there are;
2. steps left: at least one for each such block and one for the block that is under way; never more than tokens, since
   each step commits one;
3. the upper bound: the mean times a factor, the quantile of true / predicted over requests that the trees had not
   seen, by predicted steps and by whether the end is in sight (split conformal).
4. A predictor for another model, block size, manner, threshold or other weights than the profile's is refused: a
   wrong forecast looks like a right one, while the profile's mean steps, by which the controller goes without one,
   claim nothing.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime

from contracts import messages as m
from services.digest import weights_digest
from services.opening import PLAIN, Manner
from services.profile import Profile
from services.settings import ConfigError
from services.step_predictor.config import CARD_FILE, MODEL_FILE
from services.step_predictor.features import FEATURES, Floats, feature_rows

logger = logging.getLogger(__name__)

INPUT, STEPS, BLOCKS = "features", "steps", "blocks"


class Factors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Upper bound over mean, by level and by predicted steps."""

    edges: list[float]  # between the buckets of predicted steps, ascending
    factors: list[list[float]]  # [level][bucket], one bucket more than edges

    def __post_init__(self) -> None:
        if any(len(row) != len(self.edges) + 1 for row in self.factors):
            raise ValueError("factors must have one bucket more than there are edges")

    def of(self, level: int, steps_X: Floats) -> Floats:
        """The factor of each prediction at that level (index)."""
        bucket_X = np.searchsorted(self.edges, steps_X, side="right")
        found_X: Floats = np.asarray(self.factors[level], dtype=np.float32)[bucket_X]
        return found_X


class Upper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The upper bounds that are known."""

    levels: list[float]  # ascending
    open_end: Factors  # no EOS is in the block
    end_in_sight: Factors

    def __post_init__(self) -> None:
        if not self.levels or {len(self.open_end.factors), len(self.end_in_sight.factors)} != {len(self.levels)}:
            raise ValueError("there must be levels, and factors for each")

    def level_for(self, wanted: float) -> int:
        """Index of the lowest level that is at least the wanted one. Raises ConfigError."""
        for index, level in enumerate(self.levels):
            if level >= wanted:
                return index
        raise ConfigError(f"upper_level {wanted:g} is above the highest that the predictor knows, {self.levels[-1]:g}")


class FirstForecast(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What requests needed in all at a threshold: the one-shot forecast for one that has not begun."""

    threshold: float
    steps: float  # mean
    blocks: float  # mean


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trained predictor is for, and how good it is. `step_predictor.json`."""

    features: list[str]
    model: str  # that was recorded
    weights: str  # hash of its files
    block_size: int
    manner: Manner = PLAIN  # of the recorded blocks
    thresholds: list[float]  # that were recorded
    trained_on: dict[str, Any]  # prompts and rows
    first: list[FirstForecast]
    upper: Upper
    refresh_tokens: int = 1  # g: a forecast is renewed once so many more tokens are committed
    evaluation: dict[str, Any] = {}  # of tools.predictor evaluate


def read_card(path: Path) -> Card:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Card)
    except FileNotFoundError:
        raise ConfigError(f"no step predictor at {path}: train one, `python -m tools.predictor train`") from None
    except OSError as error:
        raise ConfigError(f"the step predictor's {path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is of another version or damaged: {error}") from None


class StepModel:
    """The trees and their card. One thread."""

    def __init__(self, model: bytes | Path, card: Card) -> None:
        """Raises ConfigError unless the card's features are this program's and the model fits them."""
        if (theirs := tuple(card.features)) != FEATURES:
            missing, surplus = ([x for x in a if x not in b] for a, b in ((FEATURES, theirs), (theirs, FEATURES)))
            raise ConfigError(
                "the step predictor was trained on another version of the features"
                f" (it lacks {missing}, has besides {surplus}): train it anew, `python -m tools.predictor train`"
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            content = model.read_bytes() if isinstance(model, Path) else model
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            steps_X, blocks_X = self.shares(np.zeros((1, len(FEATURES)), dtype=np.float32))
        except FileNotFoundError:
            raise ConfigError(f"no step predictor at {model!s}: train one, `python -m tools.predictor train`") from None
        except Exception as error:  # onnxruntime has no common class of its errors
            raise ConfigError(f"the step predictor's {MODEL_FILE} cannot be used: {error}") from None
        if steps_X.shape != (1,) or blocks_X.shape != (1,):
            raise ConfigError(f"the step predictor's {MODEL_FILE} gives no single number of steps and of blocks")
        self.card = card

    @classmethod
    def of(cls, profile: Profile) -> "StepModel":
        """The profile's. Raises ConfigError."""
        folder = Path(profile.folder)
        card = read_card(folder / CARD_FILE)
        _check_fit(folder / CARD_FILE, card, profile)
        return cls(folder / MODEL_FILE, card)

    def shares(self, rows_XF: Floats) -> tuple[Floats, Floats]:
        """Steps left as a share of O, and blocks left as a share of the blocks, as the trees say it. [X] each."""
        steps, blocks = self._session.run([STEPS, BLOCKS], {INPUT: rows_XF})
        return steps.reshape(-1), blocks.reshape(-1)

    def means(self, requests: Sequence[m.RequestReport], thresholds: Sequence[float]) -> tuple[Floats, Floats]:
        """Steps left and blocks left of N requests at T thresholds, [N, T] each."""
        block_size, shape = self.card.block_size, (len(requests), len(thresholds))
        steps_X, blocks_X = self.shares(feature_rows(requests, thresholds, block_size))
        return bounded(requests, steps_X.reshape(shape), blocks_X.reshape(shape), block_size)

    def forecast(
        self, requests: Sequence[m.RequestReport], thresholds: Sequence[float], level: int
    ) -> list[m.RequestForecast]:
        """One for each request, with a number for each threshold. `level`: index of the upper bound's."""
        if not requests:
            return []
        steps_NT, blocks_NT = self.means(requests, thresholds)
        upper_NT = self.upper(requests, steps_NT, level)
        return [
            m.RequestForecast(r.request_id, r.attempt, r.steps, tuple(steps), tuple(upper), tuple(blocks))
            for r, steps, upper, blocks in zip(
                requests, steps_NT.tolist(), upper_NT.tolist(), blocks_NT.tolist(), strict=True
            )
        ]

    def upper(self, requests: Sequence[m.RequestReport], steps_NT: Floats, level: int) -> Floats:
        """The upper bound of steps left, [N, T] (rule 3)."""
        in_sight_N1 = np.array([[request.ends_in_block] for request in requests])
        upper = self.card.upper
        factor_NT = np.where(in_sight_N1, upper.end_in_sight.of(level, steps_NT), upper.open_end.of(level, steps_NT))
        bound_NT: Floats = steps_NT * factor_NT
        return bound_NT


def _check_fit(path: Path, card: Card, profile: Profile) -> None:
    """Rule 4. Raises ConfigError."""
    decoding = profile.decoding
    if card.model != profile.model or card.block_size != decoding.block_size:
        raise ConfigError(
            f"{path} was trained for {card.model} with blocks of {card.block_size}, the profile"
            f" serves {profile.model} with blocks of {decoding.block_size}"
        )
    if card.manner != decoding.manner:
        raise ConfigError(
            f"{path} was trained with {card.manner.words}, the profile serves with {decoding.manner.words}: record"
            " and train anew, as docs/step_predictor.md says, and measure decoding.steps_by_threshold anew"
        )
    if unknown := [threshold for threshold in decoding.thresholds if threshold not in card.thresholds]:
        raise ConfigError(
            f"{path} was trained at the thresholds {card.thresholds}, the profile also has {unknown}: record runs at"
            " these too (`python -m tools.traces record`) and train anew, `python -m tools.predictor train`"
        )
    try:
        weights = weights_digest(profile.weights_folder)
    except OSError as error:
        raise ConfigError(f"the weights in {profile.weights_folder} cannot be read: {error.strerror}") from None
    if not weights:
        logger.warning("no weights in %s: not checked that %s belongs to them", profile.weights_folder, path)
    elif weights != card.weights:
        raise ConfigError(
            f"{path} was trained for the weights {card.weights}, those in {profile.weights_folder} are {weights}:"
            " record and train anew, as docs/step_predictor.md says"
        )


def bounded(
    requests: Sequence[m.RequestReport], steps_share_NT: Floats, blocks_share_NT: Floats, block_size: int
) -> tuple[Floats, Floats]:
    """Steps left and blocks left, [N, T] each, from the shares that trees say (rules 1 and 2)."""
    bounds_N5 = np.array([_bounds(request, block_size) for request in requests], dtype=np.float32)
    num_blocks_N1, least_N1, most_N1, begun_N1, tokens_N1 = (bounds_N5[:, index : index + 1] for index in range(5))
    blocks_NT = np.clip(blocks_share_NT * num_blocks_N1, least_N1, most_N1)
    least_steps_NT = blocks_NT + begun_N1
    steps_NT = steps_share_NT * (num_blocks_N1 * block_size)
    return np.clip(steps_NT, least_steps_NT, np.maximum(tokens_N1, least_steps_NT)), blocks_NT


def _bounds(r: m.RequestReport, block_size: int) -> tuple[int, int, int, int, int]:
    """All blocks, fewest and most still to begin, those under way (0 or 1), and the most steps left."""
    begun = int(r.steps_in_block > 0)
    most = 0 if r.ends_in_block else r.num_blocks - r.block_index - begun
    tokens = r.tokens_left_in_block if begun else 0
    return r.num_blocks, min(1 - begun, most), most, begun, tokens + most * block_size
