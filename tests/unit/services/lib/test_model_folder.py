"""What is refused before a process starts, and what is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.lib.model_files.model_folder import (
    check_chat_template,
    check_model_folder,
)
from services.lib.model_files.weight_headers import weight_files


def make_folder(folder: Path, **config: Any) -> Path:
    """A folder with all that the checks look at."""
    folder.mkdir()
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["XForCausalLM"], **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_a_whole_model_is_accepted(tmp_path: Path) -> None:
    """Also one of several shards, and one that does not name its architecture."""
    folder = make_folder(tmp_path / "one")
    check_model_folder(folder)
    check_chat_template(folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_model_folder(folder)
    assert [file.name for file in weight_files(folder)] == ["model-1.safetensors"]
    check_model_folder(make_folder(tmp_path / "two", architectures=None))
    check_model_folder(make_folder(tmp_path / "gpt2", architectures=["GPT2LMHeadModel"]))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "is BertForMaskedLM, not a causal language model"),
        ({"architectures": ["BertLMHeadModel"]}, "not a causal language model"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        ({"is_encoder_decoder": True}, "not a causal language model"),
        ({"auto_map": {"AutoModel": "m.M"}}, "needs code of its own"),
    ],
)
def test_another_kind_of_model_is_refused(
    tmp_path: Path, config: dict[str, Any], problem: str
) -> None:
    """The architecture is named."""
    with pytest.raises(ValueError, match=problem):
        check_model_folder(make_folder(tmp_path / "model", **config))


def _shorten(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def _make_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def _forget_a_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_shorten, "model.safetensors has .* bytes and should have .* cut short"),
        (lambda f: (f / "model.safetensors").write_bytes(b"garbage"), "or damaged"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "or damaged"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickle files"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (_make_adapter, "is an adapter without its model"),
        (_forget_a_shard, "names model-2.safetensors, which is not there"),
    ],
)
def test_a_damaged_folder_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], problem: str
) -> None:
    """One line names folder, defect and cure; undamaged it is accepted."""
    folder = make_folder(tmp_path / "model")
    check_model_folder(folder)
    damage(folder)
    with pytest.raises(ValueError, match=problem) as raised:
        check_model_folder(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_model_without_chat_template_is_refused(tmp_path: Path) -> None:
    """A template in the tokenizer's settings counts as one."""
    folder = make_folder(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"has no chat template.*chat_template\.jinja"):
        check_chat_template(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check_chat_template(folder)
