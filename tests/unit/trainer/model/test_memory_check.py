"""A model whose state cannot fit is refused before its weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.size.model_shapes import MODELS
from tests.lib.trainer.support import trainer_config
from trainer.model.load_model import master_type
from trainer.model.load_sharded import check_memory, state_bytes
from trainer.model.load_slices import empty_causal
from trainer.model.lora import add_adapter

REQUIRED = {"run_id": "r", "checkpoint": {"folder": "c"}}


def settings(folder: Path, **more: Any) -> Any:
    """Of a trainer of Qwen3-32B, whose folder lacks the weights."""
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3-32b"]))
    return trainer_config(**REQUIRED, model=folder, dtype="bfloat16", **more)


def test_what_cannot_fit_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2 ranks of this machine; as a control, 1/10,000 of it fits."""
    config = settings(tmp_path)
    model = empty_causal(tmp_path, master_type(config))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"262\.1 GB on each of 2 ranks, .*its 2 ranks, has"):
        check_memory([model], config, 2)
    check_memory([model], config, 10_000)


def test_what_is_not_trained_has_no_gradient_and_no_moments(tmp_path: Path) -> None:
    """A quarter of the bytes, but for the adapter."""
    config = settings(tmp_path, lora__rank=8)
    model = empty_causal(tmp_path, master_type(config))
    whole = state_bytes([model])
    add_adapter(model, config)
    assert whole / 4 < state_bytes([model]) < whole / 3.9
