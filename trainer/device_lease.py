"""Who has the gang's device: training, or whoever the node is lent to.

HELD -> MOVING -> SUSPENDED -> MOVING -> HELD ..., moved by `suspend` and `resume` between optimizer
steps. A move that failed stays MOVING, neither fit to train with nor free for others, until one in
either direction succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from services.chassis.errors import Reason, ServiceError, stale_epoch, unavailable
from trainer.checkpoint import checkpoint_files
from trainer.config import TrainerConfig
from trainer.policy.commands import Command, Exit, Release, Restore, Save, Written
from trainer.ranks.command_channel import Leader, join
from trainer.ranks.worker import Worker

__all__ = ["Device", "GangThread"]

_RECHECK_SECONDS = 1.0
_FIRST_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.01, 1.0
_GANG_SECONDS = 10.0
"""A node waits so long for the others of its gang before its agent is told to look around."""

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

    @property
    def packed(self) -> bool:
        """Whether the model computes sequences without padding."""
        return self._started().worker.packed

    async def do(self, command: Command) -> list[dict[str, float]]:
        """Give all ranks the same command; their answers in rank order."""
        return await self._run(lambda: self._started().do(command))

    async def do_each(self, commands: Sequence[Command]) -> list[dict[str, float]]:
        """Give each rank its own command; their answers in rank order."""
        return await self._run(lambda: self._started().do_each(commands))

    async def save(self, folder: Path) -> None:
        """Copy the state of all ranks, and begin to write it into `folder`."""
        await self.do(Save(folder=str(folder)))

    async def written(self, folder: Path) -> None:
        """Wait until what `save` began there is durable; other commands come in between.

        Raises:
            OSError: a rank cannot write its own.
        """
        # The ranks themselves only answer between two commands, but they know what went wrong.
        asking = asyncio.create_task(self._say_written(folder))
        try:
            pause = _FIRST_LOOK_SECONDS
            while not checkpoint_files.is_written(folder, self.world_size):
                await asyncio.wait({asking}, timeout=pause)
                if asking.done():
                    return asking.result()
                pause = min(2 * pause, _MOST_LOOK_SECONDS)
        finally:
            asking.cancel()

    async def _say_written(self, folder: Path) -> None:
        while not all(answer["written"] for answer in await self.do(Written(folder=str(folder)))):
            await asyncio.sleep(_MOST_LOOK_SECONDS)

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
    """Hands the gang's device to training or away, under the scheduler's epochs.

    All ranks move together: they hold their devices while every node of the gang has given its own.

    Args:
        gang: whose ranks have the state.
        num_nodes: that the gang is spread over evenly.
    """

    def __init__(self, gang: GangThread, num_nodes: int = 1) -> None:
        self._gang = gang
        self._num_nodes = num_nodes
        self._lock = asyncio.Lock()
        self._held = asyncio.Event()
        self._held.set()
        self._suspended = False
        self._epochs: dict[str, int] = {}
        self._given: set[str] = set()
        self._num_bytes = 0

    @property
    def suspended(self) -> bool:
        """True while the gang has no device memory."""
        return self._suspended

    def is_suspended(self, node_id: str = "") -> bool:
        """True while the gang has no device memory of a node."""
        return self._suspended or self._is_spare(node_id)

    @asynccontextmanager
    async def use(self, acquire: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Keep the device for the block; `acquire` asks for it while it is lent."""
        while True:
            if not self._held.is_set():
                await acquire()
                await self._wait_until_held(_RECHECK_SECONDS)
            async with self._lock:
                if self._held.is_set():
                    yield
                    return

    async def begin_suspended(self) -> None:
        """Start without the device, as if lent out, unless all assignments came already."""
        async with self._lock:
            if not self._complete:
                await self._release()

    async def suspend(self, epoch: int, node_id: str = "") -> int:
        """Move device state out once the step in progress is done; the bytes the node gets back.

        Raises:
            ServiceError: ABORTED / STALE_EPOCH, a newer assignment of the node is known.
        """
        self._advance(epoch, node_id)
        if self._is_spare(node_id):
            return 0  # nothing to wait a whole step for
        async with self._lock:
            self._advance(epoch, node_id)
            if self._is_given(node_id):
                # Not this node alone: one that was lost said no goodbye, so what the others gave
                # counts no more either. Those that train on are told so by `is_suspended`.
                self._given.clear()
            if not self._complete:
                await self._release()
            return self._num_bytes

    async def resume(self, epoch: int, node_id: str = "") -> None:
        """Move device state back, if this was the last node that it waited for.

        Raises:
            ServiceError: ABORTED / STALE_EPOCH, a newer assignment of the node is known;
                UNAVAILABLE / PEER_UNAVAILABLE, other nodes of the gang do other work still.
        """
        self._advance(epoch, node_id)
        async with self._lock:
            self._advance(epoch, node_id)
            self._given.add(node_id)
            await (self._restore() if self._complete else self._release())
        await self._wait_until_held(_GANG_SECONDS)
        if not self._held.is_set():
            raise self._incomplete()

    @property
    def _complete(self) -> bool:
        return len(self._given) >= self._num_nodes

    def _is_given(self, node_id: str) -> bool:
        # A nameless node is its gang's only one: whatever name it is given later, or had before.
        return node_id in self._given or "" in (node_id, *self._given)

    def _is_spare(self, node_id: str) -> bool:
        """Whether the gang holds the devices of others and not the node's."""
        return self._complete and not self._is_given(node_id)

    async def _release(self) -> None:
        if self._suspended:
            return
        self._held.clear()
        answers = await self._gang.do(Release())
        self._num_bytes = int(sum(answer["num_bytes"] for answer in answers)) // self._num_nodes
        self._suspended = True

    async def _restore(self) -> None:
        if self._held.is_set():
            return
        self._suspended = False
        await self._gang.do(Restore())
        self._held.set()

    def _advance(self, epoch: int, node_id: str) -> None:
        known = self._epochs.get(node_id, 0)
        if epoch < known:
            raise stale_epoch(f"the trainer's assignment of node {node_id!r}", epoch, known)
        self._epochs[node_id] = epoch

    def _incomplete(self) -> ServiceError:
        have = ", ".join(sorted(self._given)) or "none"
        message = f"the gang needs {self._num_nodes} nodes and was given: {have}; ask again"
        return unavailable(Reason.PEER_UNAVAILABLE, message)

    async def _wait_until_held(self, seconds: float) -> None:
        # Not for ever: the nodes may be given to somebody else meanwhile.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._held.wait()


def _lead(config: TrainerConfig) -> Leader:
    ranks = join(config)
    try:
        return Leader(ranks, Worker(config))
    except BaseException:
        dist.destroy_process_group()
        raise
