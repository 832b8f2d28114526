"""The settings of the built-in model and of its training: the recipe, in numbers."""

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
class TrainConfig:
    """The schedule. It counts steps, never time, so that a run can be repeated and resumed exactly.

    `tokens_per_step` is the padded size of one rank's batch; `num_ranks` processes of one thread each work on one
    step together. Over `ramp_steps` the share of equations falls and that of numbered prompts rises.
    """

    seed: int = 1
    num_ranks: int = 2
    num_steps: int = 6_400
    warmup_steps: int = 100
    decay_steps: int = 3_800
    learning_rate: float = 3e-3
    muon_weight_decay: float = 0.02
    ramp_steps: int = 2_500
    tokens_per_step: int = 4_096
    max_length: int = 768  # of a text, in tokens: the model's max_sequence_length
    pool_size: int = 512
    checkpoint_every_steps: int = 200

    def __post_init__(self) -> None:
        if self.warmup_steps + self.decay_steps > self.num_steps:
            raise ValueError(f"num_steps {self.num_steps} is shorter than warmup_steps + decay_steps")

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, constant, linear decay to a fiftieth."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        cold = min(1.0, (self.num_steps - step) / self.decay_steps) if self.decay_steps else 1.0
        return self.learning_rate * warm * max(0.02, cold)
