"""A reward model: Hugging Face's sequence classification with one label."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row
from services.scoring.scorers.loading import load_frozen

__all__ = ["RewardModel"]


class RewardModel:
    """Scores the whole sequence with one value."""

    def __init__(self, config: ScoringConfig) -> None:
        from transformers import AutoModelForSequenceClassification

        self._model = load_frozen(config, AutoModelForSequenceClassification)
        self._device = config.device
        # One sequence at a time has no padding, and may end with the padding token.
        self._model.config.pad_token_id = None  # type: ignore[union-attr]
        num_labels = self._model.config.num_labels  # type: ignore[union-attr]
        if num_labels != 1:
            raise ValueError(f"model {config.model}: has {num_labels} labels, a reward model has 1")

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> Sequence[NDArray[np.float32]]:
        """One value per row; each row alone, as models handle padding differently."""
        return [np.array([self._score(row)], np.float32) for row in rows]

    def _score(self, row: Row) -> float:
        token_ids = torch.from_numpy(row.token_ids_T.astype(np.int64))[None].to(self._device)
        return float(self._model(input_ids=token_ids, use_cache=False).logits[0, 0])
