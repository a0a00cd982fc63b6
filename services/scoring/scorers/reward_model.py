"""A reward model: Hugging Face's sequence classification with one label.

It reads the policy's token ids, or their text where its tokenizer or chat template is another.

Shape suffixes: B rows of a forward pass, T tokens.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.lib.transformer.can_pack import can_pack
from services.lib.transformer.packing import Packing
from services.lib.transformer.row_rope import row_rope
from services.scoring.config import ScoringConfig
from services.scoring.row_batches import prefix_batches, token_ids
from services.scoring.scorer import Row
from services.scoring.scorers.loading import load_frozen
from services.scoring.scorers.reward_text import own_text


class RewardModel:
    """Scores the whole sequence with one value."""

    def __init__(self, config: ScoringConfig) -> None:
        from transformers import AutoModelForSequenceClassification

        model: Any = load_frozen(config, AutoModelForSequenceClassification)
        self._model = model
        self._device, self._max_tokens = config.device, config.micro_batch_tokens
        # One sequence at a time has no padding, and may end with the padding token.
        model.config.pad_token_id = None
        num_labels = model.config.num_labels
        if num_labels != 1:
            raise ValueError(f"model {config.model}: has {num_labels} labels, a reward model has 1")
        has_head = hasattr(model, "score")
        self._text = own_text(config.policy_model, config.model)
        row_rope(model)  # what was scored before must not change a row
        self._packs = config.packing and has_head and can_pack(model, self._outputs)

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> Sequence[NDArray[np.float32]]:
        """One value per row; without packing each row alone, as models handle padding variously."""
        if self._text is not None:
            own = map(self._text.own_ids, (row.token_ids_T for row in rows))
            rows = [replace(row, token_ids_T=ids_T) for row, ids_T in zip(rows, own, strict=True)]
        if not self._packs:
            return [np.array([self._score(row)], np.float32) for row in rows]
        values: dict[int, float] = {}
        for numbers in prefix_batches(rows, self._max_tokens):
            values |= zip(numbers, self._packed([rows[n] for n in numbers]), strict=True)
        return [np.array([values[number]], np.float32) for number in range(len(rows))]

    def _packed(self, rows: Sequence[Row]) -> list[float]:
        ids_BT, lengths_B = token_ids(rows)
        packing = Packing.of(ids_BT, lengths_B, self._device)
        last = torch.from_numpy(lengths_B[:, None] - 1).to(self._device)
        last_B = packing.places_BT.gather(1, last)[:, 0]
        found: list[float] = self._outputs(**packing.arguments, logits_to_keep=last_B)[
            0, :, 0
        ].tolist()
        return found

    def _outputs(
        self, *, logits_to_keep: torch.Tensor | slice = slice(None), **arguments: Any
    ) -> torch.Tensor:
        states_BTH = self._model.base_model(**arguments).last_hidden_state
        scores: torch.Tensor = self._model.score(states_BTH[:, logits_to_keep])
        return scores

    def _score(self, row: Row) -> float:
        ids_BT = torch.from_numpy(row.token_ids_T.astype(np.int64))[None].to(self._device)
        return float(self._model(input_ids=ids_BT, use_cache=False).logits[0, 0])
