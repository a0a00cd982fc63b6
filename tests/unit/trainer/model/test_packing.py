"""Packed rows are computed as if each were alone, and what they share once."""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.lib.transformer.can_pack import can_pack
from services.lib.transformer.packing import Packing
from services.lib.transformer.row_attention import packed_attention, sdpa_rows
from tests.lib.trainer.model.whole_rows import whole_rows
from tests.lib.trainer.ranks.whole_run import run
from tests.lib.trainer.support import JOB_CONFIG, trainer_config
from trainer.data.micro_batch import MicroBatch
from trainer.model.critic import add_value_head
from trainer.policy.forward import forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel


VOCABULARY, HIDDEN = 16, 16


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


ROUNDING = 2e-6
"""Most architectures normalise in float32, whatever the rest is computed in."""


PACKED = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gpt2": {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4},
}


WITH_EXPERTS = {"mixtral": 1e-4, "gpt_oss": 1e-5}
"""Their differences in float32, as the kernel of experts has no float64."""


PADDED = {
    "gemma2": {"query_pre_attn_scalar": 8},  # caps its attention's logits
    "bloom": {"n_layer": 2, "n_head": 2},  # its attention is its own
    "mamba": {"state_size": 4},  # carries a state along the sequence
}


def make(kind: str, **extra: Any) -> PreTrainedModel:
    """A tiny model of an architecture, in float64 if it can be."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **extra})
    model = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    return model if kind in WITH_EXPERTS else model.double()


def batch_of(rows: list[list[int]], seed: int = 0) -> MicroBatch:
    """Rows of tokens; of each but the first it is random whether its loss counts."""
    rng, batch = np.random.default_rng(seed), whole_rows(rows)
    for row, ids in enumerate(rows):
        batch.loss_mask_BT[row, 1 : len(ids)] = rng.random(len(ids) - 1) < 0.7
    temperatures_BT = rng.uniform(0.5, 1.5, batch.token_ids_BT.shape).astype(np.float32)
    return replace(batch, temperatures_BT=temperatures_BT)


def random_rows(seed: int) -> list[list[int]]:
    """A group with a prompt in common, one with an answer twice, one that is alone; some zeros."""
    rng = np.random.default_rng(seed)
    answers = [rng.integers(0, VOCABULARY, size).tolist() for size in (3, 17, 1, 9, 2, 30, 5)]
    prompt, other = [3, 0, 5, 0, 7], [3, 0, 5, 1]
    rows = [prompt + answer for answer in answers[:4]]
    return [*rows, other + answers[4], other + answers[4], answers[5], answers[6] + [0, 0]]


def gradients(model: torch.nn.Module, batch: MicroBatch, packed: bool) -> dict[str, torch.Tensor]:
    """Of a sum over what counts in which every token weighs differently, and what it was."""
    model.zero_grad()
    found = forward(model, batch, "cpu", packed=packed)
    mask_BT = torch.from_numpy(batch.loss_mask_BT[:, 1:])
    weights_BT = torch.linspace(0.5, 1.5, mask_BT.numel(), dtype=torch.float64).view(mask_BT.shape)
    terms_BT = found.logprobs_BT * weights_BT
    if found.values_BT is not None:
        terms_BT = terms_BT + (found.values_BT[:, :-1] - 1).square() * weights_BT
    (terms_BT * mask_BT).sum().backward()  # type: ignore[no-untyped-call]
    kept = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**kept, "logprobs": found.logprobs_BT.detach() * mask_BT}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The greatest, relative to the greatest of each tensor."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max() / one[name].abs().max().clamp(min=1e-9))
        for name in one
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(kind: str, seed: int) -> None:
    """Of many architectures, to rounding; prompts and answers in common are computed once."""
    model, batch = make(kind, **PACKED[kind]), batch_of(random_rows(seed), seed)
    expected = gradients(model, batch, packed=False)
    assert can_pack(model)
    found = gradients(model, batch, packed=True)
    assert difference(expected, found) < WITH_EXPERTS.get(kind, ROUNDING)


def test_sinks_are_trained_in_packed_rows() -> None:
    """The test above compares their gradient with that of transformers' own attention."""
    model, batch = make("gpt_oss", **PACKED["gpt_oss"]), batch_of(random_rows(0))
    assert can_pack(model)
    assert model.config._attn_implementation != "eager"
    found = gradients(model, batch, packed=True)
    sinks = [value for name, value in found.items() if name.endswith("sinks")]
    assert len(sinks) == 2
    assert all(each.abs().min() > 0.1 for each in sinks)


def test_a_critic_sees_the_same_packed_or_padded() -> None:
    """Values and their gradients, into the head and into the model."""
    model, batch = make("qwen3"), batch_of(random_rows(0))
    add_value_head(model)
    torch.nn.init.normal_(model.get_parameter("value_head.weight"))
    expected = gradients(model, batch, packed=False)
    assert expected["value_head.weight"].abs().max() > 0
    assert can_pack(model)
    assert difference(expected, gradients(model, batch, packed=True)) < ROUNDING


def test_values_after_the_last_tokens_are_the_same_packed_or_padded() -> None:
    """Of the rows whose values count, beside log-probs that do not change."""
    model, batch = make("qwen3"), batch_of(random_rows(0))
    add_value_head(model)
    torch.nn.init.normal_(model.get_parameter("value_head.weight"))
    rows = np.arange(0, len(batch.lengths_B), 2)
    batch.bootstrap_B[rows] = True
    with torch.no_grad():
        padded = forward(model, batch, "cpu", packed=False)
        assert can_pack(model)
        packed = forward(model, batch, "cpu", packed=True)
    assert padded.values_BT is not None
    assert packed.values_BT is not None
    ends = rows, batch.lengths_B[rows] - 1
    assert packed.values_BT[ends].abs().min() > 0
    torch.testing.assert_close(padded.values_BT[ends], packed.values_BT[ends])
    mask_BT = torch.from_numpy(batch.loss_mask_BT[:, 1:])
    torch.testing.assert_close(padded.logprobs_BT * mask_BT, packed.logprobs_BT * mask_BT)


@pytest.mark.parametrize("kind", PADDED)
def test_models_that_cannot_be_packed_are_padded(kind: str) -> None:
    """They are recognised by their declaration, and still work."""
    model, batch = make(kind, **PADDED[kind]), batch_of(random_rows(0))
    assert not can_pack(model)
    assert forward(model, batch, "cpu", packed=False).num_tokens == batch.token_ids_BT.size


def test_a_model_that_claims_too_much_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the trial: attention that ignores rows is rejected."""
    model = make("qwen3")
    rows = sdpa_rows._rows
    monkeypatch.setattr(sdpa_rows, "_rows", lambda states, places: rows(states, places.flip(1)))
    assert not can_pack(model)
    monkeypatch.undo()
    assert can_pack(model)


def test_a_model_that_computes_no_numbers_is_padded() -> None:
    """As before it was tried: a difference that is no number is no small one."""
    model = make("qwen3")
    before = model.config._attn_implementation
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))  # type: ignore[no-untyped-call]
    assert not can_pack(model)
    assert model.config._attn_implementation == before


def test_a_kernel_that_is_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By padded rows, where it gives other results or the model cannot be packed."""
    assert can_pack(make("qwen3"), attention="sdpa")
    with pytest.raises(ValueError, match="'sdpa', with which BloomForCausalLM does not compute"):
        can_pack(make("bloom", **PADDED["bloom"]), attention="sdpa")
    rows = sdpa_rows._rows
    monkeypatch.setattr(sdpa_rows, "_rows", lambda states, places: rows(states, places.flip(1)))
    with pytest.raises(ValueError, match="'sdpa', with which Qwen3ForCausalLM does not compute"):
        can_pack(make("qwen3"), attention="sdpa")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch__packing": False}, "attention is 'varlen' with batch.packing false"),
        ({}, "'varlen' with device 'cuda' and dtype 'float32': it needs"),
        ({"device": "cpu", "dtype": "bfloat16"}, "'varlen' with device 'cpu'"),
    ],
)
def test_a_kernel_that_cannot_be_there_is_refused_at_the_start(
    given: dict[str, object], message: str
) -> None:
    """Before a model is loaded; the control is what it needs."""
    values = {"run_id": "r", "model": "m", "checkpoint__folder": "c", "device": "cuda"}
    trainer_config(**values, attention="varlen", dtype="bfloat16")
    with pytest.raises(ValueError, match=message):
        trainer_config(**{**values, **given}, attention="varlen")


def test_tokens_in_common_are_computed_once() -> None:
    """Eight answers to a prompt: the prompt counts once, padding not at all."""
    prompt = list(range(10))
    rows = [[*prompt, answer, *[1] * answer] for answer in range(8)]
    batch = batch_of(rows)
    model = make("qwen3")
    assert can_pack(model)
    assert forward(model, batch, "cpu", packed=True).num_tokens == 10 + sum(range(1, 9))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12))
def test_a_packing_spells_every_row(rows: list[list[int]]) -> None:
    """Each token at its place with its position, each prefix once, all found again."""
    batch = batch_of(rows)
    packing = Packing.of(batch.token_ids_BT, batch.lengths_B, "cpu")
    for row, ids in enumerate(rows):
        places = packing.places_BT[row, : len(ids)]
        assert packing.token_ids_U[places].tolist() == ids
        assert packing.positions_U[places].tolist() == list(range(len(ids)))
    prefixes = {tuple(ids[:end]) for ids in rows for end in range(1, len(ids) + 1)}
    assert len(packing.token_ids_U) == len(prefixes)
    ends = torch.cat([bucket.flatten() for bucket in packing.buckets])
    assert ends[packing.found_U].tolist() == list(range(len(prefixes)))


def test_checkpointed_activations_are_computed_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block twice: on the way and on the way back."""
    calls: list[str] = []
    attention = packed_attention._attention

    def counted(module: torch.nn.Module, *given: Any, **named: Any) -> Any:
        calls.append(type(module).__name__)
        return attention(module, *given, **named)

    monkeypatch.setattr(packed_attention, "_attention", counted)
    passes = {}
    for name, setting in (("plain", {}), ("again", {"activation_checkpointing": True})):
        calls.clear()
        run(1, model, tmp_path / name, steps=[1], config={**JOB_CONFIG, **setting})
        passes[name] = len(calls)
    tried = 4  # blocks, when the model was loaded: its own, and those of a small one
    assert passes["again"] - tried == 2 * (passes["plain"] - tried) > 0


def packing(folder: Path) -> list[float]:
    """Tokens of sequences for each that was computed, of each step."""
    return [metrics["packing"] for metrics in json.loads((folder / "metrics.json").read_text())]
