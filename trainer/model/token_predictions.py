"""Log-probs and entropies of tokens, computed within the output layer, some tokens at a time.

The logits of a micro-batch are [N, V], and a loss holds several tensors of that size: with 152
thousand token ids, 2.1 MB a token. Here the output layer answers with two numbers a token. Its
logits exist for `chunk_tokens` tokens at a time, and are computed again in the backward pass. It
does so within the forward pass of the model, where FSDP has gathered its weights.

Shape suffixes: N tokens, V vocabulary.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from services.chassis.log import get_logger

_ASKED = "_seamflow_asked"
_TOLERANCE = 1e-3
_ENTROPY_NUMBERS = 1 << 22
"""Probabilities that are in memory at a time for the entropies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTokens:
    """The tokens whose predictions the output layer gives instead of logits."""

    token_ids: torch.Tensor
    """int64, of the shape that the logits would have without the vocabulary, such as [1, N]."""
    temperatures: torch.Tensor
    """Of the same shape."""
    chunk_tokens: int
    """Tokens whose logits are in memory at a time."""


def predict_within(model: Any) -> None:
    """Let the output layer of a causal language model answer `ask`, in place."""
    layer = model.get_output_embeddings()
    plain = layer.forward
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:  # else it would be applied to the predictions
        model.config.final_logit_softcapping = None

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = plain(hidden)
        return found if cap is None else cap * torch.tanh(found / cap)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        asked: AskedTokens | None = getattr(layer, _ASKED, None)
        return logits(hidden) if asked is None else _predicted(logits, hidden, asked)

    layer.forward = forward
    setattr(layer, _ASKED, None)


@torch.no_grad()
def check_predictions(model: Any, device: str) -> bool:
    """Whether the predictions are those of the model's logits; if not, logits are used.

    They are not where a model changes the logits after its output layer, by another way than
    `final_logit_softcapping`. Collective if the model is sharded.
    """
    ids = torch.tensor([[1, 2, 3, 4]], device=device)
    asked = AskedTokens(
        token_ids=ids, temperatures=torch.full((1, 4), 0.7, device=device), chunk_tokens=3
    )
    expected = predictions(model(input_ids=ids, use_cache=False).logits, ids, asked.temperatures)
    with ask(model, asked):
        found = model(input_ids=ids, use_cache=False).logits
    is_same = found.shape == expected.shape and torch.allclose(found, expected, atol=_TOLERANCE)
    if not is_same:
        get_logger().warning("predictions_from_logits", model=type(model).__name__)
        delattr(model.get_output_embeddings(), _ASKED)
    return is_same


def takes_questions(model: Any) -> bool:
    """Whether `predict_within` has prepared the model."""
    return hasattr(model.get_output_embeddings(), _ASKED)


@contextmanager
def ask(model: Any, asked: AskedTokens) -> Iterator[None]:
    """Within the block, `logits` of the model's output are predictions, [..., 2].

    They are the log-prob of each token after temperature and the entropy of its distribution in
    nats, which has no gradient.
    """
    layer = model.get_output_embeddings()
    setattr(layer, _ASKED, asked)
    try:
        yield
    finally:
        setattr(layer, _ASKED, None)


def _predicted(logits: Any, hidden: torch.Tensor, asked: AskedTokens) -> torch.Tensor:
    def part(*given: torch.Tensor) -> torch.Tensor:
        return predictions(logits(given[0]), given[1], given[2])

    given = hidden.flatten(0, -2), asked.token_ids.flatten(), asked.temperatures.flatten()
    if len(given[1]) <= asked.chunk_tokens:
        found = part(*given)
    else:
        parts = zip(*(torch.split(each, asked.chunk_tokens) for each in given), strict=True)
        again = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
        found = torch.cat([again(*each) for each in parts])
    # Not a view: FSDP warns of those.
    return found.reshape(*hidden.shape[:-1], 2).clone()


def predictions(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Log-prob of each token and entropy of its distribution, [..., 2], in float32 at least.

    Args:
        logits: [..., V].
        token_ids: [...].
        temperatures: [...], or a shape that broadcasts to it.
    """
    logprobs = _scaled_logprobs(logits, temperatures)
    return torch.stack([_chosen(logprobs, token_ids), _entropies(logprobs)], -1)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Log-probs of `token_ids` after temperature; arguments as those of `predictions`."""
    return _chosen(_scaled_logprobs(logits, temperatures), token_ids)


def _scaled_logprobs(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Log-probs of the whole vocabulary after temperature, [..., V]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits.to(wide) / temperatures.to(wide)[..., None], -1)


def _chosen(logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return logprobs.gather(-1, token_ids[..., None])[..., 0]


@torch.no_grad()
def _entropies(logprobs: torch.Tensor) -> torch.Tensor:
    """Of each distribution, [...]; the probabilities of a part at a time, as [..., V] is large."""
    rows_NV = logprobs.detach().flatten(0, -2)
    parts = torch.split(rows_NV, max(_ENTROPY_NUMBERS // rows_NV.shape[-1], 1))
    found = [torch.special.entr(part.exp()).sum(-1) for part in parts]
    return torch.cat(found).reshape(logprobs.shape[:-1])
