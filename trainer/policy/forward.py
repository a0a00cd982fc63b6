"""The forward pass over a micro-batch: log-probs and values of its tokens.

Shape suffixes: B rows of a micro-batch, T tokens of a row.
"""
# ruff: noqa: N815 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from services.lib.transformer.context_group import ContextGroup
from services.lib.transformer.routers import replaying
from services.lib.transformer.row_rope import row_rope
from trainer.data.micro_batch import MicroBatch
from trainer.model.critic import take_values
from trainer.policy.model_input import ModelInput, model_input, predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The models' output for the tokens of each row."""

    logprobs_BT: torch.Tensor
    """Log-prob of the tokens 1..T-1, after temperature; if packed, 0 for tokens not trainable."""
    values_BT: torch.Tensor | None
    """The critic's value after each of the T tokens; None without a critic."""
    num_tokens: int
    """Tokens computed, padding included."""
    entropies_BT: torch.Tensor | None = None
    """Entropy in nats of the distributions of the same tokens, without gradient; None: not known
    here, as in the loss of a critic's own model."""


def forward(
    model: nn.Module,
    batch: MicroBatch,
    device: str,
    *,
    packed: bool,
    chunk_tokens: int = 1024,
    critic: nn.Module | None = None,
    context: ContextGroup | None = None,
) -> Predicted:
    """Run a forward pass over a micro-batch. Collective if the models are sharded.

    Args:
        model: the policy's, which may have a critic's layer.
        batch: the micro-batch.
        device: of the models.
        packed: whether they compute without padding.
        chunk_tokens: tokens whose logits are in memory at a time.
        critic: a model of its own, if the critic is one.
        context: ranks that compute the micro-batch together; they get the same output.
    """
    models = (model,) if critic is None else (model, critic)
    by_row = any(row_rope(each) is not None for each in models)
    given = model_input(batch, device, packed=packed, by_row=by_row, context=context)
    with replaying(given.routed_experts):
        found = predicted(model, given, chunk_tokens, **given.arguments)
    predictions = given.predictions(found)
    values = take_values(model) if critic is None else _values(critic, given)
    return Predicted(
        logprobs_BT=predictions.logprobs_BT,
        entropies_BT=predictions.entropies_BT,
        values_BT=None if values is None else given.values(values),
        num_tokens=given.shape[0] * given.shape[1],
    )


def _values(critic: nn.Module, given: ModelInput) -> torch.Tensor:
    values: torch.Tensor = critic(**given.arguments, **given.output_arguments)
    return values
