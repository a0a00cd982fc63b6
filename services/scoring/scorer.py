"""The interface of a scorer: computes one column of samples.

Shape suffix: T tokens of a sample.
"""
# ruff: noqa: N815 -- arrays carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.chassis import plugins
from services.scoring.config import ScoringConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sample to score."""

    sample_id: str
    """Id, for errors."""
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
