"""What a scoring service tells the scheduler of a batch, from which R_t is computed."""

from __future__ import annotations

from seamflow.durations import seconds_of
from seamflow.trajectory.v1 import trajectory_pb2

from services.scoring.node_request import ScoredRollouts


def sample(rollout_id: str, loss_mask: bytes) -> trajectory_pb2.Sample:
    """Of a rollout; a byte of 1 for each sampled token."""
    return trajectory_pb2.Sample(rollout_id=rollout_id, loss_mask=loss_mask)


def test_each_rollout_is_a_group_with_the_tokens_of_all_its_samples() -> None:
    """Prompts are the mean of what was not sampled; a rollout without sampled tokens has one."""
    scored = ScoredRollouts()
    scored.add([sample("a", b"\0\1\1"), sample("b", b"\0\0")], 1.5)
    scored.add([sample("a", b"\0\1")], 0.5)
    assert len(scored) == 2
    batch = scored.take()
    assert batch is not None
    assert [list(group.rollout_tokens) for group in batch.groups] == [[3], [1]]
    assert (seconds_of(batch.training_duration), batch.prompt_tokens) == (2.0, 2.0)
    assert scored.take() is None
    assert len(scored) == 0, "it begins anew"
