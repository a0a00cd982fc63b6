"""A model folder is usable, or the error names what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.torch.torch_engine import TorchEngine
from rollout.server.engines.torch.transformers_model import load_model
from tests.lib.rollout.server.support import save_model


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (("config.json",), "no config.json"),
        (("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
        (("model.safetensors",), "no .*safetensors"),
    ],
)
def test_missing_part_of_a_folder_is_named(
    tmp_path: Path, gone: tuple[str, ...], named: str
) -> None:
    """A folder without config, tokenizer or weights is refused before anything is loaded."""
    folder = save_model(tmp_path / "model")
    for name in gone:
        (folder / name).unlink()
    with pytest.raises(ValueError, match=named):
        TorchEngine(RolloutServerConfig(model=folder))


def test_missing_folder_is_named(tmp_path: Path) -> None:
    """A path that does not exist is refused by name."""
    with pytest.raises(ValueError, match=r"absent: no such folder"):
        TorchEngine(RolloutServerConfig(model=tmp_path / "absent"))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """An index that names an absent shard is refused with the shard's name."""
    folder = save_model(tmp_path / "model")
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        TorchEngine(RolloutServerConfig(model=folder))


async def test_load_error_is_raised_by_start(tmp_path: Path) -> None:
    """What only loading can detect is raised by `start`, as a ValueError naming the folder."""
    folder = save_model(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ValueError, match=r"config\.json cannot be used"):
        await TorchEngine(RolloutServerConfig(model=folder)).start()


@pytest.mark.parametrize(
    ("edit", "max_context", "named"),
    [
        ({}, 513, "max_context is 513.*512"),
        ({"use_sliding_window": True, "sliding_window": 100, "layer_types": None}, 101, "96"),
        ({"layer_types": ["full_attention", "linear_attention"]}, None, "linear_attention"),
    ],
)
def test_unservable_configuration_is_named(
    tmp_path: Path, edit: dict[str, object], max_context: int | None, named: str
) -> None:
    """A context past the model's, and layers the slots cannot hold, are refused by name."""
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= edit | {"max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=named):
        load_model(folder, 2, max_context)


def test_end_ids_are_those_of_all_settings(tmp_path: Path) -> None:
    """Of generation_config.json, config.json and the tokenizer together."""
    folder = save_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 9]}))
    assert load_model(folder, 2).eos_token_ids == (1, 4, 9)
