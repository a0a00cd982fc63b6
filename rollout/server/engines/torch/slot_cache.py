"""What is cached for each slot: keys and values for Hugging Face attention, and routed experts.

Each slot owns one row of every layer buffer. While the decoding rows are slots 0 .. n-1, as they
are whenever nothing ends early, attention reads a view; else it reads a copy of their rows.

Shapes: L slots, R rows of a pass, S new tokens of each, N = R * S, H key/value heads, T positions,
D head size, K chosen experts.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry their shapes in their names

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from services.lib.routed_experts import RoutingShape

_GROWTH = 256


@dataclass(slots=True)
class Window:
    """Which part of the cache the current forward pass writes and reads."""

    slots_R: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    dense: int = 0
    """R if the slots are 0 .. R-1 in order, else 0."""
    positions_RS: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    """The positions each row writes."""
    width: int = 0
    """Attention reads positions 0 .. width-1."""


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The buffers of one layer, allocated when the first keys show their shape."""

    def __init__(self, window: Window, num_slots: int, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.num_slots = num_slots
        self.most = most
        self.capacity = 0
        self.keys_LHTD = self.values_LHTD = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and shape from the first keys and values, [R, H, *, D]."""
        self.keys_LHTD = self._buffer(key_states, 0)
        self.values_LHTD = self._buffer(value_states, 0)
        self.is_initialized = True

    def _buffer(self, like: Tensor, positions: int) -> Tensor:
        # Zeros, not empty: a masked position still enters 0 * value, and 0 * NaN is NaN.
        return like.new_zeros(self.num_slots, like.shape[1], positions, like.shape[3])

    def reserve(self, positions: int) -> None:
        """Make room for `positions`, keeping what is stored."""
        if positions <= self.capacity:
            return
        size = max(positions, min(2 * self.capacity, self.most))
        size = -(-size // _GROWTH) * _GROWTH
        keys, values = self._buffer(self.keys_LHTD, size), self._buffer(self.values_LHTD, size)
        keys[:, :, : self.capacity] = self.keys_LHTD
        values[:, :, : self.capacity] = self.values_LHTD
        self.keys_LHTD, self.values_LHTD, self.capacity = keys, values, size

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values of the window; return what its queries attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        self.reserve(window.width)
        lanes_R1 = window.slots_R[:, None]
        self.keys_LHTD[lanes_R1, :, window.positions_RS] = key_states.transpose(1, 2)
        self.values_LHTD[lanes_R1, :, window.positions_RS] = value_states.transpose(1, 2)
        rows = slice(window.dense) if window.dense else window.slots_R
        keys, values = self.keys_LHTD[rows], self.values_LHTD[rows]
        return keys[:, :, : window.width], values[:, :, : window.width]

    # The masks of Hugging Face ask these; every pass brings its own 4D mask instead.
    def get_seq_length(self) -> int:
        """No past is visible to mask construction."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Nothing but the queries is."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Unbounded: buffers grow on demand."""
        return -1


class SlotCache(Cache):
    """One `_SlotLayer` per model layer, all looking through the same `window`."""

    def __init__(self, layers: int, num_slots: int, most: int) -> None:
        """`num_slots` slots of at most about `most` positions in each of `layers` layers.

        Nothing is allocated until the first pass.
        """
        self.window = Window()
        self._slot_layers = [_SlotLayer(self.window, num_slots, most) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def read(self, slot: int, positions: int) -> list[Tensor]:
        """Copy the first positions of a slot, each layer's keys and values in turn."""
        return [
            buffer[slot, :, :positions].clone()
            for layer in self._slot_layers
            for buffer in (layer.keys_LHTD, layer.values_LHTD)
        ]

    def write(self, slot: int, cached: list[Tensor], positions: int) -> None:
        """Fill a slot with the first positions of what `read` gave."""
        for number, layer in enumerate(self._slot_layers):
            layer.keys_LHTD[slot, :, :positions] = cached[2 * number][:, :positions]
            layer.values_LHTD[slot, :, :positions] = cached[2 * number + 1][:, :positions]

    @property
    def nbytes(self) -> int:
        return sum(layer.keys_LHTD.nbytes + layer.values_LHTD.nbytes for layer in self._slot_layers)


class ExpertSlots:
    """What the routers chose in the passes over the positions of each slot, on the host."""

    def __init__(self, shape: RoutingShape, num_slots: int) -> None:
        """Nothing is allocated until the first pass."""
        self._shape = shape
        self._slots = [shape.empty(0)] * num_slots

    def put(self, slots: list[int], positions_RS: Tensor, layer: int, chosen_NK: Tensor) -> None:
        """Keep what the router of a layer chose."""
        chosen = chosen_NK.view(*positions_RS.shape, -1).cpu().numpy()
        for slot, positions_S, row in zip(slots, positions_RS.cpu().numpy(), chosen, strict=True):
            self._reserve(slot, int(positions_S.max()) + 1)
            self._slots[slot][positions_S, layer] = row

    def _reserve(self, slot: int, positions: int) -> None:
        kept = self._slots[slot]
        if len(kept) < positions:
            grown = self._shape.empty(max(positions, 2 * len(kept)))
            grown[: len(kept)] = kept
            self._slots[slot] = grown

    def read(self, slot: int, start: int, stop: int) -> NDArray[Any]:
        """Copy those of the positions from `start` to `stop`."""
        return np.array(self._slots[slot][start:stop])

    def write(self, slot: int, experts: NDArray[Any], positions: int) -> None:
        """Fill a slot with the first positions of what `read` gave from 0 on."""
        self._reserve(slot, positions)
        self._slots[slot][:positions] = experts[:positions]
