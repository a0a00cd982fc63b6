"""A small actor and a small critic in stages, whose gradients a pipeline must not change.

Shape suffixes: B rows, T tokens, H hidden size, V vocabulary.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.pipeline.fused_schedule.problem import FORWARD
from trainer.pipeline.interpreter import Shape
from trainer.pipeline.stage_work import HiddenStates

_VOCABULARY, _HIDDEN = 19, 16
_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A micro-batch."""

    token_ids_BT: Tensor
    returns_BT: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its tokens."""
        return tuple(self.token_ids_BT.shape)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_HIDDEN)
        self.mix = nn.Linear(_HIDDEN, _HIDDEN)

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        before_BTH = hidden_BTH.cumsum(1)
        mixed: Tensor = self.mix(self.norm(before_BTH))
        return hidden_BTH + nn.functional.gelu(mixed)


class ToyStage(nn.Module):
    """Some blocks; embeddings at the first stage, an output layer at the last."""

    hidden_size = _HIDDEN
    dtype = torch.float64

    def __init__(self, num_blocks: int, *, first: bool, last: bool, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _HIDDEN) if first else None
        self.blocks = nn.Sequential(*(_Block() for _ in range(num_blocks)))
        self.head = nn.Linear(_HIDDEN, outputs) if last else None

    def forward(self, given: Rows, hidden: Tensor | None) -> Tensor:
        """Hidden states, or outputs."""
        if self.embed is not None:
            hidden = self.embed(given.token_ids_BT)
        states: Tensor = self.blocks(hidden)
        return states if self.head is None else self.head(states)


def make_stages(blocks: Sequence[int], seed: int, *, critic: bool) -> list[ToyStage]:
    """The stages of a model, in float64; `blocks` has the number of blocks of each."""
    torch.manual_seed(seed)
    outputs = 1 if critic else _VOCABULARY
    ends = len(blocks) - 1
    return [
        ToyStage(number, first=index == 0, last=index == ends, outputs=outputs).double()
        for index, number in enumerate(blocks)
    ]


def make_rows(num_micro_batches: int, seed: int) -> list[Rows]:
    """Ragged micro-batches."""
    rng = torch.Generator().manual_seed(seed)
    sizes = [(_ROWS, 5 + 4 * (number % 3)) for number in range(num_micro_batches)]
    return [
        Rows(
            token_ids_BT=torch.randint(_VOCABULARY, size, generator=rng),
            returns_BT=torch.randn(size, generator=rng, dtype=torch.float64),
        )
        for size in sizes
    ]


class ActorEnd(HiddenStates):
    """The actor's last stage: the advantage is the return minus the critic's value."""

    def __init__(self, stage: ToyStage, rows: Sequence[Rows]) -> None:
        super().__init__(cast("Any", stage), cast("Any", rows))
        self._rows = rows

    def incoming(self, kind: int, micro_batch: int) -> Shape:
        """Hidden states, or values."""
        if kind == FORWARD:
            return super().incoming(kind, micro_batch)
        return self._rows[micro_batch].shape, torch.float64

    def forward(self, micro_batch: int, given: Tensor | None) -> Tensor | None:
        """Keep the outputs."""
        self._kept[micro_batch] = self._computed(micro_batch, given)
        return None

    def backward(self, micro_batch: int, given: Tensor | None) -> Tensor | None:
        """From the loss, with the values of a critic, if there is one."""
        leaf, outputs = self._kept.pop(micro_batch)
        rows = self._rows[micro_batch]
        values_BT = torch.zeros_like(rows.returns_BT) if given is None else given
        actor_loss(outputs, values_BT, rows).backward()  # type: ignore[no-untyped-call]
        return None if leaf is None else leaf.grad


class CriticEnd(HiddenStates):
    """The critic's last stage: its values, and their squared error."""

    def __init__(self, stage: ToyStage, rows: Sequence[Rows]) -> None:
        super().__init__(cast("Any", stage), cast("Any", rows))
        self._rows = rows

    def forward(self, micro_batch: int, given: Tensor | None) -> Tensor | None:
        """The values."""
        leaf, outputs = self._computed(micro_batch, given)
        self._kept[micro_batch] = leaf, outputs
        return outputs.detach()[..., 0]

    def backward(self, micro_batch: int, given: Tensor | None) -> Tensor | None:
        """From the loss."""
        leaf, outputs = self._kept.pop(micro_batch)
        critic_loss(outputs, self._rows[micro_batch]).backward()  # type: ignore[no-untyped-call]
        return None if leaf is None else leaf.grad


def actor_loss(logits_BTV: Tensor, values_BT: Tensor, rows: Rows) -> Tensor:
    """Minus log-probs times advantages, summed."""
    logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, rows.token_ids_BT[..., None])[..., 0]
    return -(logprobs_BT * (rows.returns_BT - values_BT)).sum()


def critic_loss(values_BT1: Tensor, rows: Rows) -> Tensor:
    """The squared error of values, summed."""
    return (values_BT1[..., 0] - rows.returns_BT).square().sum()
