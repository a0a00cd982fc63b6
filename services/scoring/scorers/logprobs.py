"""Log-probs of a sample's tokens under a frozen model: the reference of KL terms, or a teacher.

Shape suffixes: B rows of a forward pass, T tokens, N predicted tokens, V vocabulary.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.lib.model_files.model_folder import check_same_tokens
from services.lib.transformer.can_pack import can_pack, check_padded
from services.lib.transformer.packing import Packing
from services.lib.transformer.row_rope import row_positions, row_rope
from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row, padded_batches, prefix_batches, token_ids
from services.scoring.scorers.loading import load_frozen


class LogProbs:
    """log p(token | all before it) at the temperature of its turn; 0 for the first token.

    The same temperature as the policy's, so that the two are comparable.
    """

    def __init__(self, config: ScoringConfig) -> None:
        from transformers import AutoModelForCausalLM

        if config.policy_model is not None:
            check_same_tokens(config.policy_model, config.model, "model")
        self._model = load_frozen(config, AutoModelForCausalLM)
        check_padded(self._model.config)
        self._device, self._max_tokens = config.device, config.micro_batch_tokens
        self._packs = config.packing and can_pack(self._model)

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> Sequence[NDArray[np.float32]]:
        """Log-probs, one for each token of a row."""
        values: dict[int, NDArray[np.float32]] = {}
        batches, forward = (
            (prefix_batches, self._packed) if self._packs else (padded_batches, self._padded)
        )
        for numbers in batches(rows, self._max_tokens):
            found_BT = forward([rows[number] for number in numbers])
            for number, found_T in zip(numbers, found_BT, strict=True):
                values[number] = found_T[: len(rows[number].token_ids_T)]
        return [values[number] for number in range(len(rows))]

    def _packed(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        ids_BT, lengths_B = token_ids(rows)
        packing = Packing.of(ids_BT, lengths_B, self._device)
        temperatures_BT = _temperatures(rows)
        is_predicted_BT = np.arange(ids_BT.shape[1]) < lengths_B[:, None]
        is_predicted_BT[:, 0] = False
        places_BT = packing.places_BT.cpu().numpy()
        # A shared token is predicted once, unless its turns had different temperatures.
        predictions = np.stack([places_BT[is_predicted_BT], temperatures_BT[is_predicted_BT]], 1)
        _, first_N, of_token = np.unique(
            predictions, axis=0, return_index=True, return_inverse=True
        )
        before_N = places_BT[:, :-1][is_predicted_BT[:, 1:]][first_N]
        logits_1NV = self._model(
            **packing.arguments, logits_to_keep=torch.from_numpy(before_N).to(self._device)
        ).logits
        logprobs_N = self._logprobs(
            logits_1NV[0],
            ids_BT[is_predicted_BT][first_N],
            temperatures_BT[is_predicted_BT][first_N],
        )
        found_BT = np.zeros(ids_BT.shape, np.float32)
        found_BT[is_predicted_BT] = logprobs_N[of_token.ravel()]
        return found_BT

    def _padded(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        # Padding is on the right and attention is causal, so no mask is needed.
        ids_BT, lengths_B = token_ids(rows)
        given_BT = torch.from_numpy(ids_BT).long().to(self._device)
        arguments = {"input_ids": given_BT}
        if row_rope(self._model) is not None:
            on_device_B = torch.from_numpy(lengths_B).to(self._device)
            arguments["position_ids"] = row_positions(on_device_B, ids_BT.shape[1])
        logits_BTV = self._model(**arguments, use_cache=False).logits[:, :-1]
        found_BT = self._logprobs(logits_BTV, ids_BT[:, 1:], _temperatures(rows)[:, 1:])
        return np.pad(found_BT, ((0, 0), (1, 0)))

    def _logprobs(
        self, logits: torch.Tensor, ids: NDArray[np.int32], temperatures: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Log-probs of `ids` [...] from logits [..., V], after temperature."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        scaled = logits.to(wide) / torch.from_numpy(temperatures).to(self._device, wide)[..., None]
        indices = torch.from_numpy(ids).long().to(self._device)[..., None]
        found: NDArray[np.float32] = (
            torch.log_softmax(scaled, -1).gather(-1, indices)[..., 0].float().cpu().numpy()
        )
        return found


def _temperatures(rows: Sequence[Row]) -> NDArray[np.float32]:
    """The temperatures of the rows' tokens, [B, T]; 1 on padding."""
    longest = max(len(row.token_ids_T) for row in rows)
    temperatures_BT = np.ones((len(rows), longest), np.float32)
    for place, row in enumerate(rows):
        temperatures_BT[place, : len(row.temperatures_T)] = row.temperatures_T
    return temperatures_BT
