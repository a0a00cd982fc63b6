"""The input of one forward pass, and the protocol of a model that runs it.

A pass takes one token of every decoding row and the next part of every prompt that is being
prefilled. A sequence keeps its slot, an index into the cache, while it is cached; its row, an index
into the batch, may change.

Shapes: R decoding rows, V vocabulary.
"""
# ruff: noqa: N806, N815 -- tensors carry their shapes in their names

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.server.engines.torch.weight_reader import WeightReader
from services.lib.transformer.trial_model import TOLERANCE, WINDOW, TrialModel, trial_model


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
    tokens_R: Tensor
    """int64; the token each of them feeds."""
    positions_R: Tensor
    """int64; its position."""
    longest: int
    """One more than the largest of `positions_R`; 0 without rows."""
    parts: list[Part]


def step_of(
    slots: list[int],
    tokens: list[int],
    positions: list[int],
    parts: list[Part],
    device: torch.device | None = None,
) -> Step:
    """A pass of these rows and parts, on a device."""
    return Step(
        slots=slots,
        tokens_R=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions_R=torch.tensor(positions, dtype=torch.int64, device=device),
        longest=max(positions, default=-1) + 1,
        parts=parts,
    )


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

    def free(self, slots: list[int]) -> None: ...

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


_SHOWN = 200
_Make = Callable[[Any, int, int], RowModel]


def longest_row(folder: Path, config: Any, make: _Make) -> int | None:
    """Tokens up to which rows are computed exactly; None: of any length that the model reads.

    Args:
        folder: of the model.
        config: its text part's.
        make: from a model of transformers, a number of slots and the most tokens of a row.

    Raises:
        ValueError: the model's rows cannot be cached, or this cannot be tried.
    """
    problem = "no small model of its architecture computes"
    if (trial := trial_model(config)) is not None:
        try:
            if (error := _error(trial, make, len(trial.rows[0]))) <= TOLERANCE:
                return None
            problem = f"log-probs of rows differ by {error:.2g} from those of transformers"
            # Within its windows attention is that of a model without any.
            if trial.windows and _error(trial, make, WINDOW) <= TOLERANCE:
                return min(trial.windows.values()) // WINDOW * WINDOW
        except Exception as failure:  # any error of a model that takes no cache
            problem = f"{type(failure).__name__}: {failure}"
    raise ValueError(
        f"model {folder}: the torch engine cannot compute model_type {config.model_type} exactly "
        f'({" ".join(problem.split())[:_SHOWN]}); use another model, or engine = "sglang"'
    )


@torch.inference_mode()
def _error(trial: TrialModel, make: _Make, most: int) -> float:
    """Of rows that are cached in two parts beside each other, and continued token by token.

    As in the engine, the keys of a row are computed again where they are to be rotated otherwise.
    """
    rows = [list(row[:most]) for row in trial.rows]
    engine = make(copy.deepcopy(trial.model), len(rows), most)
    halves = [max(1, len(row) // 3) for row in rows]
    for begin in (0, 1):
        parts = [
            _part(slot, row, half * begin, half * (begin + 1), whole=2 * half)
            for slot, (row, half) in enumerate(zip(rows, halves, strict=True))
            if len(row) > half * begin
        ]
        engine.forward(step_of([], [], [], parts))
    rotations = [engine.rotation(2 * half) for half in halves]
    found: list[list[Tensor]] = [[] for _ in rows]
    for offset in range(most):
        slots = [s for s, row in enumerate(rows) if 2 * halves[s] + offset < len(row)]
        if not slots:
            break
        positions = [2 * halves[slot] + offset for slot in slots]
        for slot, at in zip(slots, positions, strict=True):
            if (rotation := engine.rotation(at + 1)) != rotations[slot]:
                again = _part(slot, rows[slot], 0, at, whole=at + 1)
                engine.forward(step_of([], [], [], [again]))
                rotations[slot] = rotation
        tokens = [rows[slot][at] for slot, at in zip(slots, positions, strict=True)]
        logits_RV = engine.forward(step_of(slots, tokens, positions, []))
        assert logits_RV is not None, "there are rows"
        for slot, logits_V in zip(slots, logits_RV, strict=True):
            found[slot].append(logits_V)
    return trial.error_of_steps([torch.stack(each) for each in found], most)


def _part(slot: int, row: list[int], start: int, end: int, *, whole: int) -> Part:
    return Part(slot=slot, start=start, token_ids=row[start:end], row_length=whole)
