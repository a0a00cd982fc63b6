"""What groups of ranks cannot compute is refused before the first step, with the cure."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.lib.trainer.support import trainer_config
from tests.unit.trainer.model.test_packing import make
from trainer.model.context_ranks import check_heads, check_packed, check_ranks

MODEL = {"run_id": "r", "model": "m", "checkpoint__folder": "c"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch__packing": False}, "is 2 with batch.packing false.*set batch.packing to true"),
        ({"backend": "pipeline"}, "context_parallel is 2 with backend 'pipeline'"),
    ],
)
def test_settings_that_exclude_each_other_are_named(
    settings: dict[str, object], message: str
) -> None:
    """Padded rows and pipelines are computed by one rank alone."""
    assert trainer_config(**MODEL, **settings).context_parallel == 1
    with pytest.raises(ValidationError, match=message):
        trainer_config(**MODEL, **settings, context_parallel=2)


def test_groups_share_the_ranks_of_a_replica_evenly() -> None:
    """Eight ranks in two replicas take groups of two and four, not of three or eight."""
    for size in (1, 2, 4):
        check_ranks(size, 2, 8)
    for size in (3, 8):
        with pytest.raises(ValueError, match=f"is {size} and a replica has 4 of 8 ranks"):
            check_ranks(size, 2, 8)


def test_groups_share_the_query_heads_evenly() -> None:
    """Heads of keys are repeated, those of queries are not."""
    model = make("qwen3", num_attention_heads=6)
    check_heads(model, 3)
    with pytest.raises(ValueError, match="is 4 and Qwen3ForCausalLM has 6 attention heads"):
        check_heads(model, 4)


def test_a_model_that_is_padded_is_refused() -> None:
    """By its name."""
    model = make("bloom", n_layer=2, n_head=2)
    check_packed(model, 1, packed=False)
    with pytest.raises(ValueError, match="BloomForCausalLM cannot compute packed rows"):
        check_packed(model, 2, packed=False)
