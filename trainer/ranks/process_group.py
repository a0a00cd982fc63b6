"""The process group of a trainer's ranks: joined at the start, formed anew with other ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from services.chassis.log import get_logger
from trainer.commands import Form
from trainer.config import TrainerConfig
from trainer.ranks.lives import announce, announcement, end_process, life_name

_STUCK_SECONDS = 30
"""A rank that does not come out of its command ends its process, and so the gang."""
_POLL_SECONDS = 0.1
_SOCKETS = Path("/proc/self/fd")


class LossWatch:
    """Watches from the start of a process group until `stop`, and ends collectives at a loss.

    By itself a rank notices the death of one that it waits for. If it waits for one that waits for
    the dead, it would do so until the timeout of the group: a thread closes what connects it.
    """

    def __init__(
        self, store: Store, num_lost: int, working: Event, *, device: str, rank: int
    ) -> None:
        """Watch in a thread.

        Args:
            store: of the commands.
            num_lost: losses that are known already.
            working: is set while a command is carried out.
            device: of the ranks.
            rank: this one.
        """
        self.lost = Event()
        """Set when a further rank was lost."""
        # Of its own, as a connection serves one thread at a time.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._key = announcement(num_lost + 1)
        self._working, self._stopped = working, Event()
        self._device, self._rank = device, rank
        self._kept = _open_sockets()
        Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        with suppress(dist.DistNetworkError):  # all ends
            while not self._store.check([self._key]):
                if self._stopped.wait(_POLL_SECONDS):
                    return
            self._act()

    def _act(self) -> None:
        self.lost.set()
        self._leave()
        self._end_if_stuck()

    def _leave(self) -> None:
        """Let every collective fail."""
        if self._device == "cuda":
            dist.distributed_c10d._abort_process_group()
        elif self._rank:
            # Gloo cannot abort. Rank 0 has connections of services too, and waits for no rank that
            # does not come here.
            for number in _open_sockets() - self._kept:
                _shut_down(number)

    def _end_if_stuck(self) -> None:
        seconds = 0
        while not self._stopped.wait(1.0):
            seconds = seconds + 1 if self._working.is_set() else 0
            if seconds >= _STUCK_SECONDS:
                get_logger().error("stuck_after_the_loss_of_a_rank", rank=self._rank)
                end_process(1)


def _open_sockets() -> frozenset[tuple[int, str]]:
    """File number and inode of each socket of this process."""
    found = set[tuple[int, str]]()
    for entry in _SOCKETS.iterdir():
        with suppress(OSError):  # closed meanwhile
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found.add((int(entry.name), target))
    return frozenset(found)


def _shut_down(entry: tuple[int, str]) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(entry[0])) as connection:
        connection.getpeername()  # raises for one that listens, which gloo would not survive
        connection.shutdown(socket.SHUT_RDWR)


STARTED = "started"
"""Key that rank 0 sets when all ranks have joined."""
_NOTICE_SECONDS = 10.0
"""After an error, how long to wait for the news that a rank was lost."""


@dataclass(slots=True, kw_only=True)
class RankInfo:
    """This process's rank, and the store that connects it with the others."""

    rank: int
    world_size: int
    """Number of ranks when none is lost."""
    store: Store
    """For commands; its keys do not collide with those of the collectives."""
    nodes: tuple[str, ...] = ("",)
    """The node of each rank; empty names: not given."""
    life: int = 1
    """Number of this process among those that were the rank."""
    device: str = "cpu"
    """Of all ranks."""
    replicas: int = 1
    """Of the models; with one, a lost rank ends all."""
    watch: LossWatch | None = None
    """Of the present group; None with one replica."""
    working: Event = field(default_factory=Event)
    """Set while a command is carried out."""

    @property
    def name(self) -> str:
        """Of this life of the rank."""
        return life_name(self.rank, self.life)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """For the time that a command is carried out."""
        self.working.set()
        try:
            yield
        finally:
            self.working.clear()

    def lost_one(self) -> bool:
        """Whether a rank of the present group was lost; waits a while for the news."""
        return self.watch is not None and self.watch.lost.wait(_NOTICE_SECONDS)

    def watch_group(self, num_lost: int) -> None:
        """Watch the group to be formed for losses beyond so many; the one before no more."""
        if self.watch is not None:
            self.watch.stop()
        if self.replicas > 1:
            self.watch = LossWatch(
                self.store, num_lost, self.working, device=self.device, rank=self.rank
            )


def join(config: TrainerConfig, life: int = 1) -> RankInfo:
    """Join the process group of torchrun's environment; without one, a group of one rank.

    A later life of a rank joins no group: rank 0 takes it into one.

    Raises:
        ValueError: the ranks run on other nodes than the gang has.
        RuntimeError: the life before was lost when not all ranks had joined.
    """
    torch.set_num_threads(config.threads)
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store = next(rendezvous("env://"))[0] if "RANK" in os.environ else HashStore()
    ranks = RankInfo(
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        store=PrefixStore("commands", store),
        life=life,
        device=config.device,
        replicas=config.replicas,
    )
    if life > 1:
        _begin_again(ranks)
        return ranks
    if config.replicas > 1:
        # Or else NCCL ends the processes that survive.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    ranks.watch_group(0)
    _init_group(ranks, PrefixStore("collectives", store), ranks.rank, ranks.world_size)
    ranks.nodes = _nodes(ranks, config.gang.node_id)
    check_nodes(ranks.nodes, config.gang.nodes)
    return ranks


def form_group(ranks: RankInfo, form: Form) -> None:
    """Replace the process group by that of a command. Collective."""
    ranks.watch_group(form.num_lost)
    if dist.is_initialized():
        dist.destroy_process_group()
    store = PrefixStore(f"collectives/{form.number}", ranks.store)
    _init_group(ranks, store, form.members.index(ranks.name), len(form.members))


def leave_group(ranks: RankInfo) -> None:
    """Watch and use the process group no longer."""
    if ranks.watch is not None:
        ranks.watch.stop()
        ranks.watch = None
    if dist.is_initialized():
        dist.destroy_process_group()


def check_nodes(nodes: Sequence[str], number: int) -> None:
    """Check the node of each rank against the number of nodes of the gang.

    Raises:
        ValueError: there are more or fewer, or some of several have no name.
    """
    names = sorted(set(nodes))
    if names == [""] and number == 1:
        return
    if "" in names or len(names) != number:
        where = ", ".join(name or "a node without a name" for name in names)
        raise ValueError(
            f"trainer.gang.nodes is {number} and the ranks run on {where}: "
            "give each rank the trainer.gang.node_id of its node"
        )


def _begin_again(ranks: RankInfo) -> None:
    if not ranks.store.check([STARTED]):
        raise RuntimeError(f"rank {ranks.rank} was lost before all ranks had joined")
    announce(ranks.store, ranks.name)


def _init_group(ranks: RankInfo, store: Store, rank: int, world_size: int) -> None:
    backend = "nccl" if ranks.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _nodes(ranks: RankInfo, node_id: str) -> tuple[str, ...]:
    """The node of each rank, after telling the others this one's."""
    ranks.store.set(f"node/{ranks.rank}", node_id)
    return tuple(ranks.store.get(f"node/{other}").decode() for other in range(ranks.world_size))
