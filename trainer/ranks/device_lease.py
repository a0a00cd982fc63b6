"""The trainer's lease of its nodes' devices: moved out and back on the scheduler's assignments.

HELD -> MOVING -> SUSPENDED -> MOVING -> HELD ..., moved by `suspend` and `resume` between optimizer
steps. After a failed move the state is MOVING, usable neither for training nor by others, until a
move in either direction succeeds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from services.chassis.errors import Reason, ServiceError, stale_epoch, unavailable
from trainer.commands import Release, Restore
from trainer.ranks.rank_group import RankGroup

_RECHECK_SECONDS = 1.0
_GANG_SECONDS = 10.0
"""How long `resume` waits for the gang's other nodes before the node agent has to retry."""


class DeviceLease:
    """Gives the devices to training or away, under the scheduler's epochs.

    All ranks move together: they hold the devices while every node of the gang has granted its own.

    Args:
        ranks: hold the state that is moved.
        num_nodes: over which the ranks are spread evenly.
        nodes: the node of each rank; without names any `num_nodes` nodes are enough.
    """

    def __init__(self, ranks: RankGroup, num_nodes: int = 1, nodes: Sequence[str] = ("",)) -> None:
        self._ranks = ranks
        self._num_nodes = num_nodes
        self._needed = frozenset(filter(None, nodes))
        self._lock = asyncio.Lock()
        self._held = asyncio.Event()
        self._held.set()
        self._suspended = False
        self._epochs: dict[str, int] = {}
        self._granted: set[str] = set()
        self._num_bytes: dict[str, int] = {}

    @property
    def suspended(self) -> bool:
        """True while the ranks hold no device memory."""
        return self._suspended

    def is_suspended(self, node_id: str = "") -> bool:
        """True while the ranks hold no device memory of a node."""
        return self._suspended or self._is_spare(node_id)

    @asynccontextmanager
    async def use(self, acquire: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Hold the devices for the block; `acquire` requests them while they are lent."""
        while True:
            if not self._held.is_set():
                await acquire()
                await self._wait_until_held(_RECHECK_SECONDS)
            async with self._lock:
                if self._held.is_set():
                    yield
                    return

    async def start_suspended(self) -> None:
        """Start without the devices, unless all nodes were granted already."""
        async with self._lock:
            if not self._complete:
                await self._release()

    async def need(self, nodes: Sequence[str]) -> None:
        """Need these nodes and no others; the state moves out until all of them are granted."""
        async with self._lock:
            self._needed = frozenset(nodes)
            self._num_nodes = len(self._needed)
            self._granted &= self._needed
            if not self._complete:
                await self._release()

    async def suspend(self, epoch: int, node_id: str = "") -> int:
        """Move the state out after the step in progress; the bytes freed on the node.

        Raises:
            ServiceError: ABORTED / STALE_EPOCH, a newer assignment of the node is known.
        """
        self._advance(epoch, node_id)
        if self._is_spare(node_id):
            return 0  # nothing to move, so no need to wait for the step
        async with self._lock:
            self._advance(epoch, node_id)
            if self._is_granted(node_id):
                # A lost node never suspends, so this voids the grants of the other nodes too;
                # their agents see it in `is_suspended`.
                self._granted.clear()
            if not self._complete:
                await self._release()
            return self._num_bytes.get(node_id if self._needed else "", 0)

    async def resume(self, epoch: int, node_id: str = "") -> None:
        """Grant a node; with the last one, move the state back.

        Raises:
            ServiceError: ABORTED / STALE_EPOCH, a newer assignment of the node is known;
                UNAVAILABLE / DEPENDENCY_UNAVAILABLE, other nodes of the gang are not granted yet,
                or no rank runs on this one.
        """
        self._advance(epoch, node_id)
        if self._is_foreign(node_id):
            raise self._incomplete(f", and no rank runs on {node_id}")
        async with self._lock:
            self._advance(epoch, node_id)
            self._granted.add(node_id)
            await (self._restore() if self._complete else self._release())
        await self._wait_until_held(_GANG_SECONDS)
        if not self._held.is_set():
            have = ", ".join(sorted(self._granted)) or "none"
            raise self._incomplete(f" and was granted: {have}")

    @property
    def _complete(self) -> bool:
        if self._needed:
            return self._needed <= self._granted
        return len(self._granted) >= self._num_nodes

    def _is_granted(self, node_id: str) -> bool:
        # A node without an id is its gang's only one, whatever id it has in other calls.
        return node_id in self._granted or "" in (node_id, *self._granted)

    def _is_foreign(self, node_id: str) -> bool:
        """Whether it is known that no rank runs there."""
        return bool(self._needed and node_id) and node_id not in self._needed

    def _is_spare(self, node_id: str) -> bool:
        """Whether the ranks do not need this node: none runs there, or they hold enough others."""
        return self._is_foreign(node_id) or (self._complete and not self._is_granted(node_id))

    async def _release(self) -> None:
        if self._suspended:
            return
        self._held.clear()
        answers = await self._ranks.do(Release())
        self._num_bytes = self._by_node([int(answer["num_bytes"]) for answer in answers])
        self._suspended = True

    async def _restore(self) -> None:
        if self._held.is_set():
            return
        self._suspended = False
        await self._ranks.do(Restore())
        self._held.set()

    def _advance(self, epoch: int, node_id: str) -> None:
        known = self._epochs.get(node_id, 0)
        if epoch < known:
            raise stale_epoch(f"the trainer's assignment of node {node_id!r}", epoch, known)
        self._epochs[node_id] = epoch

    def _by_node(self, num_bytes: Sequence[int]) -> dict[str, int]:
        """Bytes of each rank, summed by node; of nodes without names, the mean."""
        if not self._needed:
            return {"": sum(num_bytes) // self._num_nodes}
        found = Counter[str]()
        for node, of_rank in zip(self._ranks.rank0.nodes, num_bytes, strict=True):
            found[node] += of_rank
        return found

    def _incomplete(self, cause: str) -> ServiceError:
        names = f" ({', '.join(sorted(self._needed))})" if self._needed else ""
        message = f"the gang needs {self._num_nodes} nodes{names}{cause}; retry"
        return unavailable(Reason.DEPENDENCY_UNAVAILABLE, message)

    async def _wait_until_held(self, seconds: float) -> None:
        # Bounded: the nodes may be assigned elsewhere during the wait.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._held.wait()
