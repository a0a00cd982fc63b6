"""The forward pass over a micro-batch: log-probs and values of its tokens.

Shape suffixes: B rows of a micro-batch, T tokens of a row, N trainable tokens, V vocabulary.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainer.data.micro_batch import MicroBatch
from trainer.model.packing import Packing

__all__ = ["VALUE_HEAD", "Predicted", "add_value_head", "forward", "token_logprobs"]

VALUE_HEAD = "value_head"
"""Name of the critic's layer in the model; it is not published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The model's output for the tokens 1..T-1 of each row."""

    logprobs_BT: torch.Tensor
    """Log-prob of each token, after temperature; if packed, 0 for tokens not trainable."""
    values_BT: torch.Tensor | None
    """The critic's value before each token; None without a critic."""
    num_tokens: int
    """Tokens computed, padding included."""


def forward(model: nn.Module, batch: MicroBatch, device: str, *, packed: bool) -> Predicted:
    """Run a forward pass over a micro-batch. Collective if the model is sharded."""
    return _packed(model, batch, device) if packed else _padded(model, batch, device)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Log-probs of `token_ids` after temperature, in float32 at least.

    Args:
        logits: [..., V].
        token_ids: [...].
        temperatures: [...], or a shape that broadcasts to it.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits.to(wide) / temperatures.to(wide)[..., None]
    return torch.log_softmax(scaled, -1).gather(-1, token_ids[..., None])[..., 0]


def add_value_head(model: nn.Module) -> None:
    """Add a critic to the model: a linear layer on the input of the output embeddings.

    Initialised to 0, so the first values are 0.

    Raises:
        ValueError: the output embeddings are not a linear layer.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    output = getattr(output, "base_layer", output)  # of one with an adapter
    if not isinstance(output, nn.Linear):
        raise ValueError(  # noqa: TRY004 -- a setting is wrong
            f"{type(model).__name__} cannot have a critic, its output embeddings are a "
            f"{type(output).__name__}: use an algorithm without a critic"
        )
    like = next(model.parameters())
    head = nn.Linear(output.in_features, 1, device=like.device, dtype=like.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.add_module(VALUE_HEAD, head)
    output.register_forward_pre_hook(lambda _, inputs: _keep_values(model, inputs[0]))


def _keep_values(model: nn.Module, hidden: torch.Tensor) -> None:
    # Within the model's forward pass, when FSDP has gathered the layer.
    model.values = model.get_submodule(VALUE_HEAD)(hidden)[..., 0]


def _values(model: nn.Module) -> torch.Tensor | None:
    if not hasattr(model, VALUE_HEAD):
        return None
    values = model.values
    assert isinstance(values, torch.Tensor)
    del model.values  # releases the autograd graph
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _padded(model: nn.Module, batch: MicroBatch, device: str) -> Predicted:
    token_ids_BT = torch.from_numpy(batch.token_ids_BT).to(device, torch.int64)
    # Padding is on the right and attention is causal, so no mask is needed.
    logits_BTV = model(input_ids=token_ids_BT, use_cache=False).logits[:, :-1]
    temperatures_BT = torch.from_numpy(batch.temperatures_BT[:, 1:]).to(device)
    values_BT = _values(model)
    return Predicted(
        logprobs_BT=token_logprobs(logits_BTV, token_ids_BT[:, 1:], temperatures_BT),
        values_BT=None if values_BT is None else values_BT[:, :-1],
        num_tokens=token_ids_BT.numel(),
    )


def _packed(model: nn.Module, batch: MicroBatch, device: str) -> Predicted:
    packing = Packing.of(batch.token_ids_BT, batch.lengths_B, device)
    mask_BT = torch.from_numpy(batch.loss_mask_BT[:, 1:]).to(device)
    token_ids_BT = torch.from_numpy(batch.token_ids_BT[:, 1:]).to(device, torch.int64)
    temperatures_BT = torch.from_numpy(batch.temperatures_BT[:, 1:]).to(device)
    logits_NV = model(
        input_ids=packing.token_ids_U[None],
        position_ids=packing.positions_U[None],
        rows=packing,
        # The vocabulary is large: logits of trainable tokens only.
        logits_to_keep=packing.places_BT[:, :-1][mask_BT],
        use_cache=False,
    ).logits[0]
    logprobs_N = token_logprobs(logits_NV, token_ids_BT[mask_BT], temperatures_BT[mask_BT])
    values_N = _values(model)
    return Predicted(
        logprobs_BT=_spread(logprobs_N, mask_BT),
        values_BT=None if values_N is None else _spread(values_N[0], mask_BT),
        num_tokens=len(packing.token_ids_U),
    )


def _spread(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Scatter values back to rows; 0 elsewhere."""
    zeros_BT = torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device)
    return zeros_BT.masked_scatter(mask_BT, values_N)
