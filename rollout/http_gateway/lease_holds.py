"""Keeps the leases of rollouts alive while agents call, and for a while after."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seamflow.durations import seconds_of
from seamflow.errors import SeamflowError
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from services.chassis.log import get_logger

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

_log = get_logger()
_MAX_ROLLOUTS = 1024
_FIRST_SECONDS = 15.0
_CALL_SECONDS = 60.0
_GATHER_SECONDS = 0.1
"""New rollouts of this time are extended in one call."""


_Key = tuple[str, str]
"""Rollout and credential: a wrong credential must not displace the right one."""


@dataclass(slots=True)
class _Hold:
    num_calls: int = 0
    last_call: float = 0.0


class LeaseHolds:
    """Losing them costs nothing that the agent's next call does not restore."""

    def __init__(self, stub: RolloutServiceAsyncStub, run_id: str, idle_seconds: float) -> None:
        """A lease is kept until `idle_seconds` after the rollout's last call."""
        self._stub = stub
        self._run_id = run_id
        self._idle_seconds = idle_seconds
        self._holds: dict[_Key, _Hold] = {}
        self._new: set[_Key] = set()
        self._added = asyncio.Event()
        self._seconds = _FIRST_SECONDS
        self._clock = asyncio.get_running_loop().time

    @contextmanager
    def call(self, rollout_id: str, credential: str) -> Iterator[None]:
        key = rollout_id, credential
        if key not in self._holds:
            self._holds[key] = _Hold()
            self._new.add(key)
            self._added.set()
        hold = self._holds[key]
        hold.num_calls += 1
        try:
            yield
        finally:
            hold.num_calls -= 1
            hold.last_call = self._clock()

    def remove(self, rollout_id: str, credential: str) -> None:
        self._holds.pop((rollout_id, credential), None)

    async def keep_extending(self) -> None:
        """Extend each lease when its rollout is new, and every third of its duration."""
        due = self._clock()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._added.wait()
                    await asyncio.sleep(_GATHER_SECONDS)
            keys, self._new = self._new, set()
            self._added.clear()
            if self._clock() >= due:
                self._drop_idle()
                keys, due = set(self._holds), math.inf
            for batch in _batches(keys & self._holds.keys()):
                await self._extend(batch)
            due = min(due, self._clock() + self._seconds / 3)

    def _drop_idle(self) -> None:
        oldest = self._clock() - self._idle_seconds
        for key in [k for k, h in self._holds.items() if not h.num_calls and h.last_call < oldest]:
            del self._holds[key]

    async def _extend(self, batch: Mapping[str, str]) -> None:
        rollouts = [pb.RolloutCredential(rollout_id=i, credential=c) for i, c in batch.items()]
        request = pb.ExtendRolloutsRequest(run_id=self._run_id, rollouts=rollouts)
        try:
            answer = await retrying(
                lambda: self._stub.ExtendRollouts(request), timeout=_CALL_SECONDS
            )
        except SeamflowError as error:
            _log.warning("leases_not_extended", number=len(batch), error=str(error))
            return
        self._seconds = seconds_of(answer.lease_duration) or self._seconds
        for rollout_id in answer.lost_rollout_ids:  # lost, finished, or without a lease
            self._holds.pop((rollout_id, batch[rollout_id]), None)


def _batches(keys: Iterable[_Key]) -> Iterator[dict[str, str]]:
    """Credentials by rollout; of a rollout that is shown two, each is in a batch of its own."""
    left = list(keys)
    while left:
        batch: dict[str, str] = {}
        later = []
        for rollout_id, credential in left:
            if rollout_id in batch or len(batch) == _MAX_ROLLOUTS:
                later.append((rollout_id, credential))
            else:
                batch[rollout_id] = credential
        yield batch
        left = later
