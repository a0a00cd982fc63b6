"""Weights into an SGLang on this host through shared memory, without its reading any file.

    begin_weight_update ─▶ update_weights_from_tensor, a part at a time ─▶ end_weight_update

SGLang takes names and places of tensors as a pickle, of which it allows tensors alone. Nothing is
unpickled here.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch.multiprocessing
from safetensors import SafetensorError

from rollout.server.engines.engine import EngineError, WeightsError
from rollout.server.engines.sglang import tensor_parts
from rollout.server.engines.sglang.tensor_parts import Part

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
        parts = tensor_parts.tensor_parts(folder)
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
    free, needed = found.f_bavail * found.f_frsize, 2 * tensor_parts.PART_BYTES
    if free < needed:
        raise WeightsError(
            f"{_SHARED_MEMORY} has {free >> 20} MiB free, tensors need {needed >> 20}: give the "
            "container more shared memory, or set sglang_weights to disk"
        )
