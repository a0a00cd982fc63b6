"""Recorded experts are replayed alike by every backend, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lib.trainer.ranks.whole_run import greatest_difference, losses, run
from tests.lib.trainer.support import JOB_CONFIG, VOCABULARY, make_model
from tests.suites.field.tiny_models import make_config
from tests.suites.field.tiny_models import make_model as model_of

STEPS = [1, 2]
FLOAT32 = {**JOB_CONFIG, "dtype": "float32"}  # the kernel of experts has no float64
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of eight experts, of which a token passes two."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": VOCABULARY}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), VOCABULARY - 1)
    folder = make_model(tmp_path_factory.mktemp("experts"))  # its tokenizer
    model_of(make_config("qwen3_moe", **sizes, **ids)).save_pretrained(folder)  # type: ignore[operator]
    return folder


@pytest.fixture(scope="module")
def alone(experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, packed."""
    return run(1, experts, tmp_path_factory.mktemp("alone"), steps=STEPS, config=FLOAT32)


@pytest.mark.parametrize(
    ("ranks", "setting"),
    [
        (2, {"activation_checkpointing": True}),
        (2, {"backend": "pipeline", "activation_checkpointing": True}),
        (1, {"batch__packing": False}),
    ],
    ids=str,
)
def test_backends_replay_alike(
    experts: Path, alone: Path, tmp_path: Path, ranks: int, setting: dict[str, Any]
) -> None:
    """Losses and weights of two steps, to rounding."""
    other = run(ranks, experts, tmp_path, steps=STEPS, config={**FLOAT32, **setting})
    assert losses(other) == pytest.approx(losses(alone), abs=ROUNDING)
    assert greatest_difference(other, alone) < ROUNDING


def test_without_replay_the_losses_are_others(experts: Path, alone: Path, tmp_path: Path) -> None:
    """Negative control."""
    setting = {**FLOAT32, "batch__replay_routed_experts": False}
    assert losses(run(1, experts, tmp_path, steps=[1], config=setting))[0] != pytest.approx(
        losses(alone)[0], abs=1e-3
    )
