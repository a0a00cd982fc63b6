"""Comparison of published weights and checkpoints with those of another run."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.chaos.trainer.checker import Verdict

__all__ = ["compare", "forget_momentum", "greatest_difference"]

_MOMENTUM = "exp_avg."


def compare(ours: Path, theirs: Path) -> Verdict:
    """Every tensor of every safetensors file of two folders, bit by bit."""
    first, second = _tensors(ours), _tensors(theirs)
    names = first.keys() | second.keys()
    equal = [
        name for name in first.keys() & second.keys() if _bits_equal(first[name], second[name])
    ]
    # A folder without tensors is not what it should be.
    return Verdict(
        tensors_compared=len(names), tensors_unequal=len(names) - len(equal) if names else 1
    )


def greatest_difference(ours: Path, theirs: Path) -> float:
    """Of any two elements; infinite where tensors are missing or an element is no number."""
    first, second = _tensors(ours), _tensors(theirs)
    if not first or first.keys() != second.keys():
        return math.inf
    differences = (
        float((first[name].double() - second[name].double()).abs().max()) for name in first
    )
    return max(value if math.isfinite(value) else math.inf for value in differences)


def forget_momentum(checkpoint: Path) -> None:
    """Set AdamW's mean gradients in a checkpoint to 0, as if they had not been stored.

    Raises:
        RuntimeError: there are none, and whoever does this would prove nothing.
    """
    for path in sorted(checkpoint.glob("*.safetensors")):
        tensors = load_file(path)
        names = [name for name in tensors if name.startswith(_MOMENTUM)]
        if not names:
            raise RuntimeError(f"{path} has no {_MOMENTUM}*: see what a checkpoint holds now")
        zeros = {name: torch.zeros_like(tensors[name]) for name in names}
        save_file({**tensors, **zeros}, path, metadata={"format": "pt"})


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.name}: {name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _bits_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(_bytes(ours), _bytes(theirs))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
