"""A micro-batch of rollouts as long as they may be."""

from __future__ import annotations

import numpy as np

from trainer.data.micro_batch import MicroBatch


def sample_rows(micro_batch_tokens: int, rollout_tokens: int, prompt_tokens: int) -> MicroBatch:
    """As many rollouts as a micro-batch takes, at least one, which have no token in common.

    Args:
        micro_batch_tokens: budget of a micro-batch.
        rollout_tokens: of each rollout.
        prompt_tokens: its first tokens, which are not trained.
    """
    shape = max(micro_batch_tokens // rollout_tokens, 1), rollout_tokens
    first = np.arange(shape[0], dtype=np.int32)
    zeros, trained = np.zeros(shape, np.float32), np.ones(shape, np.bool_)
    trained[:, :prompt_tokens] = False
    return MicroBatch(
        token_ids_BT=np.repeat(first[:, None], shape[1], 1),
        behaviour_logprobs_BT=zeros,
        reference_logprobs_BT=zeros,
        loss_mask_BT=trained,
        weight_versions_BT=np.zeros(shape, np.int64),
        lengths_B=np.full(shape[0], shape[1]),
        rollouts_B=first.astype(np.int64),
        groups_B=first.astype(np.int64),
        sequences_B=first.astype(np.int64),
        advantages_B=np.ones(shape[0]),
        weights_B=np.ones(shape[0]),
        bootstrap_B=np.zeros(shape[0], np.bool_),
        temperatures_BT=np.ones(shape, np.float32),
        turn_rewards_BT=zeros,
    )
