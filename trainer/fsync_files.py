"""Write files that are durable (survive a crash of the machine) when these functions return.

Objects of an object store are when they are written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.object_path import Folder, ObjectPath
from trainer.tensor_bytes import tensor_bytes

COMPLETE = ".complete"
"""Name of the marker file of a complete folder."""


def sync(path: Folder) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    if isinstance(path, ObjectPath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Folder, content: Any) -> None:
    """Write `content` as JSON."""
    path.write_text(json.dumps(content, indent=1))
    sync(path)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write tensors as safetensors; as `save_tensors`."""
    digest = save_tensors(path, tensors)
    sync(path)
    return digest


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write tensors of the host as safetensors; not durable before `sync`.

    Returns:
        SHA-256 of the file.

    Raises:
        OSError: the file cannot be written, for example on a full disk.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in tensor_bytes(tensors):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the file that `save_tensors` would write."""
    digest = hashlib.sha256()
    for piece in tensor_bytes(tensors):
        digest.update(piece)
    return digest.hexdigest()


def write_marker(folder: Folder, text: str = "") -> None:
    """Mark `folder` complete, by a file with `text`; its content is durable before the marker."""
    sync(folder)
    (folder / COMPLETE).write_text(text)
    sync(folder / COMPLETE)
    sync(folder)
