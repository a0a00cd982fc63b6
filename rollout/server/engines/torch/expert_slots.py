"""Routed experts of cached positions: they follow keys and values into copies of a prefix.

Shapes: R rows of a pass, S new tokens of each, N = R * S, K chosen experts.
"""
# ruff: noqa: N803, N806 -- arrays carry their shapes in their names

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.lib.routed_experts import RoutingShape


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
