"""The bytes of a safetensors file, tensor by tensor: of which a piece at a time is copied."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch

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

    Args:
        tensors: of the host, by name.

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
