"""Gateways and agents in one process, and the log of their acks.

Each writer leases a task and plays its rollout as a gateway and an agent do: turns that continue
each other, tokens in chunks, every call repeated until it is answered. What a store lost is sampled
anew under new ids, as an engine would, so that a loss cannot hide.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, cast

from google.protobuf.duration_pb2 import Duration
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import SeamflowError, StaleEpochError
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2, trajectory_service_pb2
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.harness.store_calls import send_async
from rollout.gateway.record.recorder import Recorder
from services.lib.token_bytes import pack_ids, unpack_ids
from tests.chaos.calls import CREDENTIAL, call_retrying_async, tokens_of
from tests.chaos.store.history import Log
from tests.chaos.store.recording import OneByOne, Place, Recording, Together

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

TURNS = 2
PROMPT_TOKENS = (8, 64)
ANSWER_TOKENS = (64, 512)
CHUNK_TOKENS = (8, 48)
# How often another gateway takes a turn over in its middle.
TAKEOVER_SHARE = 0.02
_QUEUED_TASKS = 64
_FEED_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all writers of the process share."""

    run_id: str
    """Run they play for."""
    forward_first: bool
    """Negative control: tokens are shown to the agent before they are recorded."""


@dataclass(slots=True)
class _Turn:
    """A turn in the making."""

    rollout_id: str
    turn_id: str
    prompt: Sequence[int]
    attempt: int
    epoch: int
    prefix: list[int]
    own: list[int]

    @property
    def sequence(self) -> list[int]:
        return [*self.prefix, *self.own]


class Writer:
    """Plays rollouts, one after the other, until told to stop."""

    def __init__(
        self,
        settings: Settings,
        trajectories: TrajectoryServiceStub,
        tasks: TaskServiceStub,
        recording: Recording,
        log: Log,
        ids: Iterator[int],
        random: Random,
    ) -> None:
        """`ids` is shared by all writers of a run: no id is ever sampled twice."""
        self._settings = settings
        self._trajectories = trajectories
        self._tasks = tasks
        self._recording = recording
        self._log = log
        self._ids = ids
        self._random = random

    async def play(self, stopping: asyncio.Event) -> None:
        """Play rollouts until `stopping`."""
        while not stopping.is_set():
            request = task_service_pb2.LeaseTasksRequest(
                run_id=self._settings.run_id,
                request_id=uuid.uuid4().hex,
                wait=Duration(seconds=1),
            )
            answer, _ = await call_retrying_async(self._tasks.LeaseTasks, request)
            if not answer.leases:
                continue
            lease = answer.leases[0]
            try:
                await self._rollout(lease)
            except SeamflowError as error:
                reason = error.reason or type(error).__name__
                self._log.write(
                    "abandoned", rollout_id=lease.rollout_id, reason=reason, message=str(error)
                )

    async def _rollout(self, lease: task_service_pb2.TaskLease) -> None:
        run_id, rollout_id = self._settings.run_id, lease.rollout_id
        started = trajectory_service_pb2.NewRollout(
            run_id=run_id,
            rollout_id=rollout_id,
            lease_token=lease.lease_token,
            purpose=tokens_pb2.PURPOSE_TRAIN,
            credential_digest=CREDENTIAL,
        )
        await call_retrying_async(partial(send_async, self._trajectories), started)
        sequence: list[int] = []
        for number in range(TURNS):
            prompt = [*sequence, *self._fresh(self._random.randint(*PROMPT_TOKENS))]
            sequence = await self._turn(rollout_id, f"turn-{number}", prompt)
        finished = trajectory_service_pb2.RolloutFinish(
            run_id=run_id,
            rollout_id=rollout_id,
            credential_digest=CREDENTIAL,
            rewards=tokens_pb2.Rewards(
                rewards=[tokens_pb2.Reward(name="reward", value=self._random.random())]
            ),
        )
        await self._recording.finish(finished)
        self._log.write("finished", rollout_id=rollout_id)

    async def _turn(self, rollout_id: str, turn_id: str, prompt: Sequence[int]) -> list[int]:
        turn = await self._begin(rollout_id, turn_id, prompt, attempt=0)
        length = len(prompt) + self._random.randint(*ANSWER_TOKENS)
        while len(turn.sequence) < length:
            try:
                await self._append(turn, *self._next(turn))
            except StaleEpochError:
                # The store started again: the same gateway asks for a new epoch.
                turn = await self._begin(rollout_id, turn_id, prompt, turn.attempt)
            if self._random.random() < TAKEOVER_SHARE:
                turn = await self._begin(rollout_id, turn_id, prompt, turn.attempt + 1)
        await self._end(turn)
        return turn.sequence

    def _next(self, turn: _Turn) -> tuple[list[int], tokens_pb2.Origin.ValueType]:
        """What comes next: the rest of the prompt, then sampled tokens."""
        rest = list(turn.prompt[len(turn.sequence) :])
        if rest:
            return rest, tokens_pb2.ORIGIN_ENVIRONMENT
        return self._fresh(self._random.randint(*CHUNK_TOKENS)), tokens_pb2.ORIGIN_POLICY

    def _fresh(self, count: int) -> list[int]:
        return list(itertools.islice(self._ids, count))

    async def _begin(
        self, rollout_id: str, turn_id: str, prompt: Sequence[int], attempt: int
    ) -> _Turn:
        request = trajectory_service_pb2.NewTurn(
            run_id=self._settings.run_id,
            rollout_id=rollout_id,
            turn_id=turn_id,
            attempt_id=f"attempt-{attempt}",
            token_ids=pack_ids(prompt),
            credential_digest=CREDENTIAL,
        )
        opened, _ = await call_retrying_async(partial(send_async, self._trajectories), request)
        own = list(unpack_ids(opened.tokens.token_ids))
        turn = _Turn(
            rollout_id=rollout_id,
            turn_id=turn_id,
            prompt=prompt,
            attempt=attempt,
            epoch=opened.epoch,
            prefix=list(unpack_ids(opened.prefix_token_ids)),
            own=own,
        )
        if own:
            # Recorded tokens are shown to the agent: from here on they must stay.
            self._acknowledge(turn, 0, own)
        return turn

    async def _append(
        self, turn: _Turn, ids: list[int], origin: tokens_pb2.Origin.ValueType
    ) -> None:
        """Record one chunk, then show it to the agent."""
        offset = len(turn.own)
        if self._settings.forward_first:
            self._acknowledge(turn, offset, ids, time.monotonic())
        sent = await self._recording.append(self._place(turn), tokens_of(ids, origin))
        turn.own += ids
        if not self._settings.forward_first:
            self._acknowledge(turn, offset, ids, sent)

    def _place(self, turn: _Turn) -> Place:
        return Place(
            run_id=self._settings.run_id,
            rollout_id=turn.rollout_id,
            turn_id=turn.turn_id,
            epoch=turn.epoch,
            offset=len(turn.own),
        )

    def _acknowledge(
        self, turn: _Turn, offset: int, ids: Sequence[int], sent: float | None = None
    ) -> None:
        self._log.write(
            "tokens",
            rollout_id=turn.rollout_id,
            turn_id=turn.turn_id,
            offset=offset,
            ids=list(ids),
            sent=sent,
            received=time.monotonic(),
        )

    async def _end(self, turn: _Turn) -> None:
        while True:
            try:
                await self._recording.end(self._place(turn))
            except StaleEpochError:
                again = await self._begin(turn.rollout_id, turn.turn_id, turn.prompt, turn.attempt)
                turn.epoch, turn.own = again.epoch, again.own
            else:
                return


async def feed(tasks: TaskServiceStub, run_id: str, first: int, stopping: asyncio.Event) -> None:
    """Keep the queue of tasks from running dry, as the dataloader does."""
    for number in itertools.count(first, _QUEUED_TASKS):
        if stopping.is_set():
            return
        names = [f"task-{number + i}" for i in range(_QUEUED_TASKS)]
        queued = [
            trajectory_pb2.Task(task_id=name, purpose=tokens_pb2.PURPOSE_TRAIN) for name in names
        ]
        request = task_service_pb2.SubmitTasksRequest(run_id=run_id, tasks=queued)
        answer, _ = await call_retrying_async(tasks.SubmitTasks, request)
        while answer.num_free < _QUEUED_TASKS and not stopping.is_set():
            await asyncio.sleep(_FEED_SECONDS)
            nothing = task_service_pb2.SubmitTasksRequest(run_id=run_id)
            answer, _ = await call_retrying_async(tasks.SubmitTasks, nothing)


async def run(given: argparse.Namespace) -> None:
    """All writers until SIGTERM; each finishes its rollout first. Every second one is batched."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    log, ids = Log(given.log), itertools.count(given.first_id)
    settings = Settings(run_id=given.run_id, forward_first=given.forward_first)
    async with connect(given.target) as channel, asyncio.TaskGroup() as work:
        trajectories, tasks = TrajectoryServiceStub(channel), TaskServiceStub(channel)
        recorder = Recorder(cast("TrajectoryServiceAsyncStub", trajectories))
        recordings: list[Recording] = [OneByOne(trajectories), Together(recorder)]
        sending = work.create_task(recorder.keep_sending())
        playing = [work.create_task(feed(tasks, given.run_id, given.first_id, stopping))]
        for number in range(given.writers):
            random = Random(f"{given.seed}/{number}")
            recording = recordings[number % len(recordings)]
            writer = Writer(settings, trajectories, tasks, recording, log, ids, random)
            playing.append(work.create_task(writer.play(stopping)))
        await asyncio.wait(playing)
        sending.cancel()


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="address of the trajectory manager")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--log", type=Path, required=True, help="file of acknowledged appends")
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-id", type=int, default=1, help="first token id to sample")
    parser.add_argument("--forward-first", action="store_true", help="negative control")
    with suppress(KeyboardInterrupt):
        asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
