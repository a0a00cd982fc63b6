"""What the trainer reports of a batch: the scheduler computes from it when the next tail begins."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from trainer.data.token_sequence import TokenSequence


def measured_batch(sequences: Sequence[TokenSequence]) -> pb.MeasuredBatch | None:
    """Tokens that its rollouts sampled, without its training time; None if none of them is new.

    Replayed samples are no work of generation. A rollout with a rewritten history counts the
    tokens of all its sequences, one without sampled tokens counts one.
    """
    sampled: dict[str, Counter[str]] = defaultdict(Counter)
    num_tokens = 0
    for item in sequences:
        if not item.replayed:
            sampled[item.group_id][item.rollout_id] += int(item.loss_mask_T.sum())
            num_tokens += len(item.token_ids_T)
    if not sampled:
        return None
    groups = [[max(number, 1) for number in group.values()] for group in sampled.values()]
    num_rollouts, num_sampled = sum(map(len, groups)), sum(map(sum, groups))
    return pb.MeasuredBatch(
        groups=[pb.GroupTokens(rollout_tokens=group) for group in groups],
        prompt_tokens=max(num_tokens - num_sampled, 0) / num_rollouts,
    )
