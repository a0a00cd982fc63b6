"""Settings take the memory that they say, and the state of a rank is the closed form."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.size.small_models import KINDS
from rollout.server.config import RolloutServerConfig
from tests.lib.trainer.support import trainer_config
from tools.plan.cures import find_cures
from tools.plan.run_shape import Lengths, RunShape
from tools.plan.training_count import (
    ACTIVATIONS,
    LOGITS,
    OPTIMIZER,
    WEIGHTS,
    TrainingCount,
    count_training,
)
from trainer.config.operation import BatchConfig

RANKS = 2
SIZE = {
    "vocab_size": 500,
    "hidden_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of models: each has a folder in it."""
    return tmp_path_factory.mktemp("models")


def model_folder(folder: Path, kind: str) -> Path:
    """That of a small model, which is a config.json alone."""
    made = folder / kind
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps({**SIZE, **KINDS[kind]}))
    return made


@functools.cache
def count(
    folder: Path, kind: str = "tied", *, ranks: int = RANKS, **settings: object
) -> TrainingCount:
    """Of a small model; each count is made once."""
    model = model_folder(folder, kind)
    config = trainer_config(
        run_id="r",
        model=model,
        checkpoint__folder=model,
        **{"batch__micro_batch_tokens": 128, "dtype": "bfloat16", **settings},
    )
    return count_training(config, ranks=ranks, rollout_tokens=64, prompt_tokens=16)


def test_each_setting_takes_what_it_says(folder: Path) -> None:
    """Counted again with it; the control is the count without."""
    plain = count(folder)
    again = count(folder, activation_checkpointing=True)
    assert again.by_part[ACTIVATIONS] < plain.by_part[ACTIVATIONS] / 2
    assert again.flops > plain.flops
    offloaded = count(folder, activation_checkpointing=True, activation_offload=True)
    assert offloaded.device_bytes < again.device_bytes
    assert offloaded.host_bytes > again.host_bytes == 0
    halves = count(folder, ranks=2 * RANKS)
    assert halves.by_part[WEIGHTS] == plain.by_part[WEIGHTS] / 2
    few = count(folder, batch__logit_tokens=16)
    assert few.by_part[LOGITS] < plain.by_part[LOGITS]


@pytest.mark.long(short="tests/integration/tools/plan/test_training_count.py")
def test_ranks_of_a_context_group_have_a_slice_each(folder: Path) -> None:
    """Activations and operations halve; exchanges are counted.

    In each of 7 blocks 128 tokens go forward, forward again and back, in bfloat16 and with 2 heads
    of 16 values each of queries, keys (repeated), values (repeated) and outputs: half of them to
    the other rank, half of the tokens from this one.
    """
    alone = count(folder, activation_checkpointing=True)
    settings: dict[str, Any] = {"activation_checkpointing": True, "context_parallel": 2}
    shared = count(folder, **settings)
    assert shared.by_part[ACTIVATIONS] < 0.6 * alone.by_part[ACTIVATIONS]
    assert shared.by_part[WEIGHTS] == alone.by_part[WEIGHTS]
    assert shared.flops == pytest.approx(alone.flops / 2, rel=0.05)
    assert shared.tokens == alone.tokens
    assert alone.exchanged_bytes == 0
    assert shared.exchanged_bytes == 7 * 3 * (64 * 4 * 2 * 16 * 2) / 2


@pytest.mark.long(short="tests/integration/tools/plan/test_training_count.py")
def test_what_saves_is_a_cure_as_far_as_model_and_ranks_allow(folder: Path) -> None:
    """Four ranks and two heads: pairs. The other settings that save activations are there."""
    settings: dict[str, Any] = {"activation_checkpointing": True, "activation_offload": True}
    first = count(folder, ranks=4, **settings)
    model = model_folder(folder, "tied")
    trainer = trainer_config(
        run_id="r", model=model, checkpoint__folder=model, dtype="bfloat16", **settings
    )
    lengths = Lengths(longest=64, mean=64, prompt=16)
    shape = RunShape(
        trainer=trainer.model_copy(update={"batch": BatchConfig(micro_batch_tokens=128)}),
        rollout=RolloutServerConfig(),
        nodes=(("train",),),
        trainer_nodes=1,
        ranks_per_node=4,
        group_size=1,
        groups_per_step=1,
        max_staleness=0,
        lengths=lengths,
    )
    found = find_cures(shape, first, 1, _counted)
    assert found.settings["trainer.context_parallel"] == "2"
    assert "trainer.lora.rank" in found.settings
    assert found.count.by_part[ACTIVATIONS] < first.by_part[ACTIVATIONS]


def _counted(shape: RunShape) -> TrainingCount:
    return count_training(shape.trainer, ranks=shape.ranks, rollout_tokens=64, prompt_tokens=16)


def test_what_cannot_be_shared_is_named(folder: Path) -> None:
    """As the trainer names it."""
    with pytest.raises(ValueError, match="has 2 attention heads"):
        count(folder, ranks=4, context_parallel=4)
    with pytest.raises(ValueError, match="of 3 ranks: give a divisor"):
        count(folder, ranks=3, context_parallel=2)


def test_state_is_the_closed_form(folder: Path) -> None:
    """4 bytes for a weight, 8 for AdamW, over the ranks; none where the host has them.

    What ranks share is all that more ranks change.
    """
    plain = count(folder)
    assert plain.by_part[WEIGHTS] == 4 * plain.parameters / RANKS
    assert plain.by_part[OPTIMIZER] == pytest.approx(8 * plain.trained / RANKS, rel=0.01)
    parts = (WEIGHTS, OPTIMIZER, ACTIVATIONS, LOGITS)
    doubled, halves = plain.shared_by(2), count(folder, ranks=2 * RANKS)
    for part in parts:
        assert doubled.by_part[part] == pytest.approx(halves.by_part[part], rel=0.01)
    hosted = count(folder, cpu_offload=True)
    assert (hosted.by_part[WEIGHTS], hosted.by_part[OPTIMIZER]) == (0, 0)
    assert hosted.host_bytes >= 16 * plain.parameters / RANKS
