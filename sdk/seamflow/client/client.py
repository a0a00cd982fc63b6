"""The client of an agent: start a rollout, generate turns, finish it with a reward.

    async with Client("127.0.0.1:50052", run_id="demo") as client:
        rollout = await client.start_rollout()
        turn = await rollout.generate([{"role": "user", "content": "2+2?"}])
        await rollout.finish({"reward": float(turn.text == "4")})

A call survives weight updates, moved nodes and killed servers: it is delayed but loses no token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from google.protobuf.duration_pb2 import Duration

from seamflow.channel import CONNECT_TIMEOUT, connect
from seamflow.client.messages import Message, Tool, to_messages
from seamflow.client.rollout_client import CALL_SECONDS, Observer, Rollout
from seamflow.client.turn import Task
from seamflow.common.v1 import tokens_pb2
from seamflow.credentials import Credentials
from seamflow.durations import seconds_of, to_duration
from seamflow.errors import RunEndedError, SeamflowError
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.waits import in_background

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

__all__ = ["Client", "Observer"]

_log = logging.getLogger("seamflow")
_MAX_ROLLOUTS = 1024


class Client:
    """A connection to a rollout gateway for one run. Close it, or use `async with`."""

    def __init__(
        self,
        gateway: str,
        *,
        run_id: str,
        credentials: Credentials | None = None,
        connect_timeout: float | None = CONNECT_TIMEOUT,
        observer: Observer | None = None,
    ) -> None:
        self.run_id = run_id
        self._observer = observer
        self._channel = connect(gateway, credentials, connect_timeout=connect_timeout)
        self._stub = async_stub(RolloutServiceStub, self._channel)
        self._leases = _LeaseKeeper(self._stub, run_id)

    async def lease_rollouts(
        self, max_rollouts: int = 1, *, train: bool | None = None, wait: float = 20.0
    ) -> list[Rollout]:
        """Lease up to 8 tasks and start a rollout for each; `Rollout.task` is its task.

        Waits `wait` seconds for the first one, then returns an empty list. `train` selects training
        or evaluation tasks only. Leases are kept alive until the rollout ends; `Rollout.lost` is
        set if one is lost. Raises `RunEndedError` when there will be no more tasks.
        """
        purposes = {True: tokens_pb2.PURPOSE_TRAIN, False: tokens_pb2.PURPOSE_EVAL}
        request = pb.LeaseRolloutsRequest(
            run_id=self.run_id,
            request_id=uuid.uuid4().hex,
            agent_id=socket.gethostname(),
            purpose=tokens_pb2.PURPOSE_UNSPECIFIED if train is None else purposes[train],
            wait=to_duration(wait),
            max_rollouts=max_rollouts,
        )
        answer = await retrying(lambda: self._stub.LeaseRollouts(request), timeout=CALL_SECONDS)
        if answer.empty_reason == trajectory_pb2.EMPTY_REASON_RUN_ENDED:
            raise RunEndedError(f"run {self.run_id!r} has ended", "RUN_ENDED")
        return [
            self._rollout(lease.rollout_id, lease.credential, lease.lease_duration, lease.task)
            for lease in answer.leases
        ]

    async def start_rollout(
        self,
        rollout_id: str | None = None,
        *,
        group: tuple[str, int] | None = None,
        pinned_weight_version: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Rollout:
        """Start a rollout without a leased task.

        With `group` (its name, its size) it is trained with the other members once all have
        finished; without one it is an evaluation. Raises `InvalidRequestError` for a pinned version
        with a group.
        """
        request = pb.StartRolloutRequest(
            run_id=self.run_id,
            rollout_id=rollout_id or uuid.uuid4().hex,
            purpose=tokens_pb2.PURPOSE_TRAIN if group else tokens_pb2.PURPOSE_EVAL,
            group=pb.Group(group_id=group[0], size=group[1]) if group else None,
            pinned_weight_version=pinned_weight_version,
            labels=labels,
        )
        answer = await retrying(lambda: self._stub.StartRollout(request), timeout=CALL_SECONDS)
        lease = answer.lease_duration if answer.HasField("lease_duration") else None
        return self._rollout(answer.rollout_id, answer.credential, lease)

    def rollout(self, rollout_id: str, credential: str) -> Rollout:
        """A rollout that another process has leased or started, and which keeps its lease."""
        return self._rollout(rollout_id, credential, None)

    async def run(self) -> trajectory_pb2.Run:
        """State and rules of the run."""
        request = pb.GetRunRequest(run_id=self.run_id)
        return (await retrying(lambda: self._stub.GetRun(request), timeout=CALL_SECONDS)).run

    async def model(self) -> GetModelResponse:
        """What to know of the model: vocabulary, context, chat template."""
        request = pb.GetModelRequest(run_id=self.run_id)
        return await retrying(lambda: self._stub.GetModel(request), timeout=CALL_SECONDS)

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a text, or of messages as a first turn's prompt."""
        request = pb.TokenizeRequest(run_id=self.run_id)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.messages.CopyFrom(to_messages(prompt, tools, template_arguments))
        return list(
            (await retrying(lambda: self._stub.Tokenize(request), timeout=CALL_SECONDS)).token_ids
        )

    async def close(self) -> None:
        """Close the connection; open calls fail."""
        await self._leases.close()
        await self._channel.close()

    def _rollout(
        self,
        rollout_id: str,
        credential: str,
        lease: Duration | None,
        task: trajectory_pb2.Task | None = None,
    ) -> Rollout:
        rollout = Rollout(
            self._stub,
            run_id=self.run_id,
            rollout_id=rollout_id,
            credential=credential,
            task=_task(task) if task is not None else None,
            observer=self._observer,
            on_end=self._leases.remove,
        )
        if lease is not None:
            self._leases.add(rollout, lease)
        return rollout

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _task(task: trajectory_pb2.Task) -> Task:
    return Task(
        task_id=task.task_id,
        payload=json.loads(task.payload_json or "{}"),
        train=task.purpose == tokens_pb2.PURPOSE_TRAIN,
    )


class _LeaseKeeper:
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
            self._extending = in_background(self._keep_extending(), "extending leases")

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


if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2 import GetModelResponse
