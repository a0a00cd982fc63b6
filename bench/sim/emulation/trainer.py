"""An emulated trainer: the real loop, whose gang takes as long as the cost model says.

    python -m bench.sim.emulation.trainer --config FILE

Its table is the real trainer's; the gang's nodes are those it asks the scheduler for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from seamflow.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc

from bench.sim.costs import Costs, load_costs
from bench.sim.emulation.prompts import Emulation
from services.chassis.rpc.server import Service, run
from trainer.checkpoint.best_checkpoint import BestCheckpoint
from trainer.checkpoint.checkpoint_files import shard_name
from trainer.cli import connect_services
from trainer.config import TrainerConfig
from trainer.data.computations import Accumulate
from trainer.loop import Trainer
from trainer.policy.trained_rows import TokenValues
from trainer.publish.snapshot_weights import SnapshotWeights, held_weights
from trainer.ranks.commands import Command, Optimize, Release, Restore
from trainer.ranks.device_lease import DeviceLease
from trainer.servicer import TrainerServicer
from trainer.tracking.alarms import Alarms
from trainer.tracking.step_record import StepRecord
from trainer.tracking.tracker import Trackers

_POLL_SECONDS = 0.05


class EmulatedGang:
    """Has the interface of `trainer.ranks.rank_group.RankGroup` and computes nothing.

    Writes what it did into a file of JSON lines: {"doing": ..., "begin": ..., "end": ...}, in
    seconds since 1970.
    """

    def __init__(
        self, costs: Costs, emulation: Emulation, nodes: int, parts: int, file: Path
    ) -> None:
        """`parts`: leases that make up one optimizer step.

        Beside `file`, a file called "barrier" holds new weights back as long as it exists.
        """
        self._costs, self._emulation = costs, emulation
        self._nodes, self._parts = nodes, parts
        self._file = file
        self.work = 1.0
        """What a token of this step costs, in what it costs by the cost model."""

    @property
    def world_size(self) -> int:
        """One share: a perfectly balanced gang needs no more."""
        return 1

    @property
    def nodes(self) -> tuple[str, ...]:
        """It runs on whatever nodes it gets."""
        return ("",)

    @property
    def max_replicas(self) -> int:
        """That one share."""
        return 1

    @property
    def wanted_replicas(self) -> int:
        """It never changes."""
        return 1

    def nodes_of(self, replicas: int) -> tuple[str, ...]:
        """Those of its one share."""
        return self.nodes

    @property
    def vocabulary_size(self) -> int:
        """Any token id: no model looks them up."""
        return 2**31

    @property
    def packed(self) -> bool:
        """Its cost model counts tokens, and no padding."""
        return True

    @property
    def routing(self) -> str:
        """Why no experts are replayed."""
        return "an emulated gang computes no model"

    async def do(self, command: Command) -> list[dict[str, float]]:
        """Take as long as the command takes."""
        return await self.do_each([command])

    async def do_each(self, commands: Sequence[Command]) -> list[dict[str, float]]:
        """See `do`."""
        command = commands[0]
        switching = self._costs.switching
        match command:
            case Accumulate():
                await self._spend("training", self._training_seconds(command))
            case Optimize():
                await self._spend("training", self._costs.training.step_seconds / self._parts)
                return [{"loss": 0.0}]
            case Release():
                await self._spend("switching", switching.deactivate_seconds)
                return [{"num_bytes": 0.0}]
            case Restore():
                await self._spend("switching", switching.activate_seconds)
        return [{}]

    async def form(self, *, join: bool = False) -> bool:
        """No rank is lost, so that there is nothing to form."""
        return False

    async def save(self, folder: Path) -> None:
        """An empty shard."""
        (folder / shard_name(0, 1)).touch()

    async def wait_written(self, folder: Path) -> None:
        """The shard is written already."""

    async def snapshot(self) -> SnapshotWeights:
        """Weights of one number."""
        while self._file.with_name("barrier").exists():
            await asyncio.sleep(_POLL_SECONDS)
        return held_weights({"weight": torch.zeros(1)})

    async def trained_rows(self, step: int, seconds: float) -> dict[int, TokenValues]:
        """No token was computed."""
        return {}

    async def stop(self) -> None:
        """Nothing to end."""

    def _training_seconds(self, command: Accumulate) -> float:
        """Without those of the optimizer step, of which it may be a part."""
        tokens = sum(int(np.count_nonzero(batch.token_ids_BT)) for batch in command.micro_batches)
        model_tokens = tokens * self._emulation.thinning
        return self.work * self._costs.training.seconds(model_tokens, self._nodes, share=0.0)

    async def _spend(self, doing: str, seconds: float) -> None:
        begin = time.time()
        await asyncio.sleep(seconds / self._emulation.speed)
        line = json.dumps({"doing": doing, "begin": begin, "end": time.time()})
        with self._file.open("a") as file:
            file.write(line + "\n")


class _Trainer(Trainer):
    """Each step starts and costs what `emulation` says; with the real one all steps are alike."""

    emulation: Emulation
    gang: EmulatedGang

    async def _step(self, record: StepRecord) -> None:
        starts, work = self.emulation.starts, self.emulation.work
        if starts:
            self._batches.stream_groups = starts[(record.step - 1) % len(starts)]
        if work:
            self.gang.work = work[(record.step - 1) % len(work)]
        await super()._step(record)


@asynccontextmanager
async def build(config: TrainerConfig) -> AsyncIterator[Service]:
    """The trainer's own loop and service around an emulated gang."""
    emulation = Emulation(**json.loads((config.model / "emulation.json").read_text()))
    file = config.checkpoint.folder.parent / "gang.jsonl"
    gang = EmulatedGang(load_costs(), emulation, config.gang.nodes, config.publish.every, file)
    async with AsyncExitStack() as stack:
        device = DeviceLease(gang, config.gang.nodes)  # type: ignore[arg-type]
        samples, nodes, publisher = await connect_services(config, stack)
        trainer = _Trainer(
            config,
            gang,  # type: ignore[arg-type]
            device,
            samples,
            nodes,
            publisher,
            Trackers(config),
            Alarms(),
        )
        trainer.emulation, trainer.gang = emulation, gang
        best = BestCheckpoint(config.checkpoint.folder)
        servicer = TrainerServicer(config, trainer, device, gang, best)  # type: ignore[arg-type]
        yield Service(
            servicers=[(trainer_grpc.add_TrainerServiceServicer_to_server, servicer)],
            background=[trainer.run, samples.keep_leases],
        )


if __name__ == "__main__":
    run("trainer", TrainerConfig, build)
