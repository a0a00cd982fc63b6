"""Published weights have the names and shapes of the checkpoint that a run started from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.suites.models.architectures import ARCHITECTURES
from trainer.model.load_model import checkpoint_tensors


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "gpt-neox", "qwen3-moe", "gpt2"])
def test_tensors_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    """Bit for bit; a tied head may be given besides."""
    ARCHITECTURES[name].make(tmp_path, 0)
    saved = load_file(tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = checkpoint_tensors(model, model.state_dict())
    assert set(found) - set(saved) <= {"lm_head.weight"}
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    assert all(tensor.is_contiguous() for tensor in found.values())
