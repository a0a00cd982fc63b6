"""The interface of a scorer: computes one column of samples.

Shape suffix: T tokens of a sample.
"""

from __future__ import annotations

# ruff: noqa: N815 -- arrays carry shape suffixes
# ruff: noqa: N806 -- arrays carry shape suffixes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.chassis import plugins
from services.lib.transformer.token_rows import shared_tokens
from services.scoring.config import ScoringConfig

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sample to score."""

    sample_id: str
    token_ids_T: NDArray[np.int32]
    """The whole sequence, environment tokens included."""
    temperatures_T: NDArray[np.float32]
    """Sampling temperature of each token's turn."""
    columns: Mapping[str, NDArray[np.float32]]
    """The columns of `needs`: one value, or one for each token."""


class Scorer(Protocol):
    """A plug-in. Its constructor takes the `ScoringConfig` and loads the model.

    Called from one thread, with rows of at most `micro_batch_tokens` distinct tokens, or one row;
    between two calls the node may be taken away.
    """

    def score(self, rows: Sequence[Row]) -> Sequence[NDArray[np.float32]]:
        """The column of each row: one value, or one for each token."""
        ...


_HERE = "services.scoring.scorers"
SCORERS = {
    "logprobs": f"{_HERE}.logprobs:LogProbs",
    "reward_model": f"{_HERE}.reward_model:RewardModel",
}


def make_scorer(config: ScoringConfig) -> Scorer:
    """The scorer that `config.scorer` names: a built-in, or "package.module:Name".

    Raises:
        ConfigError: it does not exist, or its model cannot be loaded.
    """
    scorer: Scorer = plugins.make("scorer", config.scorer, SCORERS, config)
    return scorer


def prefix_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows with at most `max_tokens` distinct tokens, or of one row.

    In lexicographic order, a row has the longest common prefix with its predecessor.
    """
    batch: list[int] = []
    num_tokens, before = 0, _NOTHING
    for number in sorted(range(len(rows)), key=lambda n: rows[n].token_ids_T.tolist()):
        ids_T = rows[number].token_ids_T
        num_new = len(ids_T) - shared_tokens(before, ids_T)
        if batch and num_tokens + num_new > max_tokens:
            yield batch
            batch, num_tokens, num_new = [], 0, len(ids_T)
        batch.append(number)
        num_tokens, before = num_tokens + num_new, ids_T
    if batch:
        yield batch


def padded_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows of similar length, in total at most `max_tokens` with padding, or one row."""
    lengths = [len(row.token_ids_T) for row in rows]
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def token_ids(rows: Sequence[Row]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Token ids of the rows, [B, T] with zeros as padding, and their lengths, [B]."""
    lengths_B = np.array([len(row.token_ids_T) for row in rows], np.int64)
    ids_BT = np.zeros((len(rows), int(lengths_B.max())), np.int32)
    for place, row in enumerate(rows):
        ids_BT[place, : len(row.token_ids_T)] = row.token_ids_T
    return ids_BT, lengths_B
