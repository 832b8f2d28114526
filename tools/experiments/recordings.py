"""Recordings of the built-in tasks for the experiments, in build/recordings: made where they are missing, and anew
where the profile or its weights are others."""

import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

from services.digest import digest, weights_digest
from services.profile import load_profile
from services.settings import ConfigError
from tools.traces.reader import read_recording
from tools.traces.recorder import RecordJob, record

ROOT = Path(__file__).parents[2]
PROFILES = ("profiles/tiny-cpu", "profiles/tiny-cpu-plain")
Kind = Literal["eos", "ignore-eos"]
_PROMPTS: dict[Kind, int] = {"eos": 200, "ignore-eos": 60}


def folder_of(kind: Kind, profile: str) -> Path:
    """`profile`: of PROFILES."""
    return ROOT / "build" / "recordings" / f"{kind}-{_served(ROOT / profile)[:8]}"


@cache
def _served(profile: Path) -> str:
    return digest([profile / "profile.toml", *sorted(load_profile(profile).weights_folder.glob("*.safetensors"))])


def make_all(processes: int, tell: Callable[[str], None] = lambda text: None) -> None:
    """Raises ConfigError, ProcessLost."""
    for profile, (kind, num_prompts) in product(PROFILES, _PROMPTS.items()):
        job = RecordJob(
            ROOT / profile,
            folder_of(kind, profile),
            num_prompts,
            split="held_out",
            ignore_eos=kind == "ignore-eos",
            num_processes=processes,
        )
        make(job, tell)


def make(job: RecordJob, tell: Callable[[str], None] = lambda text: None) -> None:
    """What is missing of it. Raises ConfigError, ProcessLost."""
    if _is_of_others(job):
        shutil.rmtree(job.out)
    record(job, lambda done: tell(f"recording {job.out.name}: {done.shards} of {done.recording.num_shards} shards"))


def _is_of_others(job: RecordJob) -> bool:
    """Whether the folder's recording is of other weights."""
    try:
        return read_recording(job.out).weights != weights_digest(load_profile(job.profile).weights_folder)
    except ConfigError:
        return False
