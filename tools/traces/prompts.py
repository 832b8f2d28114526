"""What is asked: problems of the built-in tasks or the lines of a JSONL file, in tokens as the gateway makes them.

A line is {"prompt": "text"}, as /v1/completions takes it, or {"messages": [{"role": ..., "content": ...}, ...]}, as
/v1/chat/completions does; "task" may name a group. Whether an answer is correct is known of the built-in tasks, and of
lines that are such problems: "task", "answer" and "results" as a recording's prompts.jsonl has them.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random

import msgspec

from services.gateway.text import TemplateError, TextCodec, load_codec, load_special_ids
from services.profile import Profile
from services.settings import ConfigError
from tools.tiny_model.tasks import Problem, Split, is_correct, sample


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the JSONL file; what it holds besides is ignored."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    task: str = ""
    answer: str | None = None
    results: tuple[str, ...] = ()


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt of a recording: a line of its prompts.jsonl."""

    number: int  # from 0: `prompt` of the runs
    hash: str  # of its token ids, 16 hex digits
    task: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    answer: str | None = None  # of a built-in problem: a correct one
    results: tuple[str, ...] = ()  # and what must follow its ####

    def is_correct(self, text: str) -> bool | None:
        """Whether the text answers it; None where that cannot be told."""
        if self.answer is None:
            return None
        return is_correct(Problem(self.task, "", self.answer, self.results, "", 0), text)


class Asked(msgspec.Struct, frozen=True):
    """A prompt with its token ids."""

    prompt: Prompt
    ids: list[int]


def codec_of(profile: Profile) -> TextCodec:
    """Tokens and text as the profile's gateway has them. Raises ConfigError."""
    return load_codec(profile.weights_folder, load_special_ids(profile.weights_folder).get("mask_token_id"))


def tasks(count: int, split: Split, seed: int, codec: TextCodec) -> list[Asked]:
    """So many problems with different texts; the first ones do not depend on how many follow."""
    rng = Random(f"traces/{split}/{seed}")
    found: dict[str, Asked] = {}
    while len(found) < count:
        problem = sample(rng, split)
        if problem.prompt not in found:
            line = Line(messages=[ChatMessage("user", problem.prompt)], task=problem.task)
            found[problem.prompt] = _asked(line, len(found), codec, problem)
    return list(found.values())


def read_prompt_file(path: Path, count: int | None, codec: TextCodec) -> list[Asked]:
    """The first `count` lines, or all. Raises ConfigError, naming the line that is wrong."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read the prompts: {error}") from None
    if len(lines) < (count or 1):
        raise ConfigError(f"{path} holds {len(lines)} prompts, {count or 1} are wanted")
    asked = []
    for number, line in enumerate(lines[:count]):
        try:
            asked.append(_asked(msgspec.json.decode(line, type=Line), number, codec))
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(f"{path}, prompt {number + 1}: {error}") from None
    return asked


def check_lengths(asked: Sequence[Asked], longest: int) -> None:
    """Raises ConfigError for a prompt of more than `longest` tokens, or of none."""
    for one in asked:
        if not 1 <= len(one.ids) <= longest:
            raise ConfigError(
                f"prompt {one.prompt.number + 1} has {len(one.ids)} tokens; 1 to {longest} leave room for the output"
            )


def _asked(line: Line, number: int, codec: TextCodec, problem: Problem | None = None) -> Asked:
    """Raises ValueError for a line without a prompt, and for messages that the template refuses."""
    if (line.prompt is None) == (line.messages is None):
        raise ValueError('it needs "prompt" or "messages", and not both')
    if line.messages is None:
        ids = codec.encode_prompt(line.prompt or "")
    else:
        try:
            ids = codec.encode_chat([{"role": m.role, "content": m.content} for m in line.messages])
        except TemplateError as error:
            raise ValueError(str(error)) from None
    digest = blake2b(" ".join(map(str, ids)).encode(), digest_size=8).hexdigest()
    prompt = Prompt(
        number=number,
        hash=digest,
        task=line.task,
        prompt=line.prompt,
        messages=line.messages,
        answer=problem.answer if problem else line.answer,
        results=problem.expected if problem else line.results,
    )
    return Asked(prompt, ids)
