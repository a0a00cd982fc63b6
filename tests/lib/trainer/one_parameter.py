"""A policy with one parameter, as checkpoints see it."""

from __future__ import annotations

import torch

from trainer.policy.policy import Policy


class Weights(Policy):
    """Stands for a policy with one parameter."""

    def __init__(self, size: int | torch.Size, part_number: int = 0, num_parts: int = 1) -> None:
        self._part = part_number, num_parts
        self._shards = {"w": torch.nn.Parameter(torch.zeros(size), requires_grad=False)}
        self.loaded: dict[str, torch.Tensor] = {}

    @property
    def shards(self) -> dict[str, torch.nn.Parameter]:
        """The one."""
        return self._shards

    @property
    def part_number(self) -> int:
        """Of this rank."""
        return self._part[0]

    @property
    def num_parts(self) -> int:
        """Over all ranks."""
        return self._part[1]

    def state(self) -> dict[str, torch.Tensor]:
        """What is trained."""
        return {f"parameter.{name}": shard for name, shard in self.shards.items()}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Remember what came."""
        self.loaded = tensors
