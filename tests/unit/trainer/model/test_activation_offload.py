"""The inputs of blocks leave the device with `activation_offload`, and gradients stay the same."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from services.lib.transformer.load_causal import transformer_blocks
from tests.lib.trainer.support import trainer_config
from tests.unit.trainer.model.test_packing import make
from trainer.model import load_model
from trainer.model.load_model import prepared

REQUIRED = {"run_id": "r", "model": "m", "checkpoint": {"folder": "c"}}
IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])


def held_inputs(model: Any) -> list[weakref.ref[torch.Tensor]]:
    """Of the inputs that the blocks get in the next forward pass."""
    found: list[weakref.ref[torch.Tensor]] = []
    for block in transformer_blocks(model):
        block.register_forward_pre_hook(lambda _, args: found.append(weakref.ref(args[0])))
    return found


def copying(pin_memory: bool) -> saved_tensors_hooks:
    """As `save_on_cpu`, whose copy of a tensor on the host is the tensor itself."""
    assert not pin_memory, "there is no device to copy from"
    return saved_tensors_hooks(torch.Tensor.clone, lambda each: each)


@pytest.mark.parametrize("offload", [True, False])
def test_between_the_passes_no_input_is_kept(
    monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    """But a copy of each; as a control, without it a checkpoint keeps each."""
    monkeypatch.setattr(load_model, "save_on_cpu", copying)
    settings = {"activation_checkpointing": True, "activation_offload": offload}
    model: Any = prepared(make("qwen3"), trainer_config(**REQUIRED, **settings))
    inputs = held_inputs(model)
    loss = model(input_ids=IDS, use_cache=False).logits.sum()
    gc.collect()
    assert [each() is None for each in inputs] == [offload] * len(inputs)
    loss.backward()
    plain = make("qwen3")
    plain(input_ids=IDS, use_cache=False).logits.sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_it_is_refused_without_checkpoints() -> None:
    """And checkpoints are on where it matters."""
    with pytest.raises(ValueError, match="activation_offload is true without"):
        trainer_config(**REQUIRED, activation_offload=True)
    assert trainer_config(**REQUIRED, device="cuda").checkpoints_activations
    assert not trainer_config(**REQUIRED).checkpoints_activations
