"""Train the built-in model: a few processes of one thread each, kept in step by averaging gradients.

1. Float32 master weights, a copy that computes: in bfloat16 where the processor multiplies it. Muon for the matrices
   of the blocks, AdamW for the rest.
2. Batch, learning rate and mixture of a step depend on its number alone, so a run that resumes from a checkpoint
   goes on exactly as if it had not stopped. Every checkpoint holds the full state.
3. Muon's orthogonalisation is a sixth of a step, so each rank updates the blocks it owns and sends them to the
   others. AdamW is cheap: every rank makes the same update from the same averaged gradient.
4. Rank 0 alone writes files.
"""

import csv
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional

from services.denoiser.loader import DTYPES, choose_dtype
from tools.tiny_model.batches import SYSTEM_PROMPTS, Batch, BatchMaker
from tools.tiny_model.config import ModelConfig, TrainConfig
from tools.tiny_model.export import EXPORT_DTYPE, export_model, load_exported
from tools.tiny_model.muon import Muon
from tools.tiny_model.network import TinyLLaDA, rotation_table
from tools.tiny_model.tokenizer import BOS, EOS, MASK, build_tokenizer, token_id_of

LOG_EVERY_STEPS = 20
LOG_FIELDS = ("step", "learning_rate", "chat_loss", "equation_loss", "gradient_norm", "tokens", "cpu_s", "wall_s")
PADDING_SCORE = -1e4
# Of chats and of equations the sum of weighted losses and of weights, padded tokens, CPU seconds.
NUM_STATISTICS = 6


@dataclass(frozen=True)
class TrainJob:
    """What to train and where: `model_folder` gets the result, `work_folder` checkpoint and log."""

    model_folder: Path
    work_folder: Path
    train: TrainConfig = field(default_factory=TrainConfig)
    model: dict[str, int] = field(default_factory=dict)  # overrides of ModelConfig's defaults
    compile: bool = True
    vocabulary_problems: int = 20_000  # problems whose words the tokenizer is made of
    stop_at_step: int | None = None  # leave a checkpoint here and export nothing
    start_folder: Path | None = (
        None  # a finished model from which to run the last cycle, which must be one that restarts
    )


def train(job: TrainJob) -> None:
    """Run the training to its end, from the last checkpoint in `work_folder` if there is one."""
    job.work_folder.mkdir(parents=True, exist_ok=True)
    # Two threads of one process on busy cores were ten times slower than two processes of one thread.
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        # forked from a server that has imported this module once: it outlives the call, and serves the next one
        multiprocessing.set_forkserver_preload([__name__])
        start_processes(_run_rank, args=(store, job), nprocs=job.train.num_ranks, start_method="forkserver")  # type: ignore[no-untyped-call]


def make_model_config(tokenizer: Tokenizer, **overrides: int) -> ModelConfig:
    """The model's shape for this tokenizer."""
    bos, eos, mask = (token_id_of(tokenizer, token) for token in (BOS, EOS, MASK))
    return ModelConfig(tokenizer.get_vocab_size(), bos, eos, mask, **overrides)


def _run_rank(rank: int, store: str, job: TrainJob) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.train.num_ranks)
    _Trainer(rank, job).run()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # in the interpreter's shutdown a thread of Gloo's that still runs aborts the process now and then


class _Trainer:
    """One rank's training loop."""

    def __init__(self, rank: int, job: TrainJob) -> None:
        self._rank, self._job, self._config = rank, job, job.train
        self._tokenizer = build_tokenizer(SYSTEM_PROMPTS, num_problems=job.vocabulary_problems)
        self._model_config = make_model_config(self._tokenizer, **job.model)
        self._batches = BatchMaker(self._tokenizer, self._config)
        torch.manual_seed(self._config.seed)
        self._dtype = DTYPES[choose_dtype("auto", "cpu")]
        self._model = TinyLLaDA(self._model_config)
        self._compute = TinyLLaDA(self._model_config).to(self._dtype)
        self._masters = dict(self._model.named_parameters())
        self._copies = dict(self._compute.named_parameters())
        self._rotation = rotation_table(self._model_config, self._model_config.max_sequence_length)
        self._optimizers = self._make_optimizers()
        self._loss: Callable[..., tuple[Tensor, Tensor]] = _loss
        if job.compile:
            self._loss = torch.compile(_loss, dynamic=True)
        self._step = 0
        # Since the last line of the log, this rank; and since the start, all ranks.
        self._statistics = torch.zeros(NUM_STATISTICS, dtype=torch.float64)
        self._tokens, self._cpu_s, self._wall_s = 0.0, 0.0, 0.0
        self._checkpoint = job.work_folder / "checkpoint.pt"

    def run(self) -> None:
        if self._checkpoint.exists():
            self._resume()
        elif self._job.start_folder is not None:
            self._start_from(self._job.start_folder)
        last_step = self._job.stop_at_step or self._config.num_steps
        while self._step < last_step:
            self._train_step()
            if self._step % self._config.checkpoint_every_steps == 0 or self._step == last_step:
                self._save()
        if self._rank == 0 and self._step == self._config.num_steps:
            state = self._model.state_dict()
            export_model(self._job.model_folder, self._model_config, state, self._tokenizer)

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        others = [p for name, p in self._masters.items() if p.dim() != 2 or not name.startswith("blocks")]
        decay = self._config.muon_weight_decay
        return [
            Muon(self._matrices(self._rank), dtype=self._dtype, weight_decay=decay),
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def _matrices(self, owner: int) -> list[torch.nn.Parameter]:
        """The matrices of the blocks that rank `owner` updates."""
        blocks = self._model.blocks[owner :: self._config.num_ranks]
        return [parameter for block in blocks for parameter in block.parameters() if parameter.dim() == 2]

    def _train_step(self) -> None:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        if self._config.restarts_at(self._step):
            self._restart()
        batch = self._batches.batch(self._rank, self._step)
        self._copy_weights()
        self._statistics[:5] += self._backward(batch)
        self._average_gradients()
        gradient_norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), 1.0)
        rate = self._config.rate_at(self._step)
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        self._share_matrices()
        self._step += 1
        self._statistics[5] += time.process_time() - cpu_start
        self._wall_s += time.perf_counter() - wall_start
        if self._step % LOG_EVERY_STEPS == 0:
            self._log(rate, float(gradient_norm))

    @torch.no_grad()
    def _restart(self) -> None:
        """Go on from the weights as they are exported, and from nothing else."""
        for master in self._masters.values():
            master.copy_(master.to(EXPORT_DTYPE))
        self._optimizers = self._make_optimizers()

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for name, master in self._masters.items():
            self._copies[name].copy_(master)

    def _backward(self, batch: Batch) -> Tensor:
        """Leave the batch's gradient in the copies; returns the first five statistics."""
        cos_TK, sin_TK = self._rotation
        width = batch.input_BT.shape[1]
        masked_M, target_M, weight_M, is_equations_M, input_BT, is_padding_BT = (
            torch.from_numpy(array)
            for array in (
                batch.masked_M,
                batch.target_M,
                batch.weight_M,
                batch.is_equations_M,
                batch.input_BT,
                batch.is_padding_BT,
            )
        )
        rotation = cos_TK[:width], sin_TK[:width]
        loss, loss_M = self._loss(self._compute, input_BT, is_padding_BT, rotation, masked_M, target_M, weight_M)
        torch.autograd.backward(loss)
        weighted_M = loss_M * weight_M
        sums = [part[mask].sum() for mask in (~is_equations_M, is_equations_M) for part in (weighted_M, weight_M)]
        return torch.stack([*sums, torch.tensor(float(batch.input_BT.size))]).double()

    @torch.no_grad()
    def _average_gradients(self) -> None:
        gradients = []
        for copy in self._copies.values():
            assert copy.grad is not None
            gradients.append(copy.grad.float().flatten())
            copy.grad = None
        flat = torch.cat(gradients)
        dist.all_reduce(flat)
        flat /= self._config.num_ranks
        offset = 0
        for master in self._masters.values():
            master.grad = flat[offset : offset + master.numel()].view_as(master)
            offset += master.numel()

    @torch.no_grad()
    def _share_matrices(self) -> None:
        """Give every rank the matrices that their owners have just updated."""
        for owner in range(self._config.num_ranks):
            matrices = self._matrices(owner)
            flat = torch.cat([matrix.flatten() for matrix in matrices])
            dist.broadcast(flat, src=owner)
            offset = 0
            for matrix in matrices:
                matrix.copy_(flat[offset : offset + matrix.numel()].view_as(matrix))
                offset += matrix.numel()

    def _log(self, rate: float, gradient_norm: float) -> None:
        dist.all_reduce(self._statistics)
        chat, chat_weight, equation, equation_weight, tokens, cpu_s = self._statistics.tolist()
        self._statistics.zero_()
        self._tokens += tokens
        self._cpu_s += cpu_s
        if self._rank:
            return
        row = (
            self._step,
            f"{rate:.3e}",
            f"{chat / max(chat_weight, 1e-9):.5f}",
            f"{equation / max(equation_weight, 1e-9):.5f}",
            f"{gradient_norm:.3f}",
            int(self._tokens),
            f"{self._cpu_s:.1f}",
            f"{self._wall_s:.1f}",
        )
        path = self._job.work_folder / "log.csv"
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if not path.stat().st_size:
                writer.writerow(LOG_FIELDS)
            writer.writerow(row)
        print(" ".join(f"{name}={value}" for name, value in zip(LOG_FIELDS, row, strict=True)), flush=True)

    def _save(self) -> None:
        own = [optimizer.state_dict() for optimizer in self._optimizers]
        of_ranks: list[object] | None = None if self._rank else [None] * self._config.num_ranks
        dist.gather_object(own, of_ranks)
        if self._rank:
            return
        state = {
            "step": self._step,
            "totals": (self._tokens, self._cpu_s, self._wall_s),
            "model": self._model.state_dict(),
            "optimizers": of_ranks,
            "model_config": asdict(self._model_config),
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint)  # never half a checkpoint

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        if state["model_config"] != asdict(self._model_config):
            raise ValueError(f"work folder {self._job.work_folder}: its checkpoint is of another model shape")
        self._step = state["step"]
        self._tokens, self._cpu_s, self._wall_s = state["totals"]
        self._model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"][self._rank], strict=True):
            optimizer.load_state_dict(saved)
        dist.barrier()  # rank 0 must not write the next checkpoint while another rank still reads this one

    def _start_from(self, folder: Path) -> None:
        """Take the weights of a finished model and stand at the start of the last cycle."""
        self._step = self._config.last_cycle_start
        if not self._config.restarts_at(self._step):
            raise ValueError("only a last cycle that restarts can begin from a finished model")
        self._model.load_state_dict(load_exported(folder, self._model_config))


def _loss(
    model: TinyLLaDA,
    input_BT: Tensor,
    is_padding_BT: Tensor,
    rotation: tuple[Tensor, Tensor],
    masked_M: Tensor,
    target_M: Tensor,
    weight_M: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy, and that of each masked position."""
    bias_B11T = torch.where(is_padding_BT, PADDING_SCORE, 0.0)[:, None, None, :]
    logits_MV = model.logits(input_BT, bias_B11T, rotation, masked_M)
    loss_M = functional.cross_entropy(logits_MV.float(), target_M, reduction="none")
    return (loss_M * weight_M).sum() / weight_M.sum(), loss_M.detach()
