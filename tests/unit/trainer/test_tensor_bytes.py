"""The bytes of tensors are a safetensors file, with the values at the time of the request."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from trainer import fsync_files
from trainer.fsync_files import TYPES, HeldTensors, tensor_bytes


def joined(tensors: dict[str, torch.Tensor]) -> bytes:
    """A file in memory."""
    return b"".join(bytes(piece) for piece in tensor_bytes(tensors))


def test_the_library_reads_every_type_and_shape(tmp_path: Path) -> None:
    """Numbers, nothing, several dimensions, views; and the checksum is the file's."""
    torch.manual_seed(0)
    tensors = {name: (torch.randn(3, 5) * 9).to(dtype) for name, dtype in TYPES.items()}
    tensors |= {
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "view": torch.arange(12.0).reshape(3, 4).t(),
    }
    digest = fsync_files.save_tensors(tmp_path / "all.safetensors", tensors)
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        bits = [each.reshape(-1).view(torch.uint8) for each in (found[name], tensor)]
        assert torch.equal(*bits)
    assert digest == fsync_files.tensors_digest(tensors)


def test_a_type_that_the_format_lacks_is_named() -> None:
    """Before a byte is written."""
    with pytest.raises(ValueError, match=r"tensor odd is of torch\.complex64"):
        next(tensor_bytes({"odd": torch.zeros(2, dtype=torch.complex64)}))


@pytest.mark.parametrize("held_back", [True, False])
def test_what_is_not_written_yet_is_copied_before_it_changes(held_back: bool) -> None:
    """As a control, without that the change is in the file."""
    tensors = {name: torch.zeros(4) for name in "abc"}
    held = HeldTensors(tensors, in_place=tensors)
    pieces = tensor_bytes(held)
    written = [bytes(next(pieces)), bytes(next(pieces))]  # the header, and the first tensor
    changed = threading.Event()

    def change() -> None:
        if held_back:
            held.hold_back()
        for tensor in tensors.values():
            tensor.add_(1)
        changed.set()

    changing = threading.Thread(target=change)
    changing.start()
    if held_back:
        assert not changed.wait(0.05), "a tensor was changed while it was written"
    else:
        changing.join()
    written += [bytes(piece) for piece in pieces]
    changing.join()
    found = load(b"".join(written))
    assert bool(torch.cat([found["b"], found["c"]]).eq(0).all()) is held_back


def test_the_memory_of_what_was_written_can_be_released() -> None:
    """As a lent trainer does; numpy's view of a tensor would prevent it."""
    tensor = torch.zeros(4)
    joined({"a": tensor})
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
    seen = torch.zeros(4)
    seen.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):
        seen.untyped_storage().resize_(0)


def test_what_was_copied_is_not_copied_again() -> None:
    """Such as what came from a device."""
    held = HeldTensors({"a": torch.zeros(2), "b": torch.zeros(2)}, in_place=["a"])
    before = dict(held)
    held.hold_back()
    assert held["a"] is not before["a"]
    assert held["b"] is before["b"]
