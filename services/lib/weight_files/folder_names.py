"""Folder names of weight versions, and fingerprints of model folders."""

from __future__ import annotations

import hashlib
from pathlib import Path

MODEL_NAME = "policy"
"""Of the trained model at the weights service, which can keep models of other names beside it."""
ADAPTER_BASE = "base.json"
"""File of an adapter's folder: {"fingerprint": of the weights that it is added to}."""
COPIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""Suffixes of a model folder's configuration and tokenizer files: no weights, no code."""
_PREFIX = "weight_v"
_PIECES, _PIECE_BYTES = 256, 1 << 14


def folder_name(weight_version: int) -> str:
    """`weight_v000012`."""
    return f"{_PREFIX}{weight_version:06d}"


def fingerprint(folder: Path) -> str:
    """A fingerprint of a model folder's weights that does not read all of them.

    A digest of the names and sizes of the safetensors files, and of samples of each.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(piece * max(size - _PIECE_BYTES, 0) // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def versions_in(folder: Path, suffix: str = "") -> list[int]:
    """Versions that have a folder of that name and `suffix` in `folder`, in order."""
    names = {path.name for path in folder.glob(f"{_PREFIX}*{suffix}") if not path.is_symlink()}
    numbers = {name.removeprefix(_PREFIX).removesuffix(suffix) for name in names}
    found = sorted(int(number) for number in numbers if number.isascii() and number.isdigit())
    return [version for version in found if folder_name(version) + suffix in names]
