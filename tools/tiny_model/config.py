"""The settings of the built-in model and of its training: the recipe, in numbers."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the network; LLaDA's names without the abbreviations of its config.json."""

    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    mask_token_id: int
    d_model: int = 192
    n_heads: int = 4
    n_layers: int = 4
    mlp_hidden_size: int = 512
    max_sequence_length: int = 768
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ValueError(f"d_model {self.d_model} must be an even multiple of n_heads {self.n_heads}")


@dataclass(frozen=True)
class Mixture:
    """What training texts are made of from `step` on: shares from 0 to 1.

    `equations` of all texts; `numbered` of the other texts' problems; `long_canvas` of the answers get a canvas that
    is longer than needed. Of the answers, `uniform` are masked anywhere and `by_block` left to right; the others are
    hidden from one "=" on.
    """

    step: int
    equations: float
    numbered: float
    long_canvas: float
    uniform: float = 0.5
    by_block: float = 0.25


# Shares run linearly from one entry to the next; two entries of one step make a jump.
# Arithmetic first, then short problems until copying and layout are learned, then all that is served.
MIXTURES = (
    Mixture(0, equations=0.5, numbered=0.08, long_canvas=0.2),
    Mixture(2_500, equations=0.1, numbered=0.35, long_canvas=0.2),
    Mixture(2_608, equations=0.1, numbered=0.35, long_canvas=0.2),
    Mixture(2_608, equations=0.2, numbered=0.06, long_canvas=0.05),
    Mixture(3_404, equations=0.175, numbered=0.06, long_canvas=0.05),
    Mixture(3_800, equations=0.16, numbered=0.06, long_canvas=0.05),
    Mixture(4_400, equations=0.1, numbered=0.38, long_canvas=0.2),
    Mixture(5_004, equations=0.1, numbered=0.38, long_canvas=0.2),
    Mixture(5_004, equations=0.25, numbered=0.32, long_canvas=0.12),
    Mixture(6_400, equations=0.25, numbered=0.32, long_canvas=0.12),
    Mixture(6_400, equations=0.2, numbered=0.35, long_canvas=0.15, uniform=0.25, by_block=0.4),
    Mixture(8_400, equations=0.2, numbered=0.35, long_canvas=0.15, uniform=0.25, by_block=0.4),
    Mixture(8_400, equations=0.12, numbered=0.22, long_canvas=0.15, uniform=0.25, by_block=0.4),
)


def mixture_at(step: int, mixtures: tuple[Mixture, ...] = MIXTURES) -> Mixture:
    """The mixture of a step."""
    index = bisect_right(mixtures, step, key=lambda mixture: mixture.step)
    if index == len(mixtures):
        return mixtures[-1]
    before, after = mixtures[index - 1], mixtures[index]
    share = (step - before.step) / (after.step - before.step)

    def between(low: float, high: float) -> float:
        return low + (high - low) * share

    return Mixture(
        step,
        between(before.equations, after.equations),
        between(before.numbered, after.numbered),
        between(before.long_canvas, after.long_canvas),
        between(before.uniform, after.uniform),
        between(before.by_block, after.by_block),
    )


@dataclass(frozen=True)
class Decay:
    """From step `start` on the rate falls linearly, to be zero at `end`, from `factor` times where it stood."""

    start: int
    end: int
    factor: float = 1.0


@dataclass(frozen=True)
class TrainConfig:
    """The schedule. It counts steps, never time, so that a run can be repeated and resumed exactly.

    `tokens_per_step` is the padded size of one rank's batch; `num_ranks` processes of one thread each work on one
    step together.
    """

    seed: int = 1
    num_ranks: int = 2
    num_steps: int = 11_400
    warmup_steps: int = 100
    decays: tuple[Decay, ...] = (
        Decay(2_600, 6_400),
        Decay(3_400, 7_000),
        Decay(5_000, 8_200),
        Decay(6_400, 14_000, factor=2.0),
        Decay(8_400, 11_400),
    )
    learning_rate: float = 3e-3
    muon_weight_decay: float = 0.02
    tokens_per_step: int = 4_096
    max_length: int = 768  # of a text, in tokens: the model's max_sequence_length
    pool_size: int = 512
    checkpoint_every_steps: int = 200

    def __post_init__(self) -> None:
        starts = [decay.start for decay in self.decays]
        if starts != sorted(starts) or any(decay.end <= decay.start for decay in self.decays):
            raise ValueError(f"decays {self.decays} must be in order, each with its end after its start")

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, constant, then the decays, but never below a fiftieth."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        cold = 1.0
        for index, decay in enumerate(self.decays):
            if step >= decay.start:
                following = self.decays[index + 1 :]
                until = min(step, following[0].start) if following else step
                cold *= decay.factor * (decay.end - until) / (decay.end - decay.start)
        return self.learning_rate * warm * max(0.02, cold)
