"""Move tensors' memory out of the device and back, while the tensors themselves stay in place.

HELD -> RELEASED -> HELD. The storages are moved: every view of them, in the model, in FSDP and in
the optimizer, is valid again after `restore`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class DeviceState:
    """Host copies of the released storages; empty while the device holds them."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @property
    def released(self) -> bool:
        """True between `release` and `restore`."""
        return bool(self._copies)

    def release(self, tensors: Iterable[torch.Tensor]) -> int:
        """Copy the storages of `tensors` to the host and free them; the number of bytes freed.

        Idempotent, also after a `restore` that failed halfway: copies are kept until it succeeds.
        """
        if not self.released:
            storages = {
                storage.data_ptr(): storage
                for storage in (tensor.untyped_storage() for tensor in tensors)
                if storage.nbytes()
            }
            self._copies = [(storage, _to_host(storage)) for storage in storages.values()]
        for storage, _ in self._copies:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(copy.numel() for _, copy in self._copies)

    def restore(self) -> None:
        """Allocate every storage on the device again and copy its content back. Idempotent."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._copies = []


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    # Pinned, so that the copy back runs at the bus's full speed.
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    return copy.copy_(_bytes(storage))
