"""Checkpoints that name and split their weights otherwise than the modules of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout.server.engines.engine import WeightsError
from rollout.server.engines.torch.converted_weights import has_module_names, load_converted
from rollout.server.engines.torch.safetensors_reader import storages
from tests.suites.models.architectures import ARCHITECTURES


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "gpt-neox"])
def test_weights_are_read_as_the_modules_have_them(tmp_path: Path, name: str) -> None:
    """Equal to those of the model itself; a folder that lacks one is refused by its name."""
    ARCHITECTURES[name].make(tmp_path, 0)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    names = storages(expected)
    assert not has_module_names(tmp_path, names)
    found = load_converted(tmp_path, names, torch.float32)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if "embed_in" in name or "embed_tokens" in name)
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=f"has no {gone}"):
        load_converted(tmp_path, names, torch.float32)
