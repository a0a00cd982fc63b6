"""A micro-batch as a model takes it, and what the model's output means for its tokens.

Shape suffixes: B rows of a micro-batch, T tokens of a row, N trainable tokens, U distinct tokens,
V vocabulary, L layers, K chosen experts.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from services.lib.transformer.context_group import ContextGroup
from services.lib.transformer.packing import Packing
from services.lib.transformer.row_rope import row_positions
from trainer.data.micro_batch import MicroBatch
from trainer.model.token_predictions import AskedTokens, ask, predictions, takes_questions


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
        self.routed_experts = routed_experts(batch, None, device)
        """To replay, [N, L, K]; None: none are recorded."""
        if by_row:
            lengths_B = torch.from_numpy(batch.lengths_B).to(device)
            self.arguments["position_ids"] = row_positions(lengths_B, self.shape[1])
        self.output_arguments: dict[str, Any] = {}
        """Of its output layer."""

    def asked(self, chunk_tokens: int) -> AskedTokens:
        """The tokens 1..T-1 of each row, at the places before them; the last place has any."""
        return AskedTokens(
            token_ids=self._token_ids_BT.roll(-1, 1),
            temperatures=torch.nn.functional.pad(self._temperatures_BT, (0, 1), value=1.0),
            chunk_tokens=chunk_tokens,
        )

    def predictions(self, found_BT2: torch.Tensor) -> TokenPredictions:
        """Log-probs and entropies of the tokens 1..T-1 of each row.

        Args:
            found_BT2: what the output layer said of `asked`.
        """
        return TokenPredictions(*found_BT2[:, :-1].unbind(-1))

    def values(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Values after each token of a row, [B, T]."""
        return _wide(values_BT)


class PackedInput:
    """Rows without padding, shared prefixes once; outputs of trainable tokens only.

    And those of the last tokens of rows whose values after them count. The ranks of a context group
    have the same batch: each computes a slice of its tokens, and gets what all computed.
    """

    def __init__(self, batch: MicroBatch, device: str, context: ContextGroup | None = None) -> None:
        packing = Packing.of(batch.token_ids_BT, batch.lengths_B, device, context)
        self._mask_BT = torch.from_numpy(batch.loss_mask_BT[:, 1:]).to(device)
        token_ids_BT = torch.from_numpy(batch.token_ids_BT[:, 1:]).to(device, torch.int64)
        temperatures_BT = torch.from_numpy(batch.temperatures_BT[:, 1:]).to(device)
        predicts_BT = torch.nn.functional.pad(self._mask_BT, (0, 1))
        self._kept_BT = predicts_BT | _ends(batch).to(device)
        self._predicts_N = predicts_BT[self._kept_BT]
        self._token_ids_N = torch.nn.functional.pad(token_ids_BT, (0, 1))[self._kept_BT]
        temperatures_BT = torch.nn.functional.pad(temperatures_BT, (0, 1), value=1.0)
        self._temperatures_N = temperatures_BT[self._kept_BT]
        self.shape: tuple[int, ...] = (1, len(packing.token_ids_U))
        """Of the tokens that a model computes, on all ranks of the group."""
        self.routed_experts = routed_experts(batch, packing, device)
        """To replay by this rank, [U or S, L, K]; None: none are recorded."""
        if self.routed_experts is not None and context is not None:
            self.routed_experts = context.own_tokens(self.routed_experts, FREE)
        self.arguments: dict[str, Any] = packing.arguments
        """Of the model's forward pass."""
        # The vocabulary is large: logits of trainable tokens only.
        places_N = packing.places_BT[self._kept_BT]
        self._kept = None if context is None else context.keep(places_N, self.shape[1])
        places = places_N if self._kept is None else self._kept.places
        self.output_arguments: dict[str, Any] = {"logits_to_keep": places}
        """Of its output layer."""

    def asked(self, chunk_tokens: int) -> AskedTokens:
        """The token after each place that is kept; of no meaning where only a value is needed."""
        own = slice(None) if self._kept is None else self._kept.own
        return AskedTokens(
            token_ids=self._token_ids_N[own][None],
            temperatures=self._temperatures_N[own][None],
            chunk_tokens=chunk_tokens,
        )

    def predictions(self, found_1N2: torch.Tensor) -> TokenPredictions:
        """Log-probs and entropies of the tokens 1..T-1 of each row; 0 for tokens not trainable.

        Collective in a context group.

        Args:
            found_1N2: what the output layer said of `asked`.
        """
        found_N2 = self._of_all(found_1N2)[0][self._predicts_N]
        return TokenPredictions(*(_spread(each, self._mask_BT) for each in found_N2.unbind(-1)))

    def values(self, values_1N: torch.Tensor) -> torch.Tensor:
        """Values after each token of a row, [B, T]; 0 where none is needed.

        Collective in a context group.
        """
        return _spread(_wide(self._of_all(values_1N))[0], self._kept_BT)

    def _of_all(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs if self._kept is None else self._kept.gather(outputs)


ModelInput = PaddedInput | PackedInput


def predicted(model: nn.Module, given: ModelInput, chunk_tokens: int, **arguments: Any) -> Any:
    """Pass an input through a model; what it predicts for the asked tokens, of shape [..., 2].

    Args:
        model: a causal language model, or the last stage of one.
        chunk_tokens: tokens whose logits are in memory at a time.
        arguments: of the forward pass, besides those of the output layer.
    """
    asked = given.asked(chunk_tokens)
    if takes_questions(model):
        with ask(model, asked):
            return model(**arguments, **given.output_arguments).logits
    logits = model(**arguments, **given.output_arguments).logits
    return predictions(logits, asked.token_ids, asked.temperatures)


def model_input(
    batch: MicroBatch,
    device: str,
    *,
    packed: bool,
    by_row: bool = False,
    context: ContextGroup | None = None,
) -> ModelInput:
    """The input of a micro-batch for a model that computes packed rows, or that does not.

    Args:
        by_row: a padded model needs the length of each row (`row_rope`).
        context: ranks that compute it together, if it is packed.
    """
    if packed:
        return PackedInput(batch, device, context)
    return PaddedInput(batch, device, by_row=by_row)


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


FREE = -1
"""Of a token without a record: its routers choose."""


def routed_experts(batch: MicroBatch, packing: Packing | None, device: str) -> torch.Tensor | None:
    """Experts that each token of a pass is routed to, int16 [U, L, K]; less than 0: any.

    A record is of the pass that gave its token, so it is replayed at the token before. Of packed
    rows that share a token the first one with a record counts: they differ where servers, or
    weight versions, computed the prefix of a group.

    Args:
        packing: of its rows; None: they are padded.
    """
    if batch.routed_experts_BTLK is None:
        return None
    chosen_BTLK = _at_inputs(batch.routed_experts_BTLK)
    if packing is None:
        return torch.from_numpy(chosen_BTLK).flatten(0, 1).to(device)
    places_BT, num_tokens = packing.places_BT.cpu().numpy(), len(packing.token_ids_U)
    chosen_ULK = np.full((num_tokens, *chosen_BTLK.shape[2:]), FREE, np.int16)
    rows = zip(chosen_BTLK, places_BT, batch.lengths_B, strict=True)
    for row_TLK, places_T, length in reversed(list(rows)):
        recorded_T = (row_TLK[:length] >= 0).any((1, 2))
        chosen_ULK[places_T[:length][recorded_T]] = row_TLK[:length][recorded_T]
    return torch.from_numpy(chosen_ULK).to(device)


def _at_inputs(experts_BTLK: NDArray[Any]) -> NDArray[np.int16]:
    """The choices at each token, of the record of the token after it."""
    none = np.iinfo(experts_BTLK.dtype).max
    chosen_BTLK = np.full(experts_BTLK.shape, FREE, np.int16)
    after_BTLK = experts_BTLK[:, 1:]
    chosen_BTLK[:, :-1] = np.where(after_BTLK == none, FREE, after_BTLK.astype(np.int32))
    return chosen_BTLK
