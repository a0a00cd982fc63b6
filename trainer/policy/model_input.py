"""A micro-batch as a model takes it, and what the model's output means for its tokens.

Shape suffixes: B rows of a micro-batch, T tokens of a row, N trainable tokens, U distinct tokens,
V vocabulary.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from services.lib.transformer.packing import Packing
from services.lib.transformer.row_rope import row_positions
from trainer.data.micro_batch import MicroBatch

__all__ = [
    "ModelInput",
    "PackedInput",
    "PaddedInput",
    "TokenPredictions",
    "model_input",
    "token_logprobs",
]

_ENTROPY_NUMBERS = 1 << 22
"""Probabilities that are in memory at a time for the entropies."""


class TokenPredictions(NamedTuple):
    """What a model predicts for the tokens 1..T-1 of each row, after temperature."""

    logprobs_BT: torch.Tensor
    """Their log-probs, [B, T - 1]."""
    entropies_BT: torch.Tensor
    """Entropy in nats of the distribution that each is sampled from, [B, T - 1]; no gradient."""


class PaddedInput:
    """Rows padded on the right; attention is causal, so no mask is needed."""

    def __init__(self, batch: MicroBatch, device: str, *, by_row: bool = False) -> None:
        self._token_ids_BT = torch.from_numpy(batch.token_ids_BT).to(device, torch.int64)
        self._temperatures_BT = torch.from_numpy(batch.temperatures_BT[:, 1:]).to(device)
        self.shape = tuple(self._token_ids_BT.shape)
        """Of the tokens that a model computes."""
        self.arguments: dict[str, Any] = {"input_ids": self._token_ids_BT, "use_cache": False}
        """Of the model's forward pass."""
        if by_row:
            lengths_B = torch.from_numpy(batch.lengths_B).to(device)
            self.arguments["position_ids"] = row_positions(lengths_B, self.shape[1])
        self.output_arguments: dict[str, Any] = {}
        """Of its output layer."""

    def predictions(self, logits_BTV: torch.Tensor) -> TokenPredictions:
        """Log-probs and entropies of the tokens 1..T-1 of each row."""
        logprobs_BTV = _scaled_logprobs(logits_BTV[:, :-1], self._temperatures_BT)
        return TokenPredictions(
            _chosen(logprobs_BTV, self._token_ids_BT[:, 1:]), _entropies(logprobs_BTV)
        )

    def values(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Values after each token of a row, [B, T]."""
        return _wide(values_BT)


class PackedInput:
    """Rows without padding, shared prefixes once; outputs of trainable tokens only.

    And those of the last tokens of rows whose values after them count.
    """

    def __init__(self, batch: MicroBatch, device: str) -> None:
        packing = Packing.of(batch.token_ids_BT, batch.lengths_B, device)
        self._mask_BT = torch.from_numpy(batch.loss_mask_BT[:, 1:]).to(device)
        token_ids_BT = torch.from_numpy(batch.token_ids_BT[:, 1:]).to(device, torch.int64)
        temperatures_BT = torch.from_numpy(batch.temperatures_BT[:, 1:]).to(device)
        self._token_ids_N = token_ids_BT[self._mask_BT]
        self._temperatures_N = temperatures_BT[self._mask_BT]
        predicts_BT = torch.nn.functional.pad(self._mask_BT, (0, 1))
        self._kept_BT = predicts_BT | _ends(batch).to(device)
        self._predicts_N = predicts_BT[self._kept_BT] if batch.bootstrap_B.any() else None
        self.shape: tuple[int, ...] = (1, len(packing.token_ids_U))
        """Of the tokens that a model computes."""
        self.arguments: dict[str, Any] = packing.arguments
        """Of the model's forward pass."""
        # The vocabulary is large: logits of trainable tokens only.
        self.output_arguments: dict[str, Any] = {"logits_to_keep": packing.places_BT[self._kept_BT]}
        """Of its output layer."""

    def predictions(self, logits_1NV: torch.Tensor) -> TokenPredictions:
        """Log-probs and entropies of the tokens 1..T-1 of each row; 0 for tokens not trainable."""
        logits_NV = logits_1NV[0]
        if self._predicts_N is not None:
            logits_NV = logits_NV[self._predicts_N]
        logprobs_NV = _scaled_logprobs(logits_NV, self._temperatures_N)
        found = _chosen(logprobs_NV, self._token_ids_N), _entropies(logprobs_NV)
        return TokenPredictions(*(_spread(values_N, self._mask_BT) for values_N in found))

    def values(self, values_1N: torch.Tensor) -> torch.Tensor:
        """Values after each token of a row, [B, T]; 0 where none is needed."""
        return _spread(_wide(values_1N)[0], self._kept_BT)


ModelInput = PaddedInput | PackedInput


def model_input(
    batch: MicroBatch, device: str, *, packed: bool, by_row: bool = False
) -> ModelInput:
    """The input of a micro-batch for a model that computes packed rows, or that does not.

    Args:
        batch: the micro-batch.
        device: of the model.
        packed: without padding.
        by_row: a padded model needs the length of each row (`row_rope`).
    """
    return PackedInput(batch, device) if packed else PaddedInput(batch, device, by_row=by_row)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Log-probs of `token_ids` after temperature, in float32 at least.

    Args:
        logits: [..., V].
        token_ids: [...].
        temperatures: [...], or a shape that broadcasts to it.
    """
    return _chosen(_scaled_logprobs(logits, temperatures), token_ids)


def _scaled_logprobs(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Log-probs of the whole vocabulary after temperature, [..., V]."""
    scaled = (
        _wide(logits) / temperatures.to(torch.promote_types(logits.dtype, torch.float32))[..., None]
    )
    return torch.log_softmax(scaled, -1)


def _chosen(logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return logprobs.gather(-1, token_ids[..., None])[..., 0]


@torch.no_grad()
def _entropies(logprobs: torch.Tensor) -> torch.Tensor:
    """Of each distribution, [...]; the probabilities of a part at a time, as [..., V] is large."""
    rows_NV = logprobs.detach().flatten(0, -2)
    parts = torch.split(rows_NV, max(_ENTROPY_NUMBERS // rows_NV.shape[-1], 1))
    found = [torch.special.entr(part.exp()).sum(-1) for part in parts]
    return torch.cat(found).reshape(logprobs.shape[:-1])


def _ends(batch: MicroBatch) -> torch.Tensor:
    """True at the last tokens of rows whose values after them count, [B, T]."""
    places_T = torch.arange(batch.token_ids_BT.shape[1])
    is_last_BT = places_T == torch.from_numpy(batch.lengths_B)[:, None] - 1
    return is_last_BT & torch.from_numpy(batch.bootstrap_B)[:, None]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _spread(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Scatter values back to rows; 0 elsewhere."""
    zeros_BT = torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device)
    return zeros_BT.masked_scatter(mask_BT, values_N)
