"""A real trainer on the real trajectory manager and a real Redis, with agents played by hand."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from torch import Tensor

from services.chassis.rpc.server import Service
from tests.lib.trained_samples import steps_with_samples
from tests.lib.trainer.services import Neighbours
from tests.lib.trainer.support import trainer_config
from tests.lib.trajectory_manager.client import RULES, Client
from trainer.cli import build
from trainer.clients.sample_client import SampleClient


class Training:
    """A run of batches of three groups of two, its agents, and trainers in this process."""

    def __init__(self, client: Client, port: int, folder: Path, model: Path) -> None:
        self.client = client
        self.metrics_file = folder / "metrics.jsonl"
        self.port, self.model = port, model
        self.checkpoints = folder / "checkpoints"
        self.weights_address: str | None = None
        """A weights service; None: one that shares a folder with the trainer."""
        self._folder = folder

    async def begin(self, *task_ids: str, groups_per_step: int = 3, **rules: Any) -> None:
        """Create the run and queue tasks."""
        config = trajectory_pb2.RunConfig()
        config.CopyFrom(RULES)
        changes = trajectory_pb2.RunConfig(groups_per_step=groups_per_step, **rules)
        config.MergeFrom(changes)
        await self.client.create_run(config)
        await self.client.submit(*task_ids)

    async def fill(self, num_steps: int, rollouts: int | None = None) -> Training:
        """Create the run, and play the rollouts of `num_steps` steps, or `rollouts` of them."""
        await self.begin(
            *(f"t{number}" for number in range(3 * num_steps)), max_staleness=num_steps
        )
        await self.play(6 * num_steps if rollouts is None else rollouts)
        return self

    async def play(self, num_rollouts: int) -> None:
        """Agents play rollouts whose rewards differ within a group, group after group."""
        for number in range(num_rollouts):
            await self.client.play(value=float(number % 2))

    async def train(self, num_steps: int, **values: Any) -> list[dict[str, Any]]:
        """Train until `num_steps` are done; the record of each step."""
        async with self.service(num_steps, **values) as trainer:
            await trainer.background[0]()
        return steps_with_samples(self.metrics_file)

    @asynccontextmanager
    async def service(self, num_steps: int, **values: Any) -> AsyncIterator[Service]:
        """A trainer that does not train yet."""
        weights = Neighbours(self._folder / "weights")
        async with weights.serving():
            config = trainer_config(
                run_id=self.client.run_id,
                model=self.model,
                checkpoint__folder=self.checkpoints,
                tracking__metrics_file=self.metrics_file,
                trajectory_manager=f"127.0.0.1:{self.port}",
                weights=self.weights_address or weights.address,
                num_steps=num_steps,
                resume=True,
                **{"optimizer__learning_rate": 3e-3, "end_run": False, **values},
            )
            async with build(config) as trainer:
                yield trainer

    def records(self) -> list[dict[str, Any]]:
        """Of the steps so far."""
        return steps_with_samples(self.metrics_file) if self.metrics_file.exists() else []

    async def readiness(self) -> sample_pb2.Readiness:
        """Counts of the run."""
        request = sample_pb2.GetReadinessRequest(run_id=self.client.run_id)
        return (await self.client.samples.GetReadiness(request)).readiness

    def samples(self) -> SampleClient:
        """What a trainer calls."""
        return SampleClient(self.client.channel, self.client.run_id)

    async def committed_steps(self) -> dict[str, int]:
        """The step that committed each sample."""
        request = sample_pb2.ListSamplesRequest(run_id=self.client.run_id)
        listed = (await self.client.samples.ListSamples(request)).samples
        return {entry.sample.sample_id: entry.committed_step for entry in listed}

    def published(self) -> list[Path]:
        """Folders of weights that are whole."""
        return sorted(path.parent for path in (self._folder / "weights").glob("*/.complete"))

    def weights(self) -> dict[str, Tensor]:
        """The newest that were published."""
        return load_file(self.published()[-1] / "model.safetensors")


def groups(record: dict[str, Any]) -> list[str]:
    """The slots of the samples of a step."""
    return [name.rpartition("/")[0] for name in record["sample_ids"]]


def other_run(training: Training, folder: Path) -> Training:
    """A second run on the same trajectory manager."""
    client = dataclasses.replace(training.client, run_id=uuid.uuid4().hex)
    return Training(client, training.port, folder, training.model)
