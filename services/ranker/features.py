"""Features of a turn before it is sampled: a set of columns of a large sparse matrix.

Columns are hashed, so no vocabulary is stored and any tokenizer works. The regression selects the
informative ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.lib.closed_rollouts import task_name

NUM_COLUMNS = 1 << 18
"""Number of columns; the few thousand features of a run rarely collide."""
Columns = NDArray[np.int64]
"""Columns of one turn, shape [n], ascending."""

_HEAD, _TAIL = 512, 512
_MAX_TURN_INDEX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """A turn before it is sampled."""

    task_id: str
    """Task of its rollout, the same for all rollouts of a group."""
    token_ids: Sequence[int] | NDArray[np.int32]
    """The whole prompt."""
    turn_index: int
    """Earlier turns of the same rollout."""

    @property
    def place(self) -> tuple[str, int]:
        """Task without its epoch, and turn index: turns of one place answer the same question."""
        return task_name(self.task_id), self.turn_index


def columns(start: TurnStart) -> Columns:
    """Words and pairs of words of the prompt, its length, and the turn's index.

    Of a long prompt only the first and the last 512 tokens are used.
    """
    ids = np.asarray(start.token_ids, dtype=np.uint64)
    if len(ids) > _HEAD + _TAIL:
        ids = np.concatenate([ids[:_HEAD], ids[-_TAIL:]])
    pairs = (ids[:-1] + np.uint64(1)) << np.uint64(32) | ids[1:]
    half_octave = round(2 * math.log2(1 + len(start.token_ids)))
    turn_index = min(start.turn_index, _MAX_TURN_INDEX)
    facts = [_named(f"length {half_octave}"), _named(f"turn {turn_index}")]
    return np.unique(np.concatenate([_hashed(ids), _hashed(pairs), np.array(facts, np.int64)]))


def _hashed(keys: NDArray[np.uint64]) -> Columns:
    """Shape [n] -> [n]; the finisher of SplitMix64, whose upper bits are the best mixed."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (keys >> np.uint64(65 - NUM_COLUMNS.bit_length())).astype(np.int64)


def _named(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % NUM_COLUMNS
