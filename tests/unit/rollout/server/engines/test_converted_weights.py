"""Checkpoints that name and split their weights otherwise than the modules of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from rollout.server.engines.engine import WeightsError
from rollout.server.engines.sglang.model_shapes import ModelFolder
from rollout.server.engines.torch.weight_reader import (
    has_module_names,
    load_converted,
    storages,
)
from services.lib.transformer.load_causal import load_causal
from tests.lib.trainer.model.mxfp4_folder import mxfp4_folder
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


def test_experts_in_mxfp4_are_read_as_numbers(tmp_path: Path) -> None:
    """As transformers reads them by itself; SGLang, which would keep them so, is refused."""
    ARCHITECTURES["gpt-oss"].make(tmp_path / "plain", 0)
    folder = mxfp4_folder(tmp_path / "plain", tmp_path / "mxfp4")
    expected = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    ).state_dict()
    names = storages(load_causal(folder, torch.float32).state_dict())
    assert not has_module_names(folder, names)
    found = load_converted(folder, names, torch.float32)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(ValueError, match="give a folder in bfloat16"):
        ModelFolder(folder)
