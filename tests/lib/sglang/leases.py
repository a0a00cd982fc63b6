"""What the trainer leased must be whole turns, exactly as agents received them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher.report.summary import Received
from tests.lib.sglang.turns import ENDED


def half_segments(
    leased: Path, received: Received, stored: Iterable[trajectory_pb2.Trajectory]
) -> tuple[int, list[str]]:
    """How many samples were leased, and what is wrong with those that are not made of whole turns.

    The agents of the run hold one conversation, so a sample is all turns of its rollout in order.
    """
    by_rollout = {trajectory.rollout_id: trajectory for trajectory in stored}
    samples = [json.loads(line) for line in leased.read_text().splitlines()]
    wrong = []
    for sample in samples:
        turns = by_rollout[sample["rollout_id"]].turns
        if any(turn.finish_reason not in ENDED for turn in turns):
            wrong.append(f"{sample['sample_id']}: has a turn that did not end")
        told = [
            token.token_id
            for turn in turns
            for _, [token, *_] in sorted(received[sample["rollout_id"], turn.turn_id].items())
        ]
        pairs = zip(sample["token_ids"], sample["loss_mask"], strict=True)
        if [token_id for token_id, is_trained in pairs if is_trained] != told:
            wrong.append(f"{sample['sample_id']}: trains other tokens than the agent received")
    return len(samples), wrong
