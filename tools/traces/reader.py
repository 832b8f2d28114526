"""A folder of recorded runs:

    recording.json      what was recorded, and how (`Recording`)
    prompts.jsonl       the prompts, one a line (`Prompt`)
    shard-00000.npz     the runs of prompts_per_shard prompts (see runs.py), by prompt, cache and schedule

`open_traces(folder)` reads it, also while it is still being recorded: shards are whole or not there.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from contracts.messages import CacheMode
from services.opening import PLAIN, Manner
from services.settings import ConfigError
from tools.traces.prompts import Prompt
from tools.traces.runs import FORMAT_VERSION, RecordedRun, load_shard
from tools.traces.schedules import Schedule, make_schedule, name_of


class Recording(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all runs of a folder have in common."""

    format_version: int = FORMAT_VERSION
    model: str
    weights: str  # hash of the files that were loaded
    dtype: str
    device: str
    source: str  # of the prompts
    num_prompts: int
    prompts_per_shard: int
    block_size: int
    max_tokens: int  # output tokens of each run
    temperature: float
    ignore_eos: bool
    seed: int
    caches: list[CacheMode]
    thresholds: list[float]  # the set, ascending; each is a schedule of its own
    changing: list[str]  # names of the schedules that change it
    manner: Manner = PLAIN  # of the blocks of all runs

    @property
    def schedules(self) -> list[str]:
        """The names of all schedules."""
        return [name_of(value) for value in self.thresholds] + self.changing

    @property
    def num_shards(self) -> int:
        """Of the finished recording."""
        return -(-self.num_prompts // self.prompts_per_shard)

    @property
    def runs_per_shard(self) -> int:
        """Of all but perhaps the last."""
        return self.prompts_per_shard * len(self.caches) * len(self.schedules)

    def schedule(self, name: str, prompt: int, planned_tokens: int) -> Schedule:
        """The schedule of that name as the runs of a prompt have it."""
        key = f"{self.seed}/{prompt}/{name}"
        return make_schedule(name, self.thresholds, planned_tokens=planned_tokens, key=key)


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05}.npz"


def read_recording(folder: Path) -> Recording:
    """Raises ConfigError if the folder holds none, or one of another format version."""
    path = folder / "recording.json"
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=dict[str, object]).get("format_version")
        if version != FORMAT_VERSION:
            raise ConfigError(f"{path} has format version {version}; this program reads {FORMAT_VERSION}")
        return msgspec.json.decode(content, type=Recording)
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no recording: there is no recording.json") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_prompts(folder: Path) -> list[Prompt]:
    """By number. Raises ConfigError."""
    path = folder / "prompts.jsonl"
    try:
        return msgspec.json.Decoder(Prompt).decode_lines(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


class Traces:
    """A folder of recorded runs, read shard by shard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recording = read_recording(folder)
        self.prompts = read_prompts(folder)

    @property
    def shards(self) -> list[Path]:
        """Those that are there, in order."""
        paths = [shard_path(self.folder, index) for index in range(self.recording.num_shards)]
        return [path for path in paths if path.exists()]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        names = [*self.shards, self.folder / "recording.json", self.folder / "prompts.jsonl"]
        return sum(path.stat().st_size for path in names)

    def runs(self) -> Iterator[RecordedRun]:
        """All runs, by prompt, cache and schedule. Raises ValueError if a shard is damaged."""
        for path in self.shards:
            yield from load_shard(path, self.recording.schedules)

    def by_prompt(self, cache: CacheMode) -> Iterator[dict[str, RecordedRun]]:
        """For each prompt its runs with this cache, by schedule."""
        runs = (run for run in self.runs() if run.cache == cache)
        for _, of_prompt in groupby(runs, key=lambda run: run.prompt):
            yield {run.schedule: run for run in of_prompt}


def open_traces(folder: str | Path) -> Traces:
    """Raises ConfigError if the folder holds no recording that this program can read."""
    return Traces(Path(folder))
