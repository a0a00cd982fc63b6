"""Which tokens of a turn's sequence a sample trained, and how."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2 as pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as service_pb

from services.console.sources.run_store import RunStore
from services.console.views.token_window import TrainedTokens, trained_places


def turn(name: str, prefix: str, prefix_length: int, num_tokens: int) -> pb.Turn:
    """A turn that adds tokens to another one."""
    spans = [tokens_pb2.Span(start=0, num_tokens=num_tokens)]
    return pb.Turn(
        turn_id=name,
        prefix_turn_id=prefix,
        prefix_length=prefix_length,
        tokens=tokens_pb2.Tokens(spans=spans),
    )


def sample(leaf: str, *places: int, advantages: Sequence[float] = (0.5,)) -> pb.TrainedSample:
    """A sample that trained single tokens."""
    return pb.TrainedSample(
        sample_id=f"rollout#{leaf}",
        spans=[pb.TrainedSpan(start=place, num_tokens=1) for place in places],
        logprob_differences=struct.pack(f"<{len(places)}e", *(0.25 * p for p in places)),
        advantages=struct.pack(f"<{len(advantages)}e", *advantages),
    )


ROOT, LEFT, RIGHT = turn("root", "", 0, 4), turn("left", "root", 4, 3), turn("right", "root", 2, 4)
TURNS = [ROOT, LEFT, RIGHT]


def test_a_leaf_has_what_its_sample_trained() -> None:
    """One advantage stands for all; differences have one for each token."""
    found = trained_places(TURNS, [sample("left", 3, 5)], "left")
    assert found == {3: (0.75, 0.5), 5: (1.25, 0.5)}


def test_a_turn_has_the_tokens_before_the_path_leaves_it() -> None:
    """The root is on the path of both leaves: of the second only its first two tokens are."""
    samples = [sample("left", 3, 5), sample("right", 1, 3, advantages=(1.0, 2.0))]
    assert trained_places(TURNS, samples, "root") == {3: (0.75, 0.5), 1: (0.25, 1.0)}
    assert trained_places(TURNS, samples, "right") == {1: (0.25, 1.0), 3: (0.75, 2.0)}


def test_what_is_not_recorded_is_unknown() -> None:
    """A trainer without advantages or log-probs says which tokens it trained."""
    bare = sample("left", 5)
    bare.ClearField("advantages")
    bare.ClearField("logprob_differences")
    assert trained_places(TURNS, [bare], "left") == {5: (None, None)}
    assert trained_places(TURNS, [], "left") == {}


class Store(RunStore):
    """A store in which a step may have trained the rollout, and the trainer has recorded it."""

    def __init__(self, step: int, samples: Sequence[pb.TrainedSample]) -> None:
        self.step, self.recorded = step, samples

    async def found(
        self, search: service_pb.SearchRolloutsRequest
    ) -> service_pb.SearchRolloutsResponse:
        """The rollout."""
        return service_pb.SearchRolloutsResponse(rollouts=[pb.RolloutSummary(step=self.step)])

    async def trained(
        self, step: int, rollout_ids: tuple[str, ...] = (), *, with_tokens: bool = False
    ) -> AsyncIterator[pb.TrainedSample]:
        """What is recorded."""
        for each in self.recorded:
            yield each

    async def headers(self, rollout_id: str) -> tuple[pb.Trajectory, str]:
        """Its turns."""
        return pb.Trajectory(turns=TURNS), ""


@pytest.mark.parametrize(
    ("step", "samples", "is_known"),
    [(0, [], True), (3, [sample("left", 5)], True), (3, [], False)],
)
async def test_a_step_that_is_no_longer_recorded_says_nothing(
    step: int, samples: list[pb.TrainedSample], is_known: bool
) -> None:
    """What no step trained is known not to be trained."""
    trained = await TrainedTokens.of(Store(step, samples), "rollout", "left")
    assert trained.is_known is is_known
    assert trained.has(5) is bool(samples)
