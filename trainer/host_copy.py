"""Copy tensors of the device to the host while training goes on.

    IDLE -> (start) COPYING -> (wait, on the host) COPIED -> (start) ...

On cuda the buffers are pinned and kept, so that a copy neither waits for memory nor stops the
device, and a stream of its own carries it out. `hold_back` keeps the weights as they are until
then. What lies on the host is not copied (`HeldTensors`). Pinning takes about
0.7 s a GB, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class CudaStream:
    """Carries out copies of the current device, in order, beside its other work."""

    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Copies that follow come after the work that the device was given before."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, perhaps later."""
        with torch.cuda.stream(self._stream):
            # Converted on the device: a copy that converts does so on the host, and waits for it.
            target.copy_(source.to(target.dtype), non_blocking=True)
        if source.is_cuda:  # it may be freed before
            source.record_stream(self._stream)

    def end(self) -> None:
        """All copies were given."""
        self._done.record(self._stream)

    def wait(self) -> None:
        """Block this thread until the copies are done."""
        self._done.synchronize()

    def hold_back(self) -> None:
        """Work that the device is given from now on comes after the copies."""
        torch.cuda.current_stream().wait_event(self._done)


def copy_stream(device: str) -> CudaStream | None:
    """The stream for "cuda"; None for "cpu", whose copies are carried out at once."""
    return CudaStream() if device == "cuda" else None


class HostCopy:
    """Host buffers for one copy at a time."""

    def __init__(self, stream: CudaStream | None) -> None:
        self._stream = stream
        self._kept: dict[str, torch.Tensor] = {}

    def start(
        self, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Start a copy; its buffers by name, which are whole after `wait`.

        The buffers of the copy before are written over.

        Args:
            tensors: name and content of each; they may be computed one by one.
            dtype: of the copies of floating-point tensors; None: their own.
        """
        buffers: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            buffers[name] = self._buffer(name, tensor, kind)
            if self._stream is None:
                buffers[name].copy_(tensor.detach())
            else:
                self._stream.begin()
                self._stream.copy(buffers[name], tensor.detach())
        if self._stream is not None:
            self._stream.end()
            self._kept = buffers
        return buffers

    def wait(self) -> None:
        """Block this thread until the copy is whole."""
        if self._stream is not None:
            self._stream.wait()

    def hold_back(self) -> None:
        """Let the device change tensors only after they are copied; does not block."""
        if self._stream is not None:
            self._stream.hold_back()

    def _buffer(self, name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == like.shape and kept.dtype == dtype:
            return kept
        return torch.empty(like.shape, dtype=dtype, pin_memory=self._stream is not None)
