"""Producers that write rollouts for as long as a trainer lives, dies and lives again.

Each leases a task as an agent runner does and writes its rollout as the gateway does, without an
engine: tokens are made up, under the newest weights that were published.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import task_service_pb2, trajectory_service_pb2

from bench.harness.store_calls import packed, send
from services.lib.token_bytes import pack_ids
from tests.chaos.calls import CREDENTIAL, Caller, call_retrying
from tests.chaos.trainer.rig import STEPS, Job
from tests.chaos.trainer.samples import GROUPS_PER_STEP, TEMPERATURE, answer, prompt, reward

_AGENTS = 4
_TASKS = (STEPS + 8) * GROUPS_PER_STEP
"""More than the steps need: what is admitted beyond them must be there to be had in the end."""
_WAIT_SECONDS = 1


class Agents:
    """Writes rollouts of one job, and remembers which were acknowledged as finished."""

    def __init__(self, job: Job, seed: int) -> None:
        """`seed` decides what they write; who writes which rollout is left to chance."""
        self._job = job
        self._seed = seed
        self._stopping = threading.Event()
        self.finished: list[str] = []
        """Rollouts whose end the store acknowledged."""

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Write while the block runs; each agent finishes its rollout first."""
        with self._job.caller() as caller, ThreadPoolExecutor(_AGENTS) as pool:
            caller.submit(*(f"task-{number:05d}" for number in range(_TASKS)))
            work = [pool.submit(self._play, caller) for _ in range(_AGENTS)]
            try:
                yield
            finally:
                self._stopping.set()
            for done in work:
                done.result()

    def _play(self, caller: Caller) -> None:
        while not self._stopping.is_set():
            lease = caller.lease(_WAIT_SECONDS)
            if lease is not None:
                self._rollout(caller, lease)
                self.finished.append(lease.rollout_id)

    def _rollout(self, caller: Caller, lease: task_service_pb2.TaskLease) -> None:
        random = Random(f"{self._seed}/{lease.rollout_id}")
        store = partial(send, caller.trajectories)
        start = trajectory_service_pb2.NewRollout(
            run_id=caller.run_id,
            rollout_id=lease.rollout_id,
            lease_token=lease.lease_token,
            purpose=tokens_pb2.PURPOSE_TRAIN,
            credential_digest=CREDENTIAL,
        )
        call_retrying(store, start)
        self._turn(caller, lease, random)
        finish = trajectory_service_pb2.RolloutFinish(
            run_id=caller.run_id,
            rollout_id=lease.rollout_id,
            credential_digest=CREDENTIAL,
            rewards=tokens_pb2.Rewards(rewards=[reward(random)]),
        )
        call_retrying(store, finish)

    def _turn(self, caller: Caller, lease: task_service_pb2.TaskLease, random: Random) -> None:
        place: dict[str, Any] = {
            "run_id": caller.run_id,
            "rollout_id": lease.rollout_id,
            "turn_id": "turn",
        }
        prompt_ids, newest = prompt(lease.task.task_id), self._job.newest().weight_version
        begin = trajectory_service_pb2.NewTurn(
            **place,
            attempt_id="attempt",
            token_ids=pack_ids(prompt_ids),
            sampling=tokens_pb2.SamplingParams(temperature=TEMPERATURE),
            credential_digest=CREDENTIAL,
        )
        store = partial(send, caller.trajectories)
        epoch = call_retrying(store, begin).epoch
        tokens = answer(random, prompt_ids, (max(0, newest - 1), newest))
        append = trajectory_service_pb2.TokenAppend(
            **place,
            epoch=epoch,
            tokens=packed(tokens),
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
        )
        call_retrying(store, append)
