"""The input of one forward pass, and the protocol of a model that runs it.

A pass takes one token of every decoding row and the next part of every prompt that is being
prefilled. A sequence keeps its slot, an index into the cache, while it is cached; its row, an index
into the batch, may change.

Shapes: R decoding rows, V vocabulary.
"""

# ruff: noqa: N815 -- tensors carry their shapes in their names

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from rollout.server.engines.torch.weight_reading.safetensors_reader import WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The next tokens of a prompt."""

    slot: int
    start: int
    """Position of the first token; those before it are cached."""
    token_ids: list[int]
    """At least one."""
    row_length: int
    """Tokens of the sequence, which are more than those of the parts so far."""

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass."""

    slots: list[int]
    """Slots of the decoding rows."""
    tokens_R: Tensor
    """int64; the token each of them feeds."""
    positions_R: Tensor
    """int64; its position."""
    longest: int
    """One more than the largest of `positions_R`; 0 without rows."""
    parts: list[Part]
    """Prompts being prefilled."""


class RowModel(Protocol):
    """A language model that caches keys and values by slot. Weights and caches are opaque."""

    @property
    def supports_mixed_batches(self) -> bool:
        """Whether prompt parts share the pass of the decoding rows instead of needing their own."""
        ...

    def rotation(self, length: int) -> int:
        """A number for what rotates the keys of a sequence of `length` tokens.

        Cached keys are of use to a sequence only while its number is that of their own sequence.
        """
        ...

    def forward(self, step: Step) -> Tensor | None:
        """Run a pass; return the logits [R, V] of what follows the rows' tokens."""
        ...

    def read(self, slot: int, positions: int) -> Any:
        """Return a copy of the first `positions` of a slot."""
        ...

    def write(self, slot: int, cached: Any, positions: int) -> None:
        """Fill an empty slot with the first `positions` of what `read` gave."""
        ...

    def free(self, slots: list[int]) -> None:
        """Empty slots."""
        ...

    def experts(self, slot: int, start: int, stop: int) -> NDArray[Any] | None:
        """The experts chosen in the passes over these positions; None: they are not recorded."""
        ...

    def reader(self) -> WeightReader:
        """For `use_weights`, file by file; need not read all that `read_weights` reads."""
        ...

    def read_weights(self, folder: Path) -> Any:
        """Read and check weights without using them; thread-safe. Raises `WeightsError`."""
        ...

    def use_weights(self, weights: Any) -> None:
        """Swap in what `read_weights` gave. Every slot must be empty."""
        ...

    def release(self) -> int:
        """Free cache and weights until `use_weights`; returns their bytes."""
        ...
