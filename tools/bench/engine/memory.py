"""What a model and its engine take of a process's memory, against what they should.

Anonymous memory (RssAnon: what a process has made, without mapped files and code) that is added to a fresh process,
after its imports, by loading a model, making an engine and passes that fill the whole K/V pool:
1. weights: every parameter that the checkpoint names, in the model's number format;
2. pool: slots x layers x 2 x key heads x head size numbers;
3. activations of the largest pass: for each row its residual and its normed copy (2 x width) and the MLP's gate, up and
   product (3 x MLP width); or, if that is more, for each scored row its logits, in the model's format and in float32.
While the model is loaded no more than the weights may be held, and where they are packed one layer's plain ones beside
them: a checkpoint is never there twice.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from services.denoiser.engine import Engine, EngineConfig
from services.denoiser.loader import load_model
from tools.bench.engine.workload import Workload

TOLERANCE = 0.15  # of what is expected
_STATUS = Path("/proc/self/status")
_SAMPLE_S = 0.001
_LIMIT_S = 300.0
MAX_PASS_TOKENS = 2048  # as a worker has unless its profile says otherwise
_PASSES = 10  # enough for a recompute step of each request, so that all slots are written


class Expected(NamedTuple):
    """In bytes (rules 1 to 3)."""

    weights: int
    pool: int
    activations: int

    @property
    def total(self) -> int:
        """All three."""
        return sum(self)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of anonymous memory above what the process had after its imports."""

    while_loading: int  # the most
    after_passes: int
    pass_rows: int  # of the largest pass
    scored_rows: int  # of the pass that scored most


def expected(workload: Workload, dtype: torch.dtype, measured: Measured) -> Expected:
    """For a model and a pool of this workload, and passes of the measured size."""
    w, size = workload, dtype.itemsize
    d, F, V = w.width, w.mlp_width, w.vocab_size
    layer = 4 * d * d + 3 * d * F + 2 * d
    of_logit = size if dtype == torch.float32 else size + 4
    return Expected(
        weights=(2 * V * d + d + w.num_layers * layer) * size,
        pool=w.batch * w.canvas_tokens * w.num_layers * 2 * d * size,
        activations=max(measured.pass_rows * (2 * d + 3 * F) * size, measured.scored_rows * V * of_logit),
    )


def measure(folder: Path, workload: Workload, dtype: str) -> Measured:
    """Loads and runs the model of `folder` in a process of its own. Raises RuntimeError with what that said."""
    arguments = [str(folder), msgspec.json.encode(workload).decode(), dtype]
    command = [sys.executable, "-m", "tools.bench.engine.memory", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the measured process failed:\n{done.stderr}")
    return msgspec.json.decode(done.stdout, type=Measured)


def anonymous_bytes() -> int:
    """RssAnon of this process. Linux only."""
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"{_STATUS} has no RssAnon")


def _run(folder: Path, workload: Workload, dtype: str) -> Measured:
    torch.set_num_threads(1)
    config = EngineConfig(
        kv_budget_tokens=workload.batch * workload.canvas_tokens,
        max_batch_tokens=MAX_PASS_TOKENS,
        max_recompute_tokens=MAX_PASS_TOKENS,
    )
    before = anonymous_bytes()
    with _peak() as peak:
        model = load_model(folder, dtype=dtype)
    engine = Engine(model, config=config)
    for number, prompt in enumerate(workload.prompts()):
        engine.admit(workload.job(str(number), prompt, "dual"))
    passes = [engine.step() for _ in range(_PASSES)]
    return Measured(
        while_loading=max(peak) - before,
        after_passes=anonymous_bytes() - before,
        pass_rows=max(result.tokens_in_pass for result in passes),
        scored_rows=max(len(result.requests) for result in passes) * workload.block_size,
    )


@contextmanager
def _peak() -> Iterator[list[int]]:
    """A list that gets this process's anonymous memory every millisecond."""
    seen = [anonymous_bytes()]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_S):
            seen.append(anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


if __name__ == "__main__":
    print(
        msgspec.json.encode(
            _run(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Workload), sys.argv[3])
        ).decode()
    )
