"""A gpt-oss in mxfp4, as it is released: read as transformers reads it, published as bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from services.lib.model_files.model_folder import check_model_folder
from services.lib.transformer.load_causal import load_causal
from tests.integration.trainer.model.test_load_slices import rows_of
from tests.lib.trainer.model.mxfp4_folder import mxfp4_folder
from tests.suites.models.architectures import ARCHITECTURES
from trainer.model.load_model import checkpoint_tensors
from trainer.publish.weight_folder import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random experts."""
    base = tmp_path_factory.mktemp("mxfp4")
    ARCHITECTURES["gpt-oss"].make(base / "plain", seed=1)
    return mxfp4_folder(base / "plain", base / "mxfp4")


def test_slices_and_whole_models_are_what_transformers_dequantizes(folder: Path) -> None:
    """To the last bit, of one rank and of three; nothing is left of the quantization."""
    check_model_folder(folder)
    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    parameters = dict(expected.named_parameters())
    experts = [each for name, each in parameters.items() if name.endswith("down_proj")]
    assert all(each.abs().max() > 0 for each in experts)
    for num_parts in (1, 3):
        parts = [rows_of(folder, part, num_parts) for part in range(num_parts)]
        assert parts[0][1].keys() == parameters.keys()
        for name, tensor in parameters.items():
            assert torch.cat([part[name] for _, part in parts]).equal(tensor.detach()), name
    loaded = load_causal(folder, torch.float32)
    for name, tensor in loaded.named_parameters():
        assert tensor.equal(parameters[name]), name


def test_the_published_folder_is_that_of_plain_numbers(folder: Path, tmp_path: Path) -> None:
    """It loads without a word of mxfp4, with the same weights."""
    whole, held = rows_of(folder, 0, 1)
    tensors = checkpoint_tensors(whole, {n: each.bfloat16() for n, each in held.items()})
    write_folder(tmp_path / "published", folder, tensors)
    assert "quantization_config" not in json.loads((tmp_path / "published/config.json").read_text())
    check_model_folder(tmp_path / "published")
    published = load_causal(tmp_path / "published", torch.float32)
    for name, tensor in published.named_parameters():
        assert tensor.equal(held[name].bfloat16().float()), name


def test_other_types_beside_the_experts_are_refused(folder: Path, tmp_path: Path) -> None:
    """And mxfp4 of another model."""
    other = mxfp4_folder(folder.parent / "plain", tmp_path / "llama")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_moe"}))
    with pytest.raises(ValueError, match="is quantized by mxfp4"):
        check_model_folder(other)
