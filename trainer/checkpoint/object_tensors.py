"""safetensors files as objects: written as a stream, read by ranges."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from trainer.object_path import Folder, ObjectPath
from trainer.tensor_bytes import TYPES, tensor_bytes


@contextmanager
def open_tensors(path: Folder) -> Iterator[Any]:
    """A safetensors file: `keys`, `get_tensor`, `get_slice`."""
    if isinstance(path, ObjectPath):
        yield ObjectTensors(path)
        return
    with safe_open(path, framework="pt") as file:
        yield file


def upload(
    path: ObjectPath, tensors: Mapping[str, torch.Tensor], on_digest: Callable[[str], None]
) -> None:
    """Write tensors of the host; the object appears whole, or not at all.

    Args:
        path: of the object.
        tensors: by name.
        on_digest: gets the SHA-256 of the object before it appears.

    Raises:
        OSError: the store refuses it.
    """
    file, digest = path.open("wb"), hashlib.sha256()
    try:
        for piece in tensor_bytes(tensors):
            file.write(piece)
            digest.update(piece)
        on_digest(digest.hexdigest())
        file.close()
        file.commit()
    except Exception as error:
        with suppress(Exception):
            file.close()
        with suppress(Exception):
            file.discard()
        if isinstance(error, OSError):
            raise
        raise OSError(f"{path}: {error}") from error


class ObjectTensors:
    """The tensors of an object, of which only what is asked for is read."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        size = int.from_bytes(path.read_bytes(0, 8), "little")
        self._begin = 8 + size
        self._header: dict[str, Any] = json.loads(path.read_bytes(8, self._begin))
        self._header.pop("__metadata__", None)

    def keys(self) -> list[str]:
        """Of all tensors."""
        return list(self._header)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        shape = self._header[name]["shape"]
        rows = self.get_slice(name)
        return rows[0 : shape[0]] if shape else rows.read(0, 1).reshape(())

    def get_slice(self, name: str) -> _Rows:
        """A tensor by ranges of its rows."""
        entry = self._header[name]
        begin = self._begin + entry["data_offsets"][0]
        return _Rows(self._path, begin, tuple(entry["shape"]), TYPES[entry["dtype"]])


@dataclass(frozen=True, slots=True)
class _Rows:
    path: ObjectPath
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        """Of the whole tensor."""
        return list(self.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        first, last, _ = rows.indices(self.shape[0])
        width = math.prod(self.shape[1:])
        flat = self.read(first * width, max(last - first, 0) * width)
        return flat.reshape(max(last - first, 0), *self.shape[1:])

    def read(self, first: int, number: int) -> torch.Tensor:
        """Elements of the flat tensor."""
        if number == 0:
            return torch.empty(0, dtype=self.dtype)
        begin = self.begin + first * self.dtype.itemsize
        data = self.path.read_bytes(begin, begin + number * self.dtype.itemsize)
        return torch.frombuffer(bytearray(data), dtype=self.dtype)
