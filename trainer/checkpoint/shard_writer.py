"""Write a rank's shard of a checkpoint beside training."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch

from trainer import fsync_files
from trainer.checkpoint.checkpoint_files import RNG
from trainer.checkpoint.own_files import note_digest
from trainer.fsync_files import HeldTensors, upload
from trainer.host_copy import CudaStream, HostCopy
from trainer.object_path import Folder, ObjectPath
from trainer.policy.policy import Policy

_MAX_RESULTS = 8
"""Finished writes whose result is kept."""


class ShardWriter:
    """Writes this rank's state in a separate thread."""

    def __init__(self, stream: CudaStream | None) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writes: dict[Folder, Future[None]] = {}
        self._copy, self._held = HostCopy(stream), HeldTensors({})

    def start(self, policy: Policy, folder: Folder, name: str) -> None:
        """Write the state into the file `name` in `folder`, after earlier ones are written.

        What is on a device is copied to the host, which has room for one copy; what lies on the
        host is written from there.
        """
        wait(self._writes.values())
        for done in list(self._writes)[:-_MAX_RESULTS]:
            del self._writes[done]
        state = {name: tensor.detach() for name, tensor in policy.state().items()}
        on_device = {name: each for name, each in state.items() if each.device.type != "cpu"}
        copied = {**self._copy.start(on_device.items()), RNG: torch.get_rng_state()}
        self._held = HeldTensors(state | copied, in_place=state.keys() - on_device.keys())
        self._writes[folder] = self._executor.submit(self._write, folder / name, self._held)

    def hold_back(self) -> None:
        """Call it before the state changes: what is written stays what it was."""
        self._copy.hold_back()
        self._held.hold_back()

    def written(self, folder: Folder) -> bool:
        """Whether the shard in `folder` is durable, if this process has one there.

        Raises:
            OSError: writing it failed.
        """
        write = self._writes.get(folder)  # none in a rank that joined since
        if write is None:
            return True
        if not write.done():
            return False
        write.result()
        return True

    def _write(self, path: Folder, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a shard; once it has its final name it is durable."""
        self._copy.wait()
        if isinstance(path, ObjectPath):
            upload(path, tensors, partial(note_digest, path, path.name))
            return
        unnamed = path.with_suffix(".partial")
        digest = fsync_files.write_tensors(unnamed, tensors)
        note_digest(unnamed, path.name, digest)
        unnamed.rename(path)
