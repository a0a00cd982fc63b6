"""The weights that ranks publish, read from the files that they write."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from services.lib.weight_files.folder_names import folder_name
from trainer.publish.attempt_messages import WrittenFile
from trainer.publish.snapshot_weights import SnapshotWeights


async def write_snapshot(weights: SnapshotWeights, spool: Path) -> list[WrittenFile]:
    """Let the ranks write a snapshot into version 1's folder in `spool`; nothing is sent."""
    folder = spool / folder_name(1)
    async with weights.attempt(version=1, spool=folder) as attempt:
        return [each async for each in attempt.files()]


def written_tensors(spool: Path) -> dict[str, torch.Tensor]:
    """All tensors of the files that `write_snapshot` left."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted((spool / folder_name(1)).glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found
