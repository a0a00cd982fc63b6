"""Predictions from within the output layer: those of the logits, with the memory of some tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.model.test_packing import batch_of, make, random_rows
from trainer.model.critic import add_value_head, take_values
from trainer.model.token_predictions import (
    AskedTokens,
    ask,
    check_predictions,
    predict_within,
    takes_questions,
)
from trainer.policy.forward import forward

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
    # It changes its logits after the output layer, in a way that `predict_within` takes over.
    "gemma2": {"final_logit_softcapping": 0.5, "head_dim": 16},
}


def prepared(kind: str, **settings: Any) -> Any:
    """A model that answers questions."""
    model = make(kind, **settings)
    predict_within(model)
    assert check_predictions(model, "cpu")
    return model


def gradients(model: Any, chunk_tokens: int, *, packed: bool) -> Iterator[torch.Tensor]:
    """Log-probs, entropies, then the gradients of all parameters."""
    found = forward(
        model, batch_of(random_rows(3)), "cpu", packed=packed, chunk_tokens=chunk_tokens
    )
    assert found.entropies_BT is not None
    model.zero_grad()
    (found.logprobs_BT * torch.arange(found.logprobs_BT.shape[1])).sum().backward()  # type: ignore[no-untyped-call]
    yield found.logprobs_BT.detach()
    yield found.entropies_BT
    yield from (p.grad for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_in_parts_they_are_those_of_the_logits(kind: str, chunk_tokens: int) -> None:
    """Log-probs to 1e-6; gradients to 1e-5 of the greatest of a tensor."""
    plain = make(kind, **KINDS[kind])
    assert not takes_questions(plain)
    model = prepared(kind, **KINDS[kind])
    expected = list(gradients(plain, 1024, packed=False))
    found = list(gradients(model, chunk_tokens, packed=False))
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert (ours - theirs).abs().max() <= 1e-6
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * max(1e-3, theirs.abs().max().item())


def test_a_model_that_changes_its_logits_otherwise_keeps_them() -> None:
    """Cohere multiplies them: the check notices, and predictions come from the logits."""
    model = make("cohere", logit_scale=0.25)
    predict_within(model)
    assert not check_predictions(model, "cpu")
    assert not takes_questions(model)
    found = list(gradients(model, 3, packed=False))
    expected = list(gradients(make("cohere", logit_scale=0.25), 1024, packed=False))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-6


def test_values_of_a_critic_on_the_last_hidden_states_are_whole() -> None:
    """Those of all tokens, also if the logits are computed one by one."""
    model = prepared("qwen3")
    add_value_head(model)
    torch.nn.init.ones_(model.value_head.weight)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    asked = AskedTokens(token_ids=ids, temperatures=torch.ones(1, 5), chunk_tokens=1)
    with ask(model, asked):
        model(input_ids=ids, use_cache=False)
    values = take_values(model)
    model(input_ids=ids, use_cache=False)
    expected = take_values(model)
    assert values is not None
    assert expected is not None
    assert values.shape == (1, 5)
    assert values.equal(expected)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The greatest number of elements of a tensor that is made within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.elements = max(self.elements, found.numel())
        return found


@pytest.mark.parametrize(("chunk_tokens", "most"), [(4, 4), (64, 64)])
def test_no_tensor_is_as_large_as_the_logits_of_all_tokens(chunk_tokens: int, most: int) -> None:
    """Forward and backward; as a control, with all tokens at a time one is."""
    vocabulary, hidden, tokens = 5000, 8, 64
    head = torch.nn.Linear(hidden, vocabulary, bias=False)

    class Model(torch.nn.Module):
        config = None

        def get_output_embeddings(self) -> torch.nn.Linear:
            return head

    model = Model()
    predict_within(model)
    asked = AskedTokens(
        token_ids=torch.zeros(1, tokens, dtype=torch.int64),
        temperatures=torch.ones(1, tokens),
        chunk_tokens=chunk_tokens,
    )
    with LargestTensor() as largest, ask(model, asked):
        found = head(torch.randn(1, tokens, hidden, requires_grad=True))
        found[..., 0].sum().backward()
    assert largest.elements == max(most * vocabulary, vocabulary * hidden)
