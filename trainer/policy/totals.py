"""Sums over the accumulated part of a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from trainer.policy.trained_rows import TrainedRows


class Totals:
    """Of this rank's micro-batches."""

    def __init__(self, *, keeps_rows: bool = False) -> None:
        """`keeps_rows`: whether `rows` are wanted."""
        self._keeps_rows = keeps_rows
        self.rows: list[TrainedRows] = []
        """What was trained on."""
        self.num_tokens = 0
        """Trainable tokens, over all ranks."""
        self.denominator = 0.0
        """Of the step's loss, over all ranks."""
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, sums: Mapping[str, torch.Tensor], rows: TrainedRows | None = None) -> None:
        """Add the sums of a micro-batch on this rank, and its rows."""
        if self._keeps_rows and rows is not None:
            self.rows.append(rows)
        for name, value in sums.items():
            wide = value.double()
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide

    def reduced(self) -> dict[str, float]:
        """Loss, computed tokens and means over tokens, over all ranks. Collective."""
        names = sorted(self._sums)
        totals = torch.stack([self._sums[name] for name in names])
        dist.all_reduce(totals)
        return self._means(dict(zip(names, totals.tolist(), strict=True)))

    def alone(self) -> dict[str, float]:
        """The same of this rank, which had all micro-batches."""
        return self._means({name: value.item() for name, value in self._sums.items()})

    def _means(self, values: dict[str, float]) -> dict[str, float]:
        whole = {
            "loss": values.pop("loss") / self.denominator,
            # Above 1 if sequences share prefixes.
            "packing": values.pop("sequence_tokens") / values["computed_tokens"],
            "computed_tokens": values.pop("computed_tokens"),
        }
        return whole | {name: value / self.num_tokens for name, value in values.items()}
