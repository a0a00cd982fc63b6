"""Micro-batches of rows of tokens in which every token counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.data.micro_batch import MicroBatch


def whole_rows(rows: Sequence[Sequence[int]]) -> MicroBatch:
    """The loss is that of all tokens but the first of a row, at temperature 1."""
    shape = (len(rows), max(map(len, rows)))
    ids_bt, mask_bt = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for number, row in enumerate(rows):
        ids_bt[number, : len(row)] = row
        mask_bt[number, 1 : len(row)] = True
    return MicroBatch(
        token_ids_BT=ids_bt,
        behaviour_logprobs_BT=np.zeros(shape, np.float32),
        reference_logprobs_BT=np.zeros(shape, np.float32),
        loss_mask_BT=mask_bt,
        weight_versions_BT=np.zeros(shape, np.int64),
        lengths_B=np.array([len(row) for row in rows]),
        rollouts_B=np.arange(len(rows)),
        groups_B=np.zeros(len(rows), np.int64),
        sequences_B=np.arange(len(rows)),
        advantages_B=np.ones(len(rows)),
        weights_B=np.ones(len(rows)),
        bootstrap_B=np.zeros(len(rows), bool),
        temperatures_BT=np.ones(shape, np.float32),
        turn_rewards_BT=np.zeros(shape, np.float32),
    )
