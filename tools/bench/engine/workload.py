"""What is decoded: a model of a size that fits a laptop, random prompts, and a threshold."""

import random
from pathlib import Path
from typing import Any

import msgspec

from services.denoiser.engine import CacheMode, Job, Threshold
from tools.bench.random_model import Gains, llada_config, write_model


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the model and of the requests."""

    num_layers: int = 8
    width: int = 512
    num_heads: int = 8
    mlp_width: int = 1536  # three times the width, as LLaDA-8B has
    vocab_size: int = 32768
    prompt_tokens: int = 256
    output_tokens: int = 128
    block_size: int = 32
    threshold: float = 0.9
    batch: int = 8

    @property
    def canvas_tokens(self) -> int:
        """Of one request."""
        return self.prompt_tokens + self.output_tokens

    @property
    def num_blocks(self) -> int:
        """Of one request."""
        return self.output_tokens // self.block_size

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return llada_config(
            width=self.width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            mlp_width=self.mlp_width,
            vocab_size=self.vocab_size,
            max_positions=self.canvas_tokens,
        )

    def write_model(self, folder: Path, *, seed: int = 0) -> Path:
        """Write the model into a new folder and return that."""
        return write_model(folder, self.config(), seed=seed, gains=GAINS)

    def prompts(self) -> list[list[int]]:
        """One for each request of a batch: random tokens, neither mask nor EOS, the same ones every time."""
        usable = self.vocab_size - 2
        return [random.Random(number).choices(range(usable), k=self.prompt_tokens) for number in range(self.batch)]

    def job(self, request_id: str, prompt: list[int], cache: CacheMode) -> Job:
        """A request, decoded past EOS."""
        return Job(
            request_id=request_id,
            prompt_ids=prompt,
            max_tokens=self.output_tokens,
            block_size=self.block_size,
            cache=cache,
            choice=Threshold(self.threshold),
            ignore_eos=True,
        )


# Of random weights the head's size decides how sure the model is. At the sizes above a step then commits about three
# tokens at threshold 0.9, as LLaDA-8B's do on GSM8K (3.02, from the artifact of the TeDiServe paper). The sharper
# attention is, and the more the layers add, the more float32's rounding is amplified: with these a confidence is off by
# 6e-5 at most, and decisions, which are rarely that close, are the same whatever the order of the sums.
GAINS = Gains(sharpness=1.5, rest=0.8, head=16.0)
