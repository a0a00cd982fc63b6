"""Routed experts are replayed: the models choose what was recorded, and compute the rest."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from services.lib.transformer.can_pack import can_pack
from services.lib.transformer.load_causal import transformer_blocks
from services.lib.transformer.packing import Packing
from services.lib.transformer.routers import prepare_routers, recording
from tests.lib.trainer.model.whole_rows import whole_rows
from tests.suites.field.tiny_models import make_config, make_model
from trainer.data.micro_batch import MicroBatch
from trainer.model.load_model import _checkpoint_activations
from trainer.policy.forward import forward
from trainer.policy.model_input import routed_experts

_LAYERS, _CHOSEN, _EXPERTS, _NONE = 2, 2, 8, 255
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": _GROUPS,  # its first layer is dense
    "glm4_moe": _GROUPS,
}
ROWS = [[3, 9, 4, 7, 7, 2], [3, 9, 4, 1, 5], [8, 8, 6, 2, 4, 9]]


def model_of(family: str) -> nn.Module:
    """A tiny model, whose routers are prepared."""
    model = make_model(make_config(family, **FAMILIES[family]))
    assert prepare_routers(model) == (_LAYERS, _CHOSEN, _EXPERTS)
    return model


def own_choices(model: nn.Module, batch: MicroBatch) -> NDArray[np.uint8]:
    """What the routers choose by themselves, as records of the tokens after each."""
    shape = batch.token_ids_BT.shape
    experts = np.full((*shape, _LAYERS, _CHOSEN), _NONE, np.uint8)

    def take(layer: int, chosen_nk: torch.Tensor) -> None:
        experts[:, 1:, layer] = chosen_nk.view(*shape, -1)[:, :-1].numpy()

    with torch.no_grad(), recording(take):
        forward(model, batch, "cpu", packed=False)
    experts[np.arange(shape[1]) >= batch.lengths_B[:, None]] = _NONE
    return experts


def moved(experts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Other experts wherever some are recorded."""
    return np.where(experts == _NONE, _NONE, (experts + 1) % _EXPERTS).astype(np.uint8)


def loss_of(model: nn.Module, batch: MicroBatch, *, packed: bool) -> torch.Tensor:
    """The sum of the log-probs of all tokens."""
    logprobs = forward(model, batch, "cpu", packed=packed).logprobs_BT
    return (logprobs * torch.from_numpy(batch.loss_mask_BT[:, 1:])).sum()


def gradients(model: nn.Module, batch: MicroBatch, *, packed: bool) -> dict[str, torch.Tensor]:
    """The loss and its gradients by name."""
    model.zero_grad()
    loss = loss_of(model, batch, packed=packed)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "loss": loss.detach()}


def equal(ones: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(ones[name], others[name]) for name in ones)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_choices_are_the_same_bit_for_bit_and_others_are_not(family: str) -> None:
    """Loss and all gradients; routers still get theirs when others chose."""
    model, batch = model_of(family), whole_rows(ROWS)
    plain, own = gradients(model, batch, packed=False), own_choices(model, batch)
    replayed = gradients(model, replace(batch, routed_experts_BTLK=own), packed=False)
    assert equal(plain, replayed)
    other = gradients(model, replace(batch, routed_experts_BTLK=moved(own)), packed=False)
    assert (other["loss"] - plain["loss"]).abs() > 1e-3  # negative control
    (name,) = {n for n in plain if n.endswith(("1.mlp.gate.weight", "1.mlp.router.weight"))} or {
        n for n in plain if n.endswith("1.block_sparse_moe.router.weight")
    }
    assert other[name].abs().sum() > 0
    assert not torch.equal(other[name], plain[name])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_packed_rows_replay_each_distinct_token(family: str) -> None:
    """As padded rows do, within float32, of other choices too."""
    model, batch = model_of(family), whole_rows(ROWS)
    given = replace(batch, routed_experts_BTLK=moved(own_choices(model, batch)))
    padded = gradients(model, given, packed=False)
    assert can_pack(model)
    packed = gradients(model, given, packed=True)
    assert (packed["loss"] - padded["loss"]).abs() <= 1e-6 * padded["loss"].abs()
    for name in padded:
        error = (packed[name] - padded[name]).norm() / padded[name].norm().clamp(min=1e-3)
        assert error <= 1e-5, name


def test_the_first_row_with_a_record_counts_for_a_shared_token() -> None:
    """And a row without one leaves it to the others."""
    batch = whole_rows(ROWS[:2])
    experts = np.full((*batch.token_ids_BT.shape, 1, 1), _NONE, np.uint8)
    experts[0, 1:, 0, 0] = [1, _NONE, 3, 4, 5]
    experts[1, 1:5, 0, 0] = [6, 7, _NONE, 2]
    packing = Packing.of(batch.token_ids_BT, batch.lengths_B, "cpu")
    found = routed_experts(replace(batch, routed_experts_BTLK=experts), packing, "cpu")
    assert found is not None
    places = packing.places_BT
    assert found[places[0], 0, 0].tolist() == [1, 7, 3, 4, 5, -1]
    assert found[places[1, :5], 0, 0].tolist() == [1, 7, 3, 2, -1]


def test_tokens_without_a_record_are_routed_freely() -> None:
    """Nothing recorded is the plain pass; half of it differs from both."""
    model, batch = model_of("qwen3_moe"), whole_rows(ROWS)
    plain, other = gradients(model, batch, packed=False), moved(own_choices(model, batch))
    nothing = np.full_like(other, _NONE)
    assert equal(plain, gradients(model, replace(batch, routed_experts_BTLK=nothing), packed=False))
    half = other.copy()
    half[:, ::2] = _NONE
    losses = {
        float(gradients(model, replace(batch, routed_experts_BTLK=each), packed=False)["loss"])
        for each in (nothing, half, other)
    }
    assert len(losses) == 3


def test_the_recomputation_replays_what_its_own_pass_did() -> None:
    """Activation checkpointing: passes of other micro-batches come between, and another thread
    computes backward, as on a GPU."""
    model, batch = model_of("qwen3_moe"), whole_rows(ROWS)
    own = own_choices(model, batch)
    batches = [replace(batch, routed_experts_BTLK=each) for each in (own, moved(own), None)]
    expected = [gradients(model, each, packed=False) for each in batches]
    for block in transformer_blocks(model):
        _checkpoint_activations(block, None)
    losses = [loss_of(model, each, packed=False) for each in batches]
    for loss, wanted in zip(losses, expected, strict=True):
        model.zero_grad()
        backward = threading.Thread(target=loss.backward)
        backward.start()
        backward.join()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert equal(found, wanted)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", "LlamaForCausalLM has no module that routes"),
        ("phimoe", r"PhimoeForCausalLM has routers \(PhimoeTopKRouter\) that do not choose"),
    ],
)
def test_models_that_cannot_replay_are_named(family: str, reason: str) -> None:
    """Dense ones, and routers that choose in another way."""
    settings = {"num_local_experts": 8, "num_experts_per_tok": 2} if family == "phimoe" else {}
    with pytest.raises(ValueError, match=reason):
        prepare_routers(make_model(make_config(family, **settings)))


def test_routers_are_tried_before_they_have_memory() -> None:
    """As those of models that are loaded shard by shard."""
    with torch.device("meta"):
        model = partial(make_model, make_config("qwen3_moe", **FAMILIES["qwen3_moe"]))()
    assert prepare_routers(model) == (_LAYERS, _CHOSEN, _EXPERTS)
