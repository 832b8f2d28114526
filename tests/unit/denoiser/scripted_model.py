"""A model that says what a test tells it to: which token it sees at each position, and how sure it is."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.denoiser.models import Batch, ModelShape
from services.denoiser.parallel import Alone

MASK_ID, EOS_ID, VOCAB = 0, 1, 10
OTHER_ID = 9  # gets what the scripted token leaves; never the argmax above confidence 0.5


class ScriptedModel:
    """`script` maps absolute positions to (token, confidence); it may be changed between steps.

    Shifted, row p says what is at position p + 1.
    """

    def __init__(self, script: Mapping[int, tuple[int, float]], *, shifted: bool = False) -> None:
        self.script = script
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.shape = ModelShape(
            architecture="Scripted",
            vocab_size=VOCAB,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            max_positions=100,
            mask_id=MASK_ID,
            eos_ids=(EOS_ID,),
            shifted=shifted,
        )
        self.ranks, self.first_token_id, self.varlen = Alone(), 0, None
        self.batch: Batch | None = None  # of the last pass
        self.asked: list[int] = []  # positions of the rows whose logits the last pass wanted

    def rotary(self, windows: Sequence[tuple[int, int]]) -> Tensor:
        return torch.cat([torch.arange(*window) for window in windows])

    def hidden(self, batch: Batch) -> Tensor:
        self.batch = batch
        self.asked = []
        return batch.rotary_T[batch.wanted_M].unsqueeze(-1)

    def logits(self, hidden_Md: Tensor) -> Tensor:
        positions = hidden_Md.squeeze(-1).tolist()
        self.asked += positions
        logits = torch.full((len(positions), VOCAB), -torch.inf)
        for row, position in enumerate(positions):
            token, confidence = self.script[position + self.shape.shifted]
            logits[row, token] = math.log(confidence)
            logits[row, OTHER_ID] = math.log1p(-confidence)
        return logits
