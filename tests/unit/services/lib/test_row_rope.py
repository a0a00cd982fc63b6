"""Rows of rope types that depend on the length are computed as if alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from services.lib.transformer.row_rope import row_positions, row_rope
from tests.suites.field.inputs.training.rope import ORIGINAL, rope_config
from tests.suites.field.tiny_models import make_model

_LENGTHS = torch.tensor([40, 10])


def _last_logits(model: nn.Module) -> torch.Tensor:
    """Of the shorter row, computed beside the longer one."""
    ids = torch.arange(80).view(2, 40) % 64
    arguments = {"input_ids": ids, "position_ids": row_positions(_LENGTHS, 40)}
    with torch.no_grad():
        found: torch.Tensor = model(**arguments, use_cache=False).logits[1, 9]
    return found


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_a_row_is_computed_as_if_alone(rope: str) -> None:
    """And is not if transformers computes it."""
    model = make_model(rope_config("llama", rope))
    with torch.no_grad():
        ids = torch.arange(40, 50)[None] % 64
        alone = copy.deepcopy(model)(input_ids=ids, use_cache=False).logits[0, -1]
    assert (_last_logits(copy.deepcopy(model)) - alone).abs().max() > 0.1
    assert row_rope(model) is not None
    assert (_last_logits(model) - alone).abs().max() < 1e-4


def test_lengths_of_equal_frequencies_have_one_number() -> None:
    long = row_rope(make_model(rope_config("llama", "longrope")))
    grows = row_rope(make_model(rope_config("llama", "dynamic")))
    assert long is not None
    assert grows is not None
    assert [long.rotation(n) for n in (1, 2, ORIGINAL, ORIGINAL + 1, 60)] == [0, 0, 0, 1, 1]
    assert [grows.rotation(n) for n in (1, ORIGINAL, ORIGINAL + 1, 60)] == [0, 0, 1, 2]


@pytest.mark.parametrize("rope", ["default", "yarn", "llama3"])
def test_a_model_of_fixed_frequencies_is_left_alone(rope: str) -> None:
    assert row_rope(make_model(rope_config("llama", rope))) is None
