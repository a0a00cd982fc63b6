"""The critic: a layer on the policy's last hidden states, or a model of its own.

Either is in the checkpoint and never published. Its values are 0 at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

VALUE_HEAD = "value_head"
"""Name of the critic's linear layer: in the policy's model, or in the critic's own."""
CRITIC = "critic."
"""Prefix of the parameters of a critic's own model."""


def is_critic(name: str) -> bool:
    """Whether a parameter belongs to a critic of either kind."""
    return name.startswith((VALUE_HEAD, CRITIC))


class CriticModel(nn.Module):
    """The backbone of a causal language model, and a linear layer from its last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        """Take the backbone of `model`, without its output embeddings."""
        super().__init__()
        self._gives_hidden = False
        self.backbone: Any = model.base_model
        self.add_module(VALUE_HEAD, _zero_layer(model))

    def forward(
        self, *, logits_to_keep: torch.Tensor | None = None, **arguments: Any
    ) -> torch.Tensor:
        """Values of all tokens, [rows, tokens], or of those at the places `logits_to_keep`."""
        hidden: torch.Tensor = self.backbone(**arguments).last_hidden_state
        if self._gives_hidden:
            return hidden if logits_to_keep is None else hidden[:, logits_to_keep]
        return self.values(hidden if logits_to_keep is None else hidden[:, logits_to_keep])

    @contextmanager
    def giving_hidden(self) -> Iterator[None]:
        """Within the block, the output is the last hidden states, as the values are 0 at first."""
        self._gives_hidden = True
        try:
            yield
        finally:
            self._gives_hidden = False

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """From last hidden states, [..., hidden size], to values, [...]."""
        values: torch.Tensor = self.get_submodule(VALUE_HEAD)(hidden)[..., 0]
        return values.clone()  # not a view: FSDP warns of those


def add_value_head(model: nn.Module) -> None:
    """Add a critic to the model: a linear layer on the input of the output embeddings.

    Raises:
        ValueError: the output embeddings are not a linear layer.
    """
    head = _zero_layer(model)
    model.add_module(VALUE_HEAD, head)
    # Of the whole layer: one with an adapter calls its base for some tokens at a time.
    output: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    output.register_forward_pre_hook(lambda _, inputs: _keep_values(model, inputs[0]))


def take_values(model: nn.Module) -> torch.Tensor | None:
    """The values of the forward pass before, by the model's own layer; None without one."""
    if not hasattr(model, VALUE_HEAD):
        return None
    values = model.values
    assert isinstance(values, torch.Tensor)
    del model.values  # releases the autograd graph
    return values


def _keep_values(model: nn.Module, hidden: torch.Tensor) -> None:
    # Within the model's forward pass, when FSDP has gathered the layer.
    model.values = model.get_submodule(VALUE_HEAD)(hidden)[..., 0]


def _zero_layer(model: nn.Module) -> nn.Linear:
    like = next(model.parameters())
    size = _output_layer(model).in_features
    device = "cpu" if like.is_meta else like.device
    head = nn.Linear(size, 1, device=device, dtype=like.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _output_layer(model: nn.Module) -> nn.Linear:
    output = model.get_output_embeddings()  # type: ignore[operator]
    output = getattr(output, "base_layer", output)  # of one with an adapter
    if not isinstance(output, nn.Linear):
        raise ValueError(  # noqa: TRY004 -- a setting is wrong
            f"{type(model).__name__} cannot have a critic, its output embeddings are a "
            f"{type(output).__name__}: use an algorithm without a critic"
        )
    return output
