"""The settings of the built-in model and of its training: the recipe, in numbers."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate


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
    """What training texts are made of at `progress`, the part of the first cycle that is done: shares from 0 to 1.

    `equations` of all texts; `numbered` of the other texts' problems; `long_canvas` of the answers get a canvas that
    is longer than needed; `drill` of the problems are of the kinds that are learned last; `cut_canvas` of the answers
    that are longer than a block get a canvas that ends before they do.
    """

    progress: float
    equations: float
    numbered: float
    long_canvas: float
    drill: float = 0.0
    cut_canvas: float = 0.0


# Shares run linearly from one entry to the next. Arithmetic first; then single problems until copying and layout are
# learned, because numbered prompts that come earlier stall everything; then all that is served.
MIXTURES = (
    Mixture(0.0, equations=0.5, numbered=0.04, long_canvas=0.05),
    Mixture(0.2, equations=0.15, numbered=0.04, long_canvas=0.05),
    Mixture(0.45, equations=0.15, numbered=0.04, long_canvas=0.05),
    Mixture(0.7, equations=0.12, numbered=0.3, long_canvas=0.15),
)
# The later cycles: bare sums and lists, whose numbers are copied from anywhere, are still wrong after the first.
LAST_MIXTURE = Mixture(1.0, equations=0.1, numbered=0.25, long_canvas=0.15, drill=0.6)
# The last cycle of all: serving with `blocks_ahead` shows canvases that end before the answer does.
CUT_MIXTURE = replace(LAST_MIXTURE, cut_canvas=0.5)


def mixture_at(progress: float, mixtures: tuple[Mixture, ...] = MIXTURES) -> Mixture:
    """The mixture at this part of the first cycle, 0 at its start and 1 at its end."""
    index = bisect_right(mixtures, progress, key=lambda mixture: mixture.progress)
    if index == len(mixtures):
        return mixtures[-1]
    before, after = mixtures[index - 1], mixtures[index]
    share = (progress - before.progress) / (after.progress - before.progress)

    def between(low: float, high: float) -> float:
        return low + (high - low) * share

    return Mixture(
        progress,
        between(before.equations, after.equations),
        between(before.numbered, after.numbered),
        between(before.long_canvas, after.long_canvas),
    )


@dataclass(frozen=True)
class LaterCycle:
    """A further fall of the learning rate: from its share of the full rate to zero.

    A cycle that restarts begins from the weights as they are exported, with a new optimizer and a warm-up, so it can
    be run alone from a finished model.
    """

    steps: int
    rate_share: float
    restarts: bool = False
    mixture: Mixture = LAST_MIXTURE


@dataclass(frozen=True)
class TrainConfig:
    """The schedule. It counts steps, never time, so that a run can be repeated and resumed exactly.

    The learning rate warms up, stays, and from `decay_start` of the first cycle on falls linearly to zero. In each
    later cycle it starts at its share of the rate and falls to zero again.
    `tokens_per_step` is the padded size of one rank's batch; `num_ranks` processes of one thread each work on one
    step together.
    """

    seed: int = 1
    num_ranks: int = 2
    first_cycle_steps: int = 11_000
    later_cycles: tuple[LaterCycle, ...] = (
        LaterCycle(2_600, 0.5),
        LaterCycle(1_400, 0.3, restarts=True),
        LaterCycle(900, 0.2, restarts=True),
        LaterCycle(1_400, 0.3, restarts=True, mixture=CUT_MIXTURE),
    )
    warmup_steps: int = 100
    decay_start: float = 0.35
    learning_rate: float = 3e-3
    muon_weight_decay: float = 0.02
    tokens_per_step: int = 4_096
    max_length: int = 768  # of a text, in tokens: the model's max_sequence_length
    pool_size: int = 512
    checkpoint_every_steps: int = 200

    @property
    def num_steps(self) -> int:
        """Of all cycles."""
        return self.first_cycle_steps + sum(cycle.steps for cycle in self.later_cycles)

    @property
    def last_cycle_start(self) -> int:
        """The step at which the last cycle begins; 0 if there is but the first."""
        return self.num_steps - self.later_cycles[-1].steps if self.later_cycles else 0

    def restarts_at(self, step: int) -> bool:
        """Whether a cycle with a new optimizer begins at this step."""
        return any(start == step and cycle.restarts for start, cycle in self._cycle_starts)

    def mixture_at(self, step: int) -> Mixture:
        """What the texts of a step are made of."""
        if step < self.first_cycle_steps:
            return mixture_at(step / self.first_cycle_steps)
        return self._later_cycle(step)[1].mixture

    def rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.first_cycle_steps:
            warm = min(1.0, (step + 1) / self.warmup_steps)
            cold = min(1.0, (1 - step / self.first_cycle_steps) / (1 - self.decay_start))
            return self.learning_rate * warm * cold
        start, cycle = self._later_cycle(step)
        done = step - start
        warm = min(1.0, (done + 1) / self.warmup_steps) if cycle.restarts else 1.0
        return self.learning_rate * cycle.rate_share * warm * (cycle.steps - done) / cycle.steps

    @property
    def _cycle_starts(self) -> list[tuple[int, LaterCycle]]:
        lengths = (cycle.steps for cycle in self.later_cycles[:-1])
        return list(zip(accumulate(lengths, initial=self.first_cycle_steps), self.later_cycles, strict=False))

    def _later_cycle(self, step: int) -> tuple[int, LaterCycle]:
        """The later cycle of a step, and where it starts."""
        for start, cycle in self._cycle_starts:
            if start <= step < start + cycle.steps:
                return start, cycle
        raise ValueError(f"step {step} lies behind the last of {self.num_steps}")
