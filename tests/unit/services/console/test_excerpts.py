"""What a row tells of a rollout's text."""

from __future__ import annotations

import struct
from typing import Any, cast

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import NotFoundError
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.console.text import TokenText
from services.console.views.excerpts import excerpts

MARKS = {"<think>": 1, "</think>": 2}
BYTES = TokenText(lambda ids: bytes(i for i in ids if i > 2).decode(), MARKS)


class Store:
    """One rollout of one turn: a prompt and an answer."""

    def __init__(self, prompt: bytes, answer: bytes, state: int) -> None:
        self.ids, self.state, self.text = [*prompt, *answer], state, BYTES
        self.excerpts: dict[str, Any] = {}
        kinds = (
            (tokens_pb2.ORIGIN_ENVIRONMENT, prompt, 0),
            (tokens_pb2.ORIGIN_POLICY, answer, len(prompt)),
        )
        self.spans = [
            tokens_pb2.Span(origin=o, start=s, num_tokens=len(t)) for o, t, s in kinds if t
        ]

    async def headers(self, rollout_id: str) -> tuple[trajectory_pb2.Trajectory, str]:
        """A deleted rollout is not found."""
        if rollout_id != "r":
            raise NotFoundError(rollout_id)
        turn = trajectory_pb2.Turn(turn_id="t", tokens=tokens_pb2.Tokens(spans=self.spans))
        state = cast("trajectory_pb2.RolloutState.ValueType", self.state)
        return trajectory_pb2.Trajectory(rollout_id="r", state=state, turns=[turn]), "the task"

    async def window(self, _: str, __: str, start: int, count: int) -> pb.ReadTokensResponse:
        """Ids alone."""
        ids = self.ids[start : start + count]
        packed = tokens_pb2.PackedTokens(token_ids=struct.pack(f"<{len(ids)}i", *ids))
        return pb.ReadTokensResponse(tokens=packed)


@pytest.mark.parametrize(
    ("prompt", "answer", "shown"),
    [
        (b"why", b"so", ("why", "so")),
        (b"why", b"", ("why", None)),
        (b"", b"", ("the task", None)),
        (b"w" * 1000, b"a" * 90 + b"b" * 70, ("w" * 300, "…" + "a" * 30 + "b" * 70)),
        (b"why", b"\x01" + b"hm" * 400 + b"\x02so", ("why", "so")),
    ],
)
async def test_the_prompt_begins_and_the_answer_ends(
    prompt: bytes, answer: bytes, shown: tuple[str | None, str | None]
) -> None:
    """Reasoning is no answer; where no prompt is recorded it is the task."""
    store: Any = Store(prompt, answer, trajectory_pb2.ROLLOUT_STATE_RUNNING)
    (found,) = (await excerpts(store, ["r"])).values()
    assert (found["prompt"], found["answer"]) == shown


async def test_only_ended_rollouts_are_kept() -> None:
    """Others go on; control: one that was deleted has none."""
    states = (trajectory_pb2.ROLLOUT_STATE_RUNNING, trajectory_pb2.ROLLOUT_STATE_FAILED)
    for state in states:
        store: Any = Store(b"why", b"so", state)
        found = await excerpts(store, ["r", "gone"])
        assert found["gone"] == {"prompt": None, "answer": None}
        assert list(store.excerpts) == (["r"] if state == states[1] else [])
