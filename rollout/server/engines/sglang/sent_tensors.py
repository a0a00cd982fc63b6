"""Weights into a paused SGLang as tensors, without its reading any file.

On this host through shared memory, in a pickle of names and places, of which SGLang allows tensors
alone; nothing is unpickled here:

    begin_weight_update ─▶ update_weights_from_tensor, a part at a time ─▶ end_weight_update

On another host, which does not see our disk, by a broadcast of torch.distributed. The group has
this process as rank 0 and the ranks of the engine, and lives for one load only: an engine that
restarts, or another one, needs nothing rebuilt:

    init_weights_update_group ─▶ begin_weight_update ─▶ update_weights_from_distributed, a part of
    the tensors at a time ─▶ end_weight_update ─▶ destroy_weights_update_group
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.multiprocessing
from safetensors import SafetensorError, safe_open
from torch._C._distributed_c10d import TCPStore
from torch.distributed import Backend, ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import GroupName, PrefixStore

from rollout.server.engines.engine import EngineError, WeightsError

PART_BYTES = 512 << 20
"""Bytes of tensors in one call, about: what the engine must have room for besides its weights."""

Part = list[tuple[str, torch.Tensor]]


def tensor_parts(folder: Path) -> Iterator[Part]:
    """The tensors of all files, in parts of `PART_BYTES`, or of one tensor that is larger."""
    part: Part = []
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it is no mapping
                tensor = file.get_tensor(name)
                if part and size + tensor.nbytes > PART_BYTES:
                    yield part
                    part, size = [], 0
                part.append((name, tensor))
                size += tensor.nbytes
    if part:
        yield part


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- where torch puts shared tensors

Post = Callable[[str, dict[str, Any]], Awaitable[Any]]


class SharedTensors:
    """Puts the tensors of a folder into a paused SGLang; two parts at most are in memory."""

    def __init__(self, post: Post, num_ranks: int) -> None:
        """`post` calls SGLang, whose weights `num_ranks` processes hold between them."""
        self._post, self._num_ranks = post, num_ranks

    async def load(self, folder: Path, label: str, *, flush: bool) -> None:
        """Put the weights of `folder` into the engine under the version `label`.

        `flush` empties its prefix cache. Raises `WeightsError`, and what `post` raises; the engine
        may then hold a part of the new weights: load a whole version again before it samples.
        """
        _require_room()
        parts = tensor_parts(folder)
        await self._post("/begin_weight_update", {"selector": "all"})
        try:
            part = await asyncio.to_thread(_next_shared, parts)
            while part:
                body: dict[str, Any] = {
                    "serialized_named_tensors": self._handles(part),
                    "weight_version": label,
                }
                following = await asyncio.to_thread(_next_shared, parts)
                body |= {"load_format": None, "flush_cache": flush and not following}
                await self._post("/update_weights_from_tensor", body)
                part = following
        except (SafetensorError, OSError, RuntimeError) as error:
            raise WeightsError(f"{folder}: not sent through shared memory: {error}") from error
        finally:
            with suppress(EngineError):
                await self._post("/end_weight_update", {})

    def _handles(self, part: Part) -> list[str]:
        """A pickle for each rank, which frees its own hold of the memory."""
        return [
            base64.b64encode(ForkingPickler.dumps(part)).decode() for _ in range(self._num_ranks)
        ]


def _next_shared(parts: Any) -> Part:
    """The next part, in shared memory; empty after the last."""
    # The other strategy passes file descriptors, which only our own children could ask for.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    return [(name, _shared(tensor)) for name, tensor in next(parts, [])]


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    # Not the tensor itself, whose storage may be the whole mapped file.
    shared = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    shared.share_memory_()  # type: ignore[no-untyped-call]
    return shared.copy_(tensor)


def _require_room() -> None:
    """Raise `WeightsError` without room for two parts: to write beyond it would end the process."""
    found = os.statvfs(_SHARED_MEMORY)
    free, needed = found.f_bavail * found.f_frsize, 2 * PART_BYTES
    if free < needed:
        raise WeightsError(
            f"{_SHARED_MEMORY} has {free >> 20} MiB free, tensors need {needed >> 20}: give the "
            "container more shared memory, or set sglang_weights to disk"
        )


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangBroadcast:
    """Sends the tensors of a folder into a paused SGLang."""

    post: Post
    """POST to the engine: path and JSON body; raises for an answer that is no success."""
    host: str
    """Address of this process as the engine reaches it."""
    num_ranks: int = 1
    """Processes of the engine: tensor times pipeline parallel."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo between hosts without GPUs; nccl where both sides have them."""
    seconds: float = 300.0
    """Deadline of forming the group, and of each part."""

    @classmethod
    def of(cls, post: Post, host: str, num_ranks: int) -> SGLangBroadcast:
        """By NCCL if this process has a GPU."""
        backend: Literal["gloo", "nccl"] = "nccl" if torch.cuda.is_available() else "gloo"
        return cls(post=post, host=host, num_ranks=num_ranks, backend=backend)

    async def load(self, folder: Path, label: str, *, flush: bool) -> None:
        """Put the weights of `folder` into the engine under the version `label`.

        `flush` empties its prefix cache. Raises `WeightsError`, and what `post` raises; the engine
        may then hold a part of the new weights: load a whole version again before it samples.
        """
        try:
            async with asyncio.timeout(self.seconds) as deadline, self._group() as (name, group):
                await self.post("/begin_weight_update", {"selector": "all"})
                parts = tensor_parts(folder)
                part: Part | None = await asyncio.to_thread(next, parts, None)
                while part is not None:
                    following = await asyncio.to_thread(next, parts, None)
                    settings = {"flush_cache": flush and following is None}
                    await self._send(name, group, part, {**settings, "weight_version": label})
                    deadline.reschedule(asyncio.get_running_loop().time() + self.seconds)
                    part = following
                await self.post("/end_weight_update", {})
        except TimeoutError as error:
            cure = "see whether the engine reaches this process, and its log"
            message = f"{folder}: no broadcast within {self.seconds:g} s; {cure}"
            raise WeightsError(message) from error
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{folder}: broadcast failed: {error}") from error

    async def _send(
        self, name: str, group: ProcessGroup, part: Part, settings: dict[str, Any]
    ) -> None:
        body = {
            "names": [tensor_name for tensor_name, _ in part],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
            "shapes": [list(tensor.shape) for _, tensor in part],
            "group_name": name,
            **settings,
        }
        sending = _in_daemon(lambda: self._broadcast(group, part))
        await _both(self.post("/update_weights_from_distributed", body), sending)

    def _broadcast(self, group: ProcessGroup, part: Part) -> None:
        device = "cuda" if self.backend == "nccl" else "cpu"
        for _, tensor in part:
            group.broadcast(tensor.contiguous().to(device), 0).wait()

    @asynccontextmanager
    async def _group(self) -> AsyncIterator[tuple[str, ProcessGroup]]:
        name = f"seamflow-{secrets.token_hex(4)}"
        timeout = timedelta(seconds=self.seconds)
        with socket.create_server((self.host, 0)) as listening:
            port = listening.getsockname()[1]
            # The store takes the socket over: no other process can come between.
            store = TCPStore(
                self.host,
                port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        body = {
            "master_address": self.host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self.num_ranks,
            "group_name": name,
            "backend": self.backend,
        }
        joining = _in_daemon(lambda: self._join(store, name, timeout))
        group = await _both(self.post("/init_weights_update_group", body), joining)
        try:
            yield name, group
        finally:
            torch.distributed.destroy_process_group(group)
            await self.post("/destroy_weights_update_group", {"group_name": name})

    def _join(self, store: TCPStore, name: str, timeout: timedelta) -> ProcessGroup:
        # Like the engine: a group separate from the default one, which neither side needs.
        group, _ = distributed_c10d._new_process_group_helper(
            1 + self.num_ranks,
            0,
            [],
            Backend(self.backend),
            PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=timeout,
        )
        assert isinstance(group, ProcessGroup)
        distributed_c10d._world.pg_group_ranks[group] = {
            rank: rank for rank in range(1 + self.num_ranks)
        }
        return group


async def _both(asking: Awaitable[Any], ours: asyncio.Future[T]) -> T:
    """Wait for the engine and for our half of the work, but for neither once the other fails."""
    asked = asyncio.ensure_future(asking)
    try:
        await asyncio.gather(asked, ours)
        return ours.result()
    finally:
        asked.cancel()
        ours.cancel()


def _in_daemon(call: Callable[[], T]) -> asyncio.Future[T]:
    """Call in a daemon thread: a collective that waits for other ranks cannot be cancelled."""
    ended: Future[T] = Future()
    ended.set_running_or_notify_cancel()

    def run() -> None:
        try:
            ended.set_result(call())
        except Exception as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="weights-broadcast", daemon=True).start()
    return asyncio.wrap_future(ended)
