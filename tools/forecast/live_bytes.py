"""Bytes of tensors that are alive, counted operation by operation; no tensor needs memory for it.

A storage is counted when the first tensor on it is seen, and again when FSDP changes its size:
gathered weights are storages that are emptied and filled.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Section = tuple[str, int, int]
"""A part of what is counted: what is done, and two numbers of the caller's."""
_Size = tuple[str, int]
"""Label and bytes of a storage."""


@dataclass(slots=True)
class Peak:
    """The most bytes that were alive at a time within a section."""

    total: int = 0
    """Of all labels."""
    by_label: Mapping[str, int] = field(default_factory=dict)
    """Of each label at that time."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, counts the tensors that operations give, and keeps each section's peak.

    Args:
        label: of a new storage, from the first tensor on it.
    """

    def __init__(self, label: Callable[[torch.Tensor], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._label = label
        self._sizes: dict[int, _Size] = {}
        self._live: Counter[str] = Counter()
        self._total = 0
        self._is_counting = True
        self.peaks: dict[Section, Peak] = {}
        """By section, in the order in which they began."""
        self._section: Section | None = None

    def begin(self, section: Section) -> None:
        """What follows belongs to another section; it begins with what is alive."""
        self._section = section
        self.peaks.setdefault(section, Peak())
        self._note_peak()

    def count(self, tensor: torch.Tensor, label: str) -> None:
        """Count a tensor that was there before the block, or give it another label."""
        storage = _storage(tensor)
        if storage is not None:
            self._forget(storage._cdata)
            self._add(storage, label)

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """What is made within is on the host."""
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and count its results."""
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if self._is_counting and isinstance(each, torch.Tensor):
                self._see(each)
        return found

    def __enter__(self) -> Any:
        """Watch storages that change their size, too."""
        resize, counter = torch.UntypedStorage.resize_, self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if storage._cdata in counter._sizes:
                label, _ = counter._sizes[storage._cdata]
                counter._change(storage._cdata, (label, storage.nbytes()))
            return done

        self._resize = resize
        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _see(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is not None and storage._cdata not in self._sizes:
            self._add(storage, self._label(tensor))

    def _add(self, storage: torch.UntypedStorage, label: str) -> None:
        self._change(storage._cdata, (label, storage.nbytes()))
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        if key in self._sizes:
            self._change(key, None)

    def _change(self, key: int, size: _Size | None) -> None:
        if key in self._sizes:
            label, num_bytes = self._sizes.pop(key)
            self._live[label] -= num_bytes
            self._total -= num_bytes
        if size is not None:
            self._sizes[key] = size
            self._live[size[0]] += size[1]
            self._total += size[1]
            self._note_peak()

    def _note_peak(self) -> None:
        if self._section is None:
            return
        peak = self.peaks[self._section]
        if self._total > peak.total or not peak.by_label:
            peak.total, peak.by_label = self._total, dict(self._live)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Of this rank's part of a tensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return None if local.layout != torch.strided else local.untyped_storage()
