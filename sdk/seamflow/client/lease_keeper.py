"""Keeps the leases of an agent's rollouts alive in the background."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from seamflow.client.rollout_client import CALL_SECONDS, Rollout
from seamflow.durations import seconds_of
from seamflow.errors import SeamflowError
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_service_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub


_log = logging.getLogger("seamflow")
_MAX_ROLLOUTS = 1024


class LeaseKeeper:
    """Extends leases every third of their duration, until the rollout ends or is lost."""

    def __init__(self, stub: RolloutServiceAsyncStub, run_id: str) -> None:
        self._stub = stub
        self._run_id = run_id
        self._rollouts: dict[str, Rollout] = {}
        self._seconds = 0.0
        self._extending: asyncio.Task[None] | None = None

    def add(self, rollout: Rollout, lease: Duration) -> None:
        """Keep the lease of `rollout`."""
        self._rollouts[rollout.rollout_id] = rollout
        self._seconds = seconds_of(lease)
        if self._extending is None or self._extending.done():
            self._extending = asyncio.create_task(self._keep_extending())

    def remove(self, rollout_id: str) -> None:
        """The rollout has ended."""
        self._rollouts.pop(rollout_id, None)

    async def close(self) -> None:
        """Stop."""
        if self._extending is not None:
            self._extending.cancel()
            await asyncio.gather(self._extending, return_exceptions=True)

    async def _keep_extending(self) -> None:
        while self._rollouts:
            await asyncio.sleep(self._seconds / 3)
            names = list(self._rollouts)
            for start in range(0, len(names), _MAX_ROLLOUTS):
                try:
                    await self._extend(names[start : start + _MAX_ROLLOUTS])
                except SeamflowError as error:
                    _log.warning("leases cannot be extended: %s", error)

    async def _extend(self, names: list[str]) -> None:
        held = [self._rollouts[name] for name in names if name in self._rollouts]
        request = pb.ExtendRolloutsRequest(
            run_id=self._run_id,
            rollouts=[
                pb.RolloutCredential(rollout_id=r.rollout_id, credential=r.credential) for r in held
            ],
        )
        answer = await retrying(lambda: self._stub.ExtendRollouts(request), timeout=CALL_SECONDS)
        for name in answer.lost_rollout_ids:
            if (lost := self._rollouts.pop(name, None)) is not None:
                _log.info("lease of rollout %s was lost", name)
                lost.lost.set()
