"""Log-probs of a sample's tokens under a frozen model: the reference of KL terms, or a teacher.

Shape suffixes: B rows of a forward pass, T tokens, V vocabulary.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row
from services.scoring.scorers.loading import load_frozen

__all__ = ["LogProbs"]


class LogProbs:
    """log p(token | all before it) at the temperature of its turn; 0 for the first token.

    The same temperature as the policy's, so that the two are comparable.
    """

    def __init__(self, config: ScoringConfig) -> None:
        from transformers import AutoModelForCausalLM

        self._model = load_frozen(config, AutoModelForCausalLM)
        self._device, self._max_tokens = config.device, config.micro_batch_tokens

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> Sequence[NDArray[np.float32]]:
        """Log-probs, one for each token of a row."""
        values: dict[int, NDArray[np.float32]] = {}
        for numbers in _batches([len(row.token_ids_T) for row in rows], self._max_tokens):
            found_BT = self._forward([rows[number] for number in numbers])
            for number, found_T in zip(numbers, found_BT, strict=True):
                values[number] = found_T[: len(rows[number].token_ids_T)]
        return [values[number] for number in range(len(rows))]

    def _forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        longest = max(len(row.token_ids_T) for row in rows)
        # Padding is on the right and attention is causal, so no mask is needed.
        padded_BT = np.zeros((len(rows), longest), np.int64)
        temperatures_BT = np.ones((len(rows), longest), np.float32)
        for place, row in enumerate(rows):
            padded_BT[place, : len(row.token_ids_T)] = row.token_ids_T
            temperatures_BT[place, : len(row.token_ids_T)] = row.temperatures_T
        token_ids_BT = torch.from_numpy(padded_BT).to(self._device)
        logits_BTV = self._model(input_ids=token_ids_BT, use_cache=False).logits[:, :-1]
        wide = torch.promote_types(logits_BTV.dtype, torch.float32)
        # Logits at a token are of the next one.
        next_temperatures_BT = torch.from_numpy(temperatures_BT[:, 1:]).to(self._device, wide)
        scaled_BTV = logits_BTV.to(wide) / next_temperatures_BT[:, :, None]
        next_BT = token_ids_BT[:, 1:, None]
        logprobs_BT = torch.log_softmax(scaled_BTV, -1).gather(-1, next_BT)[..., 0]
        found: NDArray[np.float32] = np.pad(logprobs_BT.float().cpu().numpy(), ((0, 0), (1, 0)))
        return found


def _batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows of similar length, in total at most `max_tokens` with padding, or one row."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
