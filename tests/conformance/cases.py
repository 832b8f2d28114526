"""Reads folders of reference decodings ("golden cases") and runs the engine on them.

GOLDEN_DIR names the folder; without it `../shared/golden` beside the repository is used if it is there, else the tests
that need cases are skipped. A case is a folder with inputs.json and expected.json (and step_logits.safetensors).
"""

import functools
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from services.denoiser.engine import (
    Budget,
    ChoiceRule,
    Engine,
    EngineConfig,
    EntropySchedule,
    Factor,
    FixedSchedule,
    Job,
    RequestStep,
    Threshold,
)
from services.denoiser.loader import load_model
from services.denoiser.models import Batch, Model
from services.denoiser.parallel import Ranks

MAX_PASSES = 10_000  # a case that needs more has come off the rails


class Inputs(msgspec.Struct, kw_only=True):
    """inputs.json, as far as we use it."""

    case: str
    family: str
    model: str
    prompt_ids: list[int]
    gen_length: int
    block_length: int
    steps: int
    cache_mode: str
    algorithm: str
    threshold: float | None = None
    factor: float | None = None
    cfg_scale: float | None = None


class ExpectedCommit(msgspec.Struct):
    pos: int  # absolute
    token: int
    conf: float


class ExpectedStep(msgspec.Struct):
    kind: str
    query_start: int
    query_end: int
    commits: list[ExpectedCommit]


class Expected(msgspec.Struct):
    """expected.json, as far as we use it."""

    generated_ids: list[int]
    nfe: int
    steps: list[ExpectedStep]


class Case:
    """One reference decoding."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inputs = msgspec.json.decode((folder / "inputs.json").read_bytes(), type=Inputs)
        self.expected = msgspec.json.decode((folder / "expected.json").read_bytes(), type=Expected)
        self.model_folder = (folder / self.inputs.model).resolve()

    @property
    def rule(self) -> ChoiceRule:
        """The choice rule of the case."""
        inputs = self.inputs
        if inputs.algorithm == "entropy":
            return EntropySchedule(inputs.steps)
        if inputs.factor is not None:
            return Factor(inputs.factor)
        if inputs.threshold is None:
            return FixedSchedule(inputs.steps)
        return Budget(inputs.threshold, inputs.steps) if self.without_blocks else Threshold(inputs.threshold)

    @property
    def shifted(self) -> bool:
        """Row p of the logits predicts position p + 1."""
        return self.inputs.family == "dream"

    @property
    def without_blocks(self) -> bool:
        """Dream's reference without a cache: the output area is one block, whatever `block_length` says."""
        return self.shifted and self.inputs.cache_mode == "none"

    @property
    def block_size(self) -> int:
        """Output tokens of a block, as the engine is told."""
        return self.inputs.gen_length if self.without_blocks else self.inputs.block_length

    def job(self) -> Job:
        """The case as a request."""
        inputs = self.inputs
        return msgspec.convert(
            {
                "request_id": inputs.case,
                "prompt_ids": inputs.prompt_ids,
                "max_tokens": inputs.gen_length,
                "block_size": self.block_size,
                "cache": inputs.cache_mode,
                "choice": self.rule,
                "ignore_eos": True,
            },
            Job,
        )

    def step_logits(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Step number -> (logits of the window's rows, the window's first position), where stored."""
        path = self.folder / "step_logits.safetensors"
        if not path.is_file():
            return {}
        tensors = load_file(path)
        numbers = {int(name.split(".")[0].removeprefix("step")) for name in tensors}
        return {n: (tensors[f"step{n}.logits"], int(tensors[f"step{n}.window"][0])) for n in numbers}


def golden_dir() -> Path | None:
    """The folder of cases, if there is one."""
    if named := os.environ.get("GOLDEN_DIR"):
        folder = Path(named)
        if not folder.is_dir():
            raise ValueError(f"GOLDEN_DIR = {named} is no folder")
        return folder
    beside = Path(__file__).resolve().parents[3] / "shared" / "golden"
    return beside if beside.is_dir() else None


def cases_matching(*patterns: str) -> list[Case]:
    """All cases whose folder matches one of the patterns, by name."""
    folder = golden_dir()
    if folder is None:
        return []
    paths = sorted({path.parent for pattern in patterns for path in folder.glob(f"{pattern}/inputs.json")})
    return [Case(path) for path in paths]


@functools.cache
def model_of(folder: Path) -> Model:
    """A case's model in float32 on the CPU."""
    return load_model(folder)


class RecordingModel:
    """A model that keeps the logits of its last pass, and how many rows of them each request has."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.shape, self.device, self.dtype = model.shape, model.device, model.dtype
        self.rotary, self.ranks, self.first_token_id = model.rotary, model.ranks, model.first_token_id
        self.varlen = model.varlen
        self.logits_of_last_pass: list[torch.Tensor] = []
        self.counts: list[int] = []

    def hidden(self, batch: Batch) -> torch.Tensor:
        self.logits_of_last_pass.clear()
        self.counts = list(batch.wanted_counts)
        return self._model.hidden(batch)

    def logits(self, hidden_Md: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden_Md)
        self.logits_of_last_pass.append(logits.clone())  # the sampler overwrites them
        return logits


class Ran:
    """What the engine did to one case."""

    def __init__(self) -> None:
        self.steps: list[RequestStep] = []
        self.logits: list[torch.Tensor] = []  # of each step, rows by ascending eligible position
        self.output_ids: list[int] = []


def run(
    cases: list[Case],
    *,
    passes_between_starts: int = 0,
    ranks: Ranks | None = None,
    model: Model | None = None,
    **config: Any,
) -> dict[str, Ran]:
    """Decode cases of one model in one engine, each starting so many passes after the one before.

    Among several `ranks` this is one's engine, and its logits are of its share of the vocabulary. `model`: the cases'
    own, loaded in another way.
    """
    folder = cases[0].model_folder
    model = model or (load_model(folder, ranks=ranks) if ranks else model_of(folder))
    recording = RecordingModel(model)
    budget = sum(case.job().canvas_tokens for case in cases)
    engine = Engine(recording, config=EngineConfig(kv_budget_tokens=budget, max_requests=len(cases), **config))
    waiting, ran = list(cases), {case.inputs.case: Ran() for case in cases}
    for number in range(MAX_PASSES):
        while waiting and number >= (len(cases) - len(waiting)) * passes_between_starts:
            engine.admit(waiting.pop(0).job())
        _note(engine, recording, ran)
        if not waiting and not engine.running:
            return ran
    raise AssertionError(f"not done after {MAX_PASSES} passes: {engine.running}")


def _note(engine: Engine, model: RecordingModel, ran: dict[str, Ran]) -> None:
    result = engine.step()
    if not result.requests:
        return
    pieces = torch.split(torch.cat(model.logits_of_last_pass), model.counts)
    for step, logits in zip(result.requests, pieces, strict=True):
        ran[step.request_id].steps.append(step)
        ran[step.request_id].logits.append(logits)
        if step.finished:
            ran[step.request_id].output_ids = engine.output_ids(step.request_id)
            engine.remove(step.request_id)
