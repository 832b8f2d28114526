"""What the source of `contracts/messages.py` says about its messages beyond their types: the comments on their fields.

1. A field's meaning is the comment behind it. A message's is its docstring.
2. A type with a name (`Id`, `Reason`) is an assignment with the annotation `TypeAlias`; the comments behind the lines
   of its value say what these mean.
"""

import ast
import io
import tokenize
from typing import NamedTuple


class Field(NamedTuple):
    """One field, as it is written."""

    name: str
    type: str
    default: str  # "": it has none
    meaning: str


class Alias(NamedTuple):
    """A type with a name, as it is written; `values`: what its literals mean, as far as it is said."""

    name: str
    definition: str
    values: tuple[tuple[str, str], ...]


class Source(NamedTuple):
    """By name, in the order of the file."""

    fields: dict[str, tuple[Field, ...]]  # of each message
    aliases: dict[str, Alias]


def read(text: str) -> Source:
    """The file's messages and named types."""
    comments = _comments(text)
    statements = ast.parse(text).body
    return Source(
        {node.name: tuple(_fields(node, comments)) for node in statements if isinstance(node, ast.ClassDef)},
        {alias.name: alias for node in statements if (alias := _alias(node, comments)) is not None},
    )


def _comments(text: str) -> dict[int, str]:
    """By line, of those behind something."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {
        t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT and t.line.lstrip()[0] != "#"
    }


def _fields(message: ast.ClassDef, comments: dict[int, str]) -> list[Field]:
    return [
        Field(
            node.target.id,
            ast.unparse(node.annotation).strip("'"),
            "" if node.value is None else ast.unparse(node.value),
            comments.get(node.end_lineno or node.lineno, ""),
        )
        for node in message.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _alias(node: ast.stmt, comments: dict[int, str]) -> Alias | None:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias"), value=ast.expr() as value):
            values = tuple(
                (ast.unparse(part), comments[part.lineno])
                for part in ast.walk(value)
                if isinstance(part, ast.Constant) and part.lineno != node.lineno and part.lineno in comments
            )
            return Alias(name, ast.unparse(value), values)
    return None
