"""Recorded experts as the routers of a forward pass replay them.

Shape suffixes: B rows of a micro-batch, T tokens of a row, U tokens of a pass (distinct ones if it
is packed), L layers, K chosen experts.
"""
# ruff: noqa: N803, N806 -- arrays carry shape suffixes

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.lib.transformer.packing import Packing
from trainer.data.micro_batch import MicroBatch

FREE = -1
"""Of a token without a record: its routers choose."""


def routed_experts(batch: MicroBatch, packing: Packing | None, device: str) -> torch.Tensor | None:
    """Experts that each token of a pass is routed to, int16 [U, L, K]; less than 0: any.

    A record is of the pass that gave its token, so it is replayed at the token before. Of packed
    rows that share a token the first one with a record counts: they differ where servers, or
    weight versions, computed the prefix of a group.

    Args:
        batch: the micro-batch.
        packing: of its rows; None: they are padded.
        device: of the model.
    """
    if batch.routed_experts_BTLK is None:
        return None
    chosen_BTLK = _at_inputs(batch.routed_experts_BTLK)
    if packing is None:
        return torch.from_numpy(chosen_BTLK).flatten(0, 1).to(device)
    places_BT, num_tokens = packing.places_BT.cpu().numpy(), len(packing.token_ids_U)
    chosen_ULK = np.full((num_tokens, *chosen_BTLK.shape[2:]), FREE, np.int16)
    rows = zip(chosen_BTLK, places_BT, batch.lengths_B, strict=True)
    for row_TLK, places_T, length in reversed(list(rows)):
        recorded_T = (row_TLK[:length] >= 0).any((1, 2))
        chosen_ULK[places_T[:length][recorded_T]] = row_TLK[:length][recorded_T]
    return torch.from_numpy(chosen_ULK).to(device)


def _at_inputs(experts_BTLK: NDArray[Any]) -> NDArray[np.int16]:
    """The choices at each token, of the record of the token after it."""
    none = np.iinfo(experts_BTLK.dtype).max
    chosen_BTLK = np.full(experts_BTLK.shape, FREE, np.int16)
    after_BTLK = experts_BTLK[:, 1:]
    chosen_BTLK[:, :-1] = np.where(after_BTLK == none, FREE, after_BTLK.astype(np.int32))
    return chosen_BTLK
