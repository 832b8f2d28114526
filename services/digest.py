"""A short name for the content of files: of weights, so that what was made for them is known to be."""

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

_PIECE_BYTES = 1 << 24


def digest(paths: Iterable[Path]) -> str:
    """Of the files' content, in this order; 16 hex digits. Raises OSError."""
    found = blake2b(digest_size=8)
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                found.update(piece)
    return found.hexdigest()


def weights_digest(folder: Path) -> str:
    """Of all weights in a Hugging Face folder; "" if there are none. Raises OSError."""
    files = sorted(folder.glob("*.safetensors"))
    return digest(files) if files else ""
