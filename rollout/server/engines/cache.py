"""A slotted key/value cache that plugs into Hugging Face's own attention.

Each sequence owns one row of every layer's buffers. Rows 0 .. n-1 are always the running ones, so a
decode step hands attention a view, never a copy.

Shapes: R rows, H key/value heads, T positions, D head size, P padded prompt length.
"""

# ruff: noqa: N803, N806, N815 -- tensors carry their shapes in their names

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["SlotCache", "Window"]

_GROWTH = 256


@dataclass(slots=True)
class Window:
    """Which part of the cache the current forward pass writes and reads."""

    first: int = 0
    """First row written."""
    rows: int = 0
    """Number of rows written."""
    positions_R: Tensor | None = None
    """Decode: the position each row writes. None: a prefill that writes positions 0 .. P-1."""
    width: int = 0
    """Decode: attention reads positions 0 .. width-1."""


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The buffers of one layer, allocated when the first keys show their shape."""

    def __init__(self, window: Window, slots: int, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.slots = slots
        self.most = most
        self.capacity = 0
        self.rows_R = torch.arange(slots)
        self.keys_RHTD = self.values_RHTD = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and shape from the first keys and values, [R, H, *, D]."""
        self.keys_RHTD = self._buffer(key_states, 0)
        self.values_RHTD = self._buffer(value_states, 0)
        self.is_initialized = True

    def _buffer(self, like: Tensor, positions: int) -> Tensor:
        # Zeros, not empty: a masked position still enters 0 * value, and 0 * NaN is NaN.
        return like.new_zeros(self.slots, like.shape[1], positions, like.shape[3])

    def reserve(self, positions: int) -> None:
        """Make room for `positions`, keeping what is stored."""
        if not self.is_initialized or positions <= self.capacity:
            return
        wanted = max(positions, min(2 * self.capacity, self.most))
        wanted = -(-wanted // _GROWTH) * _GROWTH
        keys, values = self._buffer(self.keys_RHTD, wanted), self._buffer(self.values_RHTD, wanted)
        keys[:, :, : self.capacity] = self.keys_RHTD
        values[:, :, : self.capacity] = self.values_RHTD
        self.keys_RHTD, self.values_RHTD, self.capacity = keys, values, wanted

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values of the window; return what its queries attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.window.positions_R is None:
            return self._prefill(key_states, value_states)
        return self._decode(self.window.positions_R, key_states, value_states)

    def _prefill(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        first, last, length = self.window.first, self.window.first + self.window.rows, keys.shape[2]
        self.reserve(length)
        self.keys_RHTD[first:last, :, :length] = keys
        self.values_RHTD[first:last, :, :length] = values
        return keys, values

    def _decode(self, positions_R: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = self.window.rows, self.window.width
        self.reserve(width)
        rows_R = self.rows_R[:rows]
        self.keys_RHTD[rows_R, :, positions_R] = keys[:, :, 0]
        self.values_RHTD[rows_R, :, positions_R] = values[:, :, 0]
        return self.keys_RHTD[:rows, :, :width], self.values_RHTD[:rows, :, :width]

    def move(self, source_M: Tensor, target_M: Tensor, positions: int) -> None:
        """Copy whole rows: target_M[i] becomes source_M[i], in positions 0 .. positions-1."""
        positions = min(positions, self.capacity)
        for buffer in (self.keys_RHTD, self.values_RHTD):
            buffer[target_M, :, :positions] = buffer[source_M, :, :positions]

    # The masks of Hugging Face ask these; a prefill always starts at an empty row, and a decode
    # step brings its own 4D mask, so neither sees a past.
    def get_seq_length(self) -> int:
        """No past is visible to mask construction."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A prefill attends to itself only."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Unbounded: buffers grow on demand."""
        return -1


class SlotCache(Cache):
    """One `_SlotLayer` per model layer, all looking through the same `window`."""

    def __init__(self, layers: int, slots: int, most: int) -> None:
        """`slots` rows of at most about `most` positions in each of `layers` layers.

        Nothing is allocated until the first prefill.
        """
        self.window = Window()
        self._slot_layers = [_SlotLayer(self.window, slots, most) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def move(self, source_M: Tensor, target_M: Tensor, positions: int) -> None:
        """Copy whole rows in every layer."""
        for layer in self._slot_layers:
            if layer.is_initialized:
                layer.move(source_M, target_M, positions)

    @property
    def nbytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(layer.keys_RHTD.nbytes + layer.values_RHTD.nbytes for layer in self._slot_layers)
