"""Published folders are what a rollout engine can load."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer import publish


def test_a_published_folder_loads_and_its_checksums_match(model: Path, tmp_path: Path) -> None:
    """Config, tokenizer and changed weights; every file is described; the marker is there."""
    tensors = {name: value.double() + 0.5 for name, value in weights(model).items()}
    files = publish.write_folder(tmp_path / "v", model, tensors)
    manifest = json.loads((tmp_path / "v/manifest.json").read_text())
    assert [entry["name"] for entry in manifest["files"]] == [file.name for file in files]
    for file in files:
        content = (tmp_path / "v" / file.name).read_bytes()
        assert file.num_bytes == len(content)
        assert file.sha256 == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "v/.complete").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v", local_files_only=True)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.double(), tensors[name])
        assert parameter.dtype == torch.float64
    assert len(AutoTokenizer.from_pretrained(tmp_path / "v", local_files_only=True)) > 0


def test_large_weights_are_split_over_indexed_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of 4 kB the folder has many files, and loads the same."""
    monkeypatch.setattr(publish, "_FILE_BYTES", 4096)
    tensors = weights(model)
    files = publish.write_folder(tmp_path, model, tensors)
    assert sum(file.name.endswith(".safetensors") for file in files) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, tensors[name])


def weights(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of the test model."""
    return load_file(model / "model.safetensors")
