"""Durable files, safetensors among them, on a disk or in an object store.

A file on a disk survives a crash of the machine when these functions return, an object of a store
when it is written. Of tensors that are written a piece at a time is copied; of those in an object
only the ranges that are asked for are read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open

from trainer.object_path import Folder, ObjectPath

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
    with path.open("wb") as file:
        return tensors_digest(tensors, file.write)


def tensors_digest(
    tensors: Mapping[str, torch.Tensor], write: Callable[[memoryview], object] = lambda _: None
) -> str:
    """SHA-256 of the file that `save_tensors` would write; `write` gets its pieces in order."""
    digest = hashlib.sha256()
    for piece in tensor_bytes(tensors):
        write(piece)
        digest.update(piece)
    return digest.hexdigest()


def write_marker(folder: Folder, text: str = "") -> None:
    """Mark `folder` complete, by a file with `text`; its content is durable before the marker."""
    sync(folder)
    (folder / COMPLETE).write_text(text)
    sync(folder / COMPLETE)
    sync(folder)


TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names of the format."""
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_ALIGNMENT = 8
_PIECE_BYTES = 64 << 20


class HeldTensors(dict[str, torch.Tensor]):
    """Tensors by name, each to be written once, some of them from where they lie.

    `hold_back` copies those of them that are not written yet, so that they may change after it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], in_place: Iterable[str] = ()) -> None:
        super().__init__(tensors)
        self._lock, self._in_place = Lock(), set(in_place)

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """While a tensor is written none is changed; then it is forgotten."""
        with self._lock:
            yield
            self._in_place.discard(name)
            del self[name]

    def hold_back(self) -> None:
        """Waits at most for the tensor that is being written."""
        with self._lock:
            for name in self._in_place:
                self[name] = self[name].clone()
            self._in_place.clear()


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of a file with these tensors, in pieces.

    Raises:
        ValueError: the format has no such type.
    """
    # The widest first, so that each is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    text = json.dumps(_header(names, tensors)).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        with tensors.writing(name) if isinstance(tensors, HeldTensors) else nullcontext():
            data = tensors[name].detach().reshape(-1).view(torch.uint8)
            for begin in range(0, len(data), _PIECE_BYTES):
                # A copy: memory that numpy has seen cannot be released any more.
                yield data[begin : begin + _PIECE_BYTES].clone().numpy().data


def _header(names: list[str], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor {name} is of {tensor.dtype}, which safetensors does not hold")
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    return header


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
        on_digest: gets the SHA-256 of the object before it appears.

    Raises:
        OSError: the store refuses it.
    """
    file = path.open("wb")
    try:
        on_digest(tensors_digest(tensors, file.write))
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
        return list(self._header)

    def get_tensor(self, name: str) -> torch.Tensor:
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
