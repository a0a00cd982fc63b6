"""All ranks of a trainer, commanded from one thread of rank 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist

from trainer.checkpoint import checkpoint_files
from trainer.commands import Command, Exit, Save, TakeSnapshot, WriteBuckets, Written
from trainer.config import TrainerConfig
from trainer.model.context_ranks import check_ranks
from trainer.object_path import Folder
from trainer.policy.forward import TokenValues
from trainer.publish.snapshot_weights import SnapshotLostError, SnapshotWeights
from trainer.ranks.command_channel import Rank0, RankLostError
from trainer.ranks.process_group import join
from trainer.ranks.row_messages import RowReceiver
from trainer.ranks.worker import Worker

__all__ = ["RankGroup", "RankLostError"]

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.01, 1.0

T = TypeVar("T")


class RankGroup:
    """Runs commands on all ranks in a thread, so that the event loop keeps serving RPCs."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ranks")
        self._rank0: Rank0 | None = None
        self._rows: RowReceiver | None = None
        self._savers: dict[Folder, tuple[str, ...]] = {}  # of each folder that is being written

    async def start(self, config: TrainerConfig) -> None:
        """Join the process group and load the model."""
        self._rank0 = await self._run(lambda: _start(config))

    @property
    def rank0(self) -> Rank0:
        """The first rank; used from this thread for what it knows alone."""
        assert self._rank0 is not None, "used before start"
        return self._rank0

    async def do(self, command: Command) -> list[dict[str, float]]:
        """Give all ranks the same command; their answers in rank order."""
        return await self._run(lambda: self.rank0.do(command))

    async def do_each(self, commands: Sequence[Command]) -> list[dict[str, float]]:
        """Give each rank its own command; their answers in rank order."""
        return await self._run(lambda: self.rank0.do_each(commands))

    async def form(self, *, join: bool = False) -> bool:
        """Form a new process group if a rank was lost, or with `join` if one waits; whether it did.

        Raises:
            RankFailedError: no rank is left that has some part of the state.
        """
        return await self._run(lambda: self.rank0.form(join=join))

    async def resize(self, replicas: int) -> bool:
        """Form a process group with this number of model copies; whether that succeeded.

        If a rank is lost meanwhile, the number is another. Call it between two steps: a gradient
        would be forgotten.

        Raises:
            RankFailedError: no rank is left that has some part of the state.
            ValueError: there are fewer ranks.
        """
        self.rank0.want(replicas)
        await self.form(join=True)
        return self.rank0.replicas == replicas

    async def save(self, folder: Folder) -> None:
        """Copy the state of all ranks and start writing it into `folder`.

        Raises:
            RankLostError: a rank was lost.
        """
        self._savers[folder] = self.rank0.members
        await self.do(Save(folder=str(folder)))

    async def wait_written(self, folder: Folder) -> None:
        """Wait until the state that `save` copied is durable in `folder`; other commands may run.

        Raises:
            OSError: a rank cannot write its shard.
            RankLostError: a rank was lost before its shard was durable.
        """
        savers = self._savers.pop(folder)
        # Polling the files does not wait for commands in progress; only the ranks know errors.
        answered = asyncio.create_task(self._poll_ranks(folder))
        try:
            pause = _MIN_POLL_SECONDS
            while not await asyncio.to_thread(checkpoint_files.is_written, folder, len(savers)):
                await asyncio.wait({answered}, timeout=pause)
                if answered.done():
                    answered.result()
                    return self._check_written(folder, savers)
                pause = min(2 * pause, _MAX_POLL_SECONDS)
        finally:
            answered.cancel()

    async def _poll_ranks(self, folder: Folder) -> None:
        while not all(answer["written"] for answer in await self.do(Written(folder=str(folder)))):
            await asyncio.sleep(_MAX_POLL_SECONDS)

    def _check_written(self, folder: Folder, savers: tuple[str, ...]) -> None:
        lost = set(savers) - set(self.rank0.members)
        if lost and not checkpoint_files.is_written(folder, len(savers)):
            raise RankLostError(f"{folder} lacks the shard of a rank that was lost")

    async def snapshot(self) -> SnapshotWeights:
        """Copy the weights to publish; the ranks write them while other commands run.

        Raises:
            RankLostError: a rank was lost.
        """
        rank0 = self.rank0
        await self.do(TakeSnapshot())
        watch = rank0.watch

        def is_lost() -> bool:
            return rank0.watch is not watch or (watch is not None and watch.lost.is_set())

        async def give(order: WriteBuckets) -> None:
            try:
                await self.do(order)
            except RankLostError as error:
                raise SnapshotLostError(str(error)) from error
            if is_lost():
                raise SnapshotLostError("a rank was lost since the weights were copied")

        return SnapshotWeights(rank0.worker.bucket_plan, rank0.store, give, is_lost)

    async def trained_rows(self, step: int, seconds: float) -> dict[int, TokenValues]:
        """What the ranks send after `Optimize` with rows, by number of a sequence in the step.

        Waits for them for at most `seconds`; other commands may run. Call it once for each such
        step, one after the other.
        """
        if self._rows is None:
            self._rows = RowReceiver(self.rank0.store)
        return await asyncio.to_thread(self._rows.receive, step, seconds)

    async def stop(self) -> None:
        """End all ranks, after the command in progress."""
        if self._rank0 is not None:
            await self.do(Exit())
        self._executor.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _start(config: TrainerConfig) -> Rank0:
    ranks = join(config)
    try:
        check_ranks(config.context_parallel, config.replicas, ranks.world_size)
        return Rank0(ranks, Worker(config, ranks.store))
    except BaseException:
        dist.destroy_process_group()
        raise
