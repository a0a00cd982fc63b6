"""Comparison of published weights and checkpoints with those of another run."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.chaos.trainer.checker import Verdict

_MOMENTUM = "exp_avg."
_BETA1 = 0.9
"""Of AdamW, as all jobs have it."""


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


def gradient_difference(before: Path, after: Path, their_before: Path, their_after: Path) -> float:
    """Of a step's gradient, from checkpoints before and after it, relative to the greatest element.

    Any number of ranks may have written them; AdamW's means tell the gradient.
    """
    ours, theirs = _gradient(before, after), _gradient(their_before, their_after)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _gradient(before: Path, after: Path) -> torch.Tensor:
    return (_means(after) - _BETA1 * _means(before)) / (1 - _BETA1)


def _means(checkpoint: Path) -> torch.Tensor:
    """AdamW's mean gradients of all parameters, as one vector."""
    parts: dict[str, list[torch.Tensor]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if name.startswith(_MOMENTUM):
                parts.setdefault(name, []).append(tensor.double())
    return torch.cat([torch.cat(parts[name]).flatten() for name in sorted(parts)])


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
