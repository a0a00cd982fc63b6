"""The two ways to store tokens: a call for each chunk, or the gateway's messages for many turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import SeamflowError, StaleEpochError
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.harness.store_calls import packed, send_async
from rollout.gateway.record.recorder import Recorder
from services.chassis.errors import ServiceError
from tests.chaos.calls import call_retrying_async


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where tokens go, and under which fence."""

    run_id: str
    """Training job."""
    rollout_id: str
    """Open rollout."""
    turn_id: str
    """Open turn."""
    epoch: int
    """From NewTurnResult."""
    offset: int
    """Tokens of the turn before these."""


class Recording(Protocol):
    """Each method returns once the store has acknowledged, or raises its SeamflowError."""

    async def append(self, place: Place, tokens: tokens_pb2.Tokens) -> float:
        """Store tokens; the monotonic time at which they were first sent, or a time before."""

    async def end(self, place: Place) -> None:
        """Close the turn."""

    async def finish(self, finished: pb.RolloutFinish) -> None:
        """Close the rollout."""


class OneByOne:
    """AppendTokens with one part per message."""

    def __init__(self, trajectories: TrajectoryServiceStub) -> None:
        self._trajectories = trajectories

    async def append(self, place: Place, tokens: tokens_pb2.Tokens) -> float:
        """See `Recording`."""
        append = _append(place, tokens=packed(tokens))
        _, sent = await call_retrying_async(partial(send_async, self._trajectories), append)
        return sent

    async def end(self, place: Place) -> None:
        """See `Recording`."""
        append = _append(place, finish_reason=tokens_pb2.FINISH_REASON_STOP)
        await call_retrying_async(partial(send_async, self._trajectories), append)

    async def finish(self, finished: pb.RolloutFinish) -> None:
        """See `Recording`."""
        await call_retrying_async(partial(send_async, self._trajectories), finished)


class Together:
    """AppendTokens in batches, as the gateway sends it."""

    def __init__(self, recorder: Recorder) -> None:
        """`recorder` is the gateway's own; somebody runs its `keep_sending`."""
        self._recorder = recorder

    async def append(self, place: Place, tokens: tokens_pb2.Tokens) -> float:
        """See `Recording`."""
        sent = time.monotonic()
        with _as_called():
            await self._recorder.record(_append(place, tokens=packed(tokens)))
        return sent

    async def end(self, place: Place) -> None:
        """See `Recording`."""
        with _as_called():
            await self._recorder.record(_append(place, finish_reason=tokens_pb2.FINISH_REASON_STOP))

    async def finish(self, finished: pb.RolloutFinish) -> None:
        """See `Recording`."""
        with _as_called():
            await self._recorder.finish(finished)


def _append(
    place: Place,
    tokens: tokens_pb2.PackedTokens | None = None,
    finish_reason: tokens_pb2.FinishReason.ValueType = tokens_pb2.FINISH_REASON_UNSPECIFIED,
) -> pb.TokenAppend:
    return pb.TokenAppend(
        run_id=place.run_id,
        rollout_id=place.rollout_id,
        turn_id=place.turn_id,
        epoch=place.epoch,
        offset=place.offset,
        tokens=tokens,
        finish_reason=finish_reason,
    )


@contextmanager
def _as_called() -> Iterator[None]:
    """The gateway's errors as a caller of the store would get them."""
    try:
        yield
    except ServiceError as error:
        kind = StaleEpochError if error.code is grpc.StatusCode.ABORTED else SeamflowError
        raise kind(error.message, error.reason.value) from error
