"""Who has the gang's device: training, or whoever the node is lent to.

HELD -> SUSPENDED -> HELD ..., moved by `suspend` and `resume` between optimizer steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from services.chassis.errors import stale_epoch
from trainer.commands import Command, Exit, Release, Restore
from trainer.config import TrainerConfig
from trainer.gang import Leader, join
from trainer.worker import Worker

__all__ = ["Device", "GangThread"]

_RECHECK_SECONDS = 1.0

T = TypeVar("T")


class GangThread:
    """The one thread of rank 0 that computes; the event loop goes on answering meanwhile."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gang")
        self._leader: Leader | None = None

    async def start(self, config: TrainerConfig) -> None:
        """Join the process group and load the model."""
        self._leader = await self._run(lambda: _lead(config))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._started().world_size

    async def do(self, command: Command) -> list[dict[str, float]]:
        """Give all ranks the same command; their answers in rank order."""
        return await self._run(lambda: self._started().do(command))

    async def do_each(self, commands: Sequence[Command]) -> list[dict[str, float]]:
        """Give each rank its own command; their answers in rank order."""
        return await self._run(lambda: self._started().do_each(commands))

    def gathered(self) -> dict[str, torch.Tensor]:
        """What the last `Gather` put together; to be taken once."""
        worker = self._started().worker
        gathered, worker.gathered = worker.gathered, {}
        return gathered

    async def stop(self) -> None:
        """End all ranks, after the command in progress."""
        if self._leader is not None:
            await self.do(Exit())
        self._executor.shutdown()

    def _started(self) -> Leader:
        assert self._leader is not None, "used before start"
        return self._leader

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class Device:
    """Hands the device to training or away, under the scheduler's epochs."""

    def __init__(self, gang: GangThread) -> None:
        self._gang = gang
        self._lock = asyncio.Lock()
        self._held = asyncio.Event()
        self._held.set()
        self._epoch = 0
        self._num_bytes = 0

    @property
    def suspended(self) -> bool:
        """True while the gang has no device memory."""
        return not self._held.is_set()

    @asynccontextmanager
    async def use(self, acquire: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Keep the device for the block; `acquire` asks for it while it is lent."""
        while True:
            if self.suspended:
                await acquire()
                await self._resumed()
            async with self._lock:
                if not self.suspended:
                    yield
                    return

    async def begin_suspended(self) -> None:
        """Start without the device, as if lent out, unless an assignment came already."""
        if self._epoch == 0:
            await self.suspend(0)

    async def suspend(self, epoch: int) -> int:
        """Move device state out once the step in progress is done; the bytes given back.

        Raises:
            ServiceError: ABORTED / STALE_EPOCH, a newer assignment is known.
        """
        self._advance(epoch)
        async with self._lock:
            self._advance(epoch)
            if not self.suspended:
                self._held.clear()
                answers = await self._gang.do(Release())
                self._num_bytes = int(sum(answer["num_bytes"] for answer in answers))
            return self._num_bytes

    async def resume(self, epoch: int) -> None:
        """Move device state back.

        Raises:
            ServiceError: ABORTED / STALE_EPOCH, a newer assignment is known.
        """
        self._advance(epoch)
        async with self._lock:
            self._advance(epoch)
            if self.suspended:
                await self._gang.do(Restore())
                self._held.set()

    def _advance(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise stale_epoch("the trainer's assignment", epoch, self._epoch)
        self._epoch = epoch

    async def _resumed(self) -> None:
        # Not for ever: the nodes may have been given to somebody else before they resumed us.
        try:
            async with asyncio.timeout(_RECHECK_SECONDS):
                await self._held.wait()
        except TimeoutError:
            pass


def _lead(config: TrainerConfig) -> Leader:
    ranks = join(config)
    try:
        return Leader(ranks, Worker(config))
    except BaseException:
        dist.destroy_process_group()
        raise
