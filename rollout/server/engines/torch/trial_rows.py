"""How long the rows of a `RowModel` may be, tried on a small model of the same architecture."""

# ruff: noqa: N806 -- tensors carry their shapes in their names

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.server.engines.torch.row_model import Part, RowModel, Step
from services.lib.transformer.trial_model import TOLERANCE, WINDOW, TrialModel, trial_model

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
        engine.forward(_step([], [], [], parts))
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
                engine.forward(_step([], [], [], [again]))
                rotations[slot] = rotation
        tokens = [rows[slot][at] for slot, at in zip(slots, positions, strict=True)]
        logits_RV = engine.forward(_step(slots, tokens, positions, []))
        assert logits_RV is not None, "there are rows"
        for slot, logits_V in zip(slots, logits_RV, strict=True):
            found[slot].append(logits_V)
    return trial.error_of_steps([torch.stack(each) for each in found], most)


def _part(slot: int, row: list[int], start: int, end: int, *, whole: int) -> Part:
    return Part(slot=slot, start=start, token_ids=row[start:end], row_length=whole)


def _step(slots: list[int], tokens: list[int], positions: list[int], parts: list[Part]) -> Step:
    return Step(
        slots=slots,
        tokens_R=torch.tensor(tokens, dtype=torch.int64),
        positions_R=torch.tensor(positions, dtype=torch.int64),
        longest=max(positions, default=-1) + 1,
        parts=parts,
    )
