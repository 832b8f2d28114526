"""Records prompts into a folder, in this process or in several, and goes on where it was interrupted.

The prompts are cut into shards: one is every prompt of its part with every cache and schedule. Nothing passes from
shard to shard, so a shard is the same whichever process makes it, and after whatever interruption: a function of
prompts, weights, settings and seed (on the same hardware and PyTorch).
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import NamedTuple

import msgspec

from contracts.messages import CacheMode
from services.denoiser.instance import model_source
from services.denoiser.lifeline import tie_to_parent
from services.digest import digest, weights_digest
from services.gateway.text import TextCodec
from services.profile import Profile, load_profile
from services.settings import ConfigError
from tools.tiny_model.tasks import Split
from tools.traces import prompts, schedules
from tools.traces.denoise import Recorder
from tools.traces.prompts import Asked, codec_of
from tools.traces.reader import Recording, read_recording, shard_path
from tools.traces.runs import check_threshold, save_shard


class ProcessLost(Exception):
    """One of several processes died."""


@dataclass(frozen=True)
class RecordJob:
    """What to record. None: what the profile says."""

    profile: Path
    out: Path
    num_prompts: int | None = None  # None: all of the file's
    file: Path | None = None  # None: the built-in tasks
    split: Split = "train"  # of the built-in tasks
    seed: int = 0
    thresholds: tuple[float, ...] | None = None
    changing: tuple[str, ...] = schedules.DEFAULT
    caches: tuple[CacheMode, ...] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    ignore_eos: bool = False
    opening_share: float | None = None
    blocks_ahead: int | None = None
    num_processes: int = 1
    prompts_per_shard: int = 16

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "num_processes", "prompts_per_shard"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} {value} must be at least 1")
        if self.blocks_ahead is not None and self.blocks_ahead < 0:
            raise ConfigError(f"blocks_ahead {self.blocks_ahead} must not be negative")
        if self.opening_share is not None and not 0.0 <= self.opening_share <= 1.0:
            raise ConfigError(f"opening_share {self.opening_share:g} is not between 0 and 1")


class ShardDone(NamedTuple):
    """How far the recording is."""

    shards: int  # done now and before
    shards_before: int  # were there when it started
    recording: Recording


def record(job: RecordJob, on_shard: Callable[[ShardDone], None] = lambda done: None) -> Recording:
    """Records what is still missing in `job.out`.

    Raises ConfigError for settings that make no sense or differ from what is there, and ProcessLost. Calls
    `on_shard` once at the start and then for each shard. When it raises, or Ctrl-C comes, what is done stays.
    """
    profile = load_profile(job.profile)
    codec = codec_of(profile)
    asked = _asked(job, codec)
    recording = _recording(job, profile, asked)
    prompts.check_lengths(asked, profile.limits.max_context_tokens - _canvas_output(recording))
    _open_folder(job.out, recording, asked)
    missing = [i for i in range(recording.num_shards) if not shard_path(job.out, i).exists()]
    before = done = recording.num_shards - len(missing)
    on_shard(ShardDone(done, before, recording))
    size = recording.prompts_per_shard
    parts = [(shard_path(job.out, i), asked[i * size : (i + 1) * size]) for i in missing]
    for _ in _make(parts, profile, recording, min(job.num_processes, len(missing))):
        done += 1
        on_shard(ShardDone(done, before, recording))
    return recording


def _asked(job: RecordJob, codec: TextCodec) -> list[Asked]:
    if job.file is not None:
        return prompts.read_prompt_file(job.file, job.num_prompts, codec)
    if not job.num_prompts:
        raise ConfigError("say how many prompts of the built-in tasks are wanted: --prompts 1500")
    return prompts.tasks(job.num_prompts, job.split, job.seed, codec)


def _recording(job: RecordJob, profile: Profile, asked: Sequence[Asked]) -> Recording:
    decoding = profile.decoding
    if job.opening_share is not None:
        decoding = msgspec.structs.replace(decoding, opening_share=job.opening_share)
    if job.blocks_ahead is not None:
        decoding = msgspec.structs.replace(decoding, blocks_ahead=job.blocks_ahead)
    thresholds = sorted(set(job.thresholds or decoding.thresholds))
    try:
        for value in thresholds:
            check_threshold(value)
        for name in job.changing:
            schedules.check_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    source = model_source(profile)
    recording = Recording(
        model=profile.model,
        weights=weights_digest(profile.weights_folder),
        dtype=source.dtype,
        device=source.device,
        source=f"{job.file.name} {digest([job.file])}" if job.file else f"built-in tasks, {job.split}",
        num_prompts=len(asked),
        prompts_per_shard=job.prompts_per_shard,
        block_size=decoding.block_size,
        max_tokens=job.max_tokens or decoding.max_tokens,
        temperature=decoding.temperature if job.temperature is None else job.temperature,
        ignore_eos=job.ignore_eos,
        seed=job.seed,
        caches=list(dict.fromkeys(job.caches or (decoding.cache,))),
        thresholds=thresholds,
        changing=list(dict.fromkeys(job.changing)),
        manner=decoding.manner,
    )
    if recording.max_tokens > profile.limits.max_output_tokens:
        raise ConfigError(f"max_tokens {recording.max_tokens} exceeds the profile's {profile.limits.max_output_tokens}")
    return recording


def _canvas_output(recording: Recording) -> int:
    """Output area of a canvas, in tokens."""
    return -(-recording.max_tokens // recording.block_size) * recording.block_size


def _open_folder(folder: Path, recording: Recording, asked: Sequence[Asked]) -> None:
    """A new recording is begun; one that is there must be the same, and is gone on with. Raises ConfigError."""
    folder.mkdir(parents=True, exist_ok=True)
    path, prompts_path = folder / "recording.json", folder / "prompts.jsonl"
    if path.exists():
        _check_same(folder, read_recording(folder), recording)
    elif any(not child.name.startswith(".") for child in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no recording: name another folder")
    else:
        _write(path, msgspec.json.format(msgspec.json.encode(recording), indent=2) + b"\n")
    lines = msgspec.json.Encoder().encode_lines([one.prompt for one in asked])
    if not prompts_path.exists():
        _write(prompts_path, lines)
    elif prompts_path.read_bytes() != lines:
        raise ConfigError(f"{folder} was recorded with other prompts under the same seed: name another folder")


def _check_same(folder: Path, found: Recording, wanted: Recording) -> None:
    names = [name for name in wanted.__struct_fields__ if getattr(found, name) != getattr(wanted, name)]
    if names:
        was, is_now = _told(found, names), _told(wanted, names)
        raise ConfigError(f"{folder} holds another recording: {was} there, {is_now} now; name another folder")


def _told(recording: Recording, names: Sequence[str]) -> str:
    """These fields of it, for a message."""
    return ", ".join(
        recording.manner.words if name == "manner" else f"{name} {getattr(recording, name)}" for name in names
    )


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_bytes(content)
    unfinished.replace(path)


# --- processes ---

_Part = tuple[Path, list[Asked]]  # a shard and its prompts


def _make(parts: Sequence[_Part], profile: Profile, recording: Recording, processes: int) -> Iterator[None]:
    """Makes the shards, yielding after each."""
    if processes <= 1:
        maker = _Maker(profile, recording)
        for part in parts:
            maker.make(part)
            yield
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_process, (profile, recording, os.getpid())) as pool:
        try:
            for future in as_completed([pool.submit(_make_part, part) for part in parts]):
                future.result()
                yield
        except BrokenProcessPool as error:
            raise ProcessLost("a process of the recording died; is there memory for so many?") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()
            raise


class _Maker:
    """Makes shards in one process. The model is loaded for the first."""

    def __init__(self, profile: Profile, recording: Recording) -> None:
        self._profile, self._recording = profile, recording
        self._recorder: Recorder | None = None

    def make(self, part: _Part) -> None:
        path, asked = part
        self._recorder = self._recorder or Recorder.of(self._profile, self._recording)
        save_shard(path, self._recorder.shard(asked), self._recording.schedules)


_maker: _Maker  # of a process of the pool


def _start_process(profile: Profile, recording: Recording, parent_pid: int) -> None:
    global _maker
    tie_to_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    _maker = _Maker(profile, recording)


def _make_part(part: _Part) -> None:
    _maker.make(part)
