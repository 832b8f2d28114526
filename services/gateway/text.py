"""Tokens and text: the model folder's tokenizer and chat template, in Hugging Face's formats. Pure after loading.

1. Only the chat template writes special tokens. The same characters inside a message or a prompt are plain text.
2. Text that comes back token by token is given out in whole characters: bytes that do not yet make one are held back.
"""

import functools
import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders

from services.settings import ConfigError

Message = dict[str, str]

_BROKEN = "\ufffd"


class TemplateError(ValueError):
    """The chat template refuses the messages, and says why."""


class _Special(NamedTuple):
    """A token that is one id whatever stands around it."""

    content: str
    id: int
    lstrip: bool  # takes the spaces before it with it
    rstrip: bool


class TextCodec:
    """Turns messages and prompts into token ids, and token ids into text."""

    def __init__(self, tokenizer_json: str, config: dict[str, Any], template: str | None, special: set[str]) -> None:
        """`special`: further texts that must not become their token inside a prompt, e.g. the mask."""
        declared = json.loads(tokenizer_json)
        for token in declared.get("added_tokens", []):
            token["special"] = token["special"] or token["content"] in special
        tokenizer_json = json.dumps(declared)
        self._templated = Tokenizer.from_str(tokenizer_json)
        self._plain = Tokenizer.from_str(tokenizer_json)
        self._plain.encode_special_tokens = True
        for tokenizer in (self._templated, self._plain):
            tokenizer.no_padding()
            tokenizer.no_truncation()
        self._specials = _special_tokens(declared)
        pattern = "|".join(re.escape(token.content) for token in self._specials)
        self._special_pattern = re.compile(pattern) if pattern else None
        self._special_ids = frozenset(token.id for token in self._specials)
        self._to_bytes = _byte_alphabet() if isinstance(self._plain.decoder, decoders.ByteLevel) else None
        self._names = {key: text for key, value in config.items() if key.endswith("_token") and (text := _text(value))}
        self._template = _compile(template) if template is not None else None
        self.vocab_size = self._plain.get_vocab_size()
        self.whole_text = functools.cache(self._whole_text)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def id_of(self, token: str) -> int | None:
        found: int | None = self._plain.token_to_id(token)
        return found

    # --- in --------------------------------------------------------------------------------------------------------

    def encode_prompt(self, text: str) -> list[int]:
        """Plain text as token ids, with what the tokenizer itself puts around every text (a BOS, or nothing)."""
        ids: list[int] = self._plain.encode(text).ids
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The conversation as the model expects it, up to where its answer begins. Raises TemplateError."""
        texts = [text for message in messages for text in message.values()]
        if self._special_pattern is None or not any(map(self._special_pattern.search, texts)):
            ids: list[int] = self._templated.encode(self.render(messages), add_special_tokens=False).ids
            return ids
        return self._encode_marked(messages)

    def render(self, messages: Sequence[Message]) -> str:
        """The template's text. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("this model has no chat template: use /v1/completions")
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, tools=None, **self._names)
        except jinja2.TemplateError as error:
            raise TemplateError(str(error) or "the chat template cannot render these messages") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"the chat template cannot render these messages ({error})") from None

    def _encode_marked(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of messages that hold special tokens' texts: placeholders stand for those while it is rendered.

        A placeholder holds a hash of all texts, so no text can hold a placeholder.
        """
        assert self._special_pattern is not None
        names = [token.content for token in self._specials]
        mark = hashlib.blake2b("\0".join(t for m in messages for t in m.values()).encode(), digest_size=12).hexdigest()
        hide = {name: f"\ue000{mark}:{number}\ue001" for number, name in enumerate(names)}
        hidden = [{k: self._special_pattern.sub(lambda m: hide[m[0]], t) for k, t in m.items()} for m in messages]
        placeholder = re.compile(f"\ue000{mark}:([0-9]+)\ue001")

        ids: list[int] = []
        for piece in self._split(self.render(hidden)):
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                text = placeholder.sub(lambda m: names[int(m[1])], piece)
                ids += self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def _split(self, rendered: str) -> Iterator[str | int]:
        """The special tokens that the template wrote, as ids, and the text between them."""
        assert self._special_pattern is not None
        tokens = {token.content: token for token in self._specials}
        done = 0
        for match in self._special_pattern.finditer(rendered):
            token = tokens[match[0]]
            before = rendered[done : match.start()]
            yield before.rstrip() if token.lstrip else before
            yield token.id
            done = match.end()
            if token.rstrip:
                done += len(rendered[done:]) - len(rendered[done:].lstrip())
        yield rendered[done:]

    # --- out -------------------------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, without special ones; bytes that make no character become U+FFFD."""
        text: str = self._plain.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; of some tokens only a part of a character."""
        token = self._plain.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        if self._to_bytes is not None and all(c in self._to_bytes for c in token):
            return bytes(self._to_bytes[c] for c in token)
        return token.encode() if self._to_bytes is not None else self.decode([token_id]).encode()

    def _whole_text(self, token_id: int) -> str | None:
        """What the token says wherever it stands; None: that may depend on the tokens around it.

        `whole_text` is the same and remembers. Bytes of a byte-level vocabulary are only put one behind another.
        """
        if self._to_bytes is None:
            return None
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:  # a part of a character
            return None


class Detokenizer:
    """The text of token ids that come one by one. What `push` returned, and then `finish`, is `decode` of them all.

    A token's text can depend on the one before it (a leading space, the second half of a character), so each piece
    is what the last whole piece and the new tokens say together beyond what the last whole piece says alone.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._last_whole: list[int] = []
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        """One more token. Returns the characters that it completes, perhaps none."""
        if not self._new and (text := self._codec.whole_text(token_id)) is not None:
            return text
        self._new.append(token_id)
        piece = self._piece()
        if not piece or piece.endswith(_BROKEN):
            return ""
        self._last_whole, self._new = self._new, []
        return piece

    def finish(self) -> str:
        """No more tokens: an incomplete character comes out as U+FFFD."""
        piece = self._piece() if self._new else ""
        self._last_whole, self._new = [], []
        return piece

    def _piece(self) -> str:
        before = self._codec.decode(self._last_whole)
        return self._codec.decode(self._last_whole + self._new)[len(before) :]


def load_codec(folder: Path, mask_id: int | None = None) -> TextCodec:
    """The tokenizer and chat template of a model folder. Raises ConfigError."""
    try:
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
        config = _read_json(folder / "tokenizer_config.json")
        special = {
            text for key in ("mask_token", "bos_token", "eos_token", "pad_token") if (text := _text(config.get(key)))
        }
        for token in json.loads(tokenizer_json).get("added_tokens", []):
            if token["id"] == mask_id:
                special.add(token["content"])
        return TextCodec(tokenizer_json, config, _find_template(folder, config), special)
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} is missing: a model folder holds tokenizer.json") from None
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ConfigError(f"{folder}: cannot load the tokenizer or the chat template: {error}") from None


def load_special_ids(folder: Path) -> dict[str, int]:
    """`mask_token_id`, `eos_token_id` and `vocab_size` of config.json, as far as it names them. Raises ConfigError."""
    try:
        config = _read_json(folder / "config.json")
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is not valid JSON: {error}") from None
    names = ("mask_token_id", "eos_token_id", "vocab_size", "embedding_size")
    return {name: config[name] for name in names if isinstance(config.get(name), int)}


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty if there is no such file."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, chat_template.json, or the tokenizer's config, which may hold several by name."""
    beside = folder / "chat_template.jinja"
    if beside.exists():
        return beside.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _compile(template: str) -> jinja2.Template:
    """As Hugging Face compiles chat templates: same switches, same functions."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = time.strftime
    return environment.from_string(template)


def _special_tokens(declared: dict[str, Any]) -> list[_Special]:
    """The longest first, so that a pattern made of them finds what the tokenizer finds."""
    found = [
        _Special(token["content"], token["id"], bool(token.get("lstrip")), bool(token.get("rstrip")))
        for token in declared.get("added_tokens", [])
        if token["special"]
    ]
    return sorted(found, key=lambda token: (-len(token.content), token.content))


def _text(value: Any) -> str:
    """A token in tokenizer_config.json: its text, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it prints, else one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
