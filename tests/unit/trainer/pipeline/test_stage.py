"""Models of several architectures, cut into stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from services.lib.transformer.can_pack import can_pack
from tests.unit.trainer.model.test_packing import PACKED, batch_of, make, random_rows
from trainer.model.critic import CriticModel
from trainer.model.token_predictions import predictions
from trainer.pipeline.stage import Stage, parameter_stages, try_whole
from trainer.policy.model_input import model_input, predicted

UNCUTTABLE = {"gpt2", "gpt_neox"}
CUTTABLE = [kind for kind in PACKED if kind not in UNCUTTABLE]


def cut(kind: str, *, packed: bool, critic: bool) -> list[Stage]:
    """A model in two stages, each cut from a copy of its own."""
    stages = []
    for index in range(2):
        model: nn.Module = make(kind, **PACKED[kind])
        if packed:
            assert can_pack(model)
        stages.append(checked(CriticModel(model) if critic else model, index, packed=packed))
    return stages


def checked(model: nn.Module, index: int, *, packed: bool = False) -> Stage:
    """One of two stages, compared with the whole model that it is cut from."""
    trial = try_whole(model, 2, packed=packed, device="cpu")
    stage = Stage(model, index, 2)
    stage.check(trial)
    return stage


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", CUTTABLE)
def test_stages_one_after_the_other_are_the_model(kind: str, packed: bool) -> None:
    """By its own forward: the same numbers; each parameter is in the stage it is said to be in."""
    whole: Any = make(kind, **PACKED[kind])
    places = parameter_stages(whole, 2)
    if packed:
        assert can_pack(whole)
    given = model_input(batch_of(random_rows(0)), "cpu", packed=packed)
    stages = cut(kind, packed=packed, critic=False)
    with torch.no_grad():
        expected = predicted(whole, given, 4, **given.arguments)
        found = stages[1](given, stages[0](given, None))
    assert (found - expected).abs().max() < 1e-6
    for name, stage in places.items():
        assert name in stages[stage].trained
    assert set().union(*(stage.trained for stage in stages)) == places.keys()


def test_stages_of_a_rope_that_depends_on_the_length_compute_each_row_as_if_alone() -> None:
    """Rows on both sides of the original context of 16, in the same micro-batch."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    models = [make("qwen3", rope_parameters=rope, max_position_embeddings=16) for _ in range(3)]
    rows = [list(range(8)) * 4, list(range(9))]
    stages = [checked(models[n], n) for n in range(2)]
    given = model_input(batch_of(rows), "cpu", packed=False, by_row=stages[0].by_row)
    with torch.no_grad():
        found = stages[1](given, stages[0](given, None))
        asked = given.asked(4)
        # The longer row last: the model's frequencies grow with what it has seen.
        for number in (1, 0):
            places = slice(0, len(rows[number]) - 1)
            logits = models[2](torch.tensor([rows[number]]), use_cache=False).logits[0, places]
            tokens = asked.token_ids[number, places], asked.temperatures[number, places]
            assert (found[number, places] - predictions(logits, *tokens)).abs().max() < 1e-6


def test_a_critic_is_cut_as_the_policy_is() -> None:
    """Its values come out of the last stage; the first has no head."""
    whole = CriticModel(make("qwen3"))
    given = model_input(batch_of(random_rows(0)), "cpu", packed=False)
    stages = cut("qwen3", packed=False, critic=True)
    for model in (whole, stages[1].model):
        nn.init.ones_(model.get_parameter("value_head.weight"))
    with torch.no_grad():
        expected = whole(**given.arguments)
        found = stages[1](given, stages[0](given, None))
    assert (found - expected).abs().max() < 1e-6
    assert expected.abs().max() > 0
    assert not [name for name in stages[0].trained if "value_head" in name]


@pytest.mark.parametrize("kind", sorted(UNCUTTABLE & PACKED.keys()))
def test_a_model_of_other_parts_is_refused(kind: str) -> None:
    """It says what is missing."""
    with pytest.raises(ValueError, match="cannot be cut into stages, it has no"):
        checked(make(kind, **PACKED[kind]), 0)


class Counting(nn.Module):
    """A layer that counts layers, as no stage can."""

    def __init__(self, layer: nn.Module, owner: Any) -> None:
        super().__init__()
        self.layer, self._owner = layer, [owner]

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Depends on the number of layers."""
        output: torch.Tensor = self.layer(hidden, *args, **kwargs)
        added = torch.zeros_like(output)
        added[..., 0] = len(self._owner[0].layers)  # the norm after it hides a factor
        return output + added


@pytest.mark.parametrize("critic", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_that_differs_from_the_model_is_refused(index: int, critic: bool) -> None:
    """Negative control: the check at the start notices, also behind a critic's zero layer."""
    model: Any = make("qwen3")
    model.model.layers[index] = Counting(model.model.layers[index], model.model)
    whole = CriticModel(model) if critic else model
    with pytest.raises(ValueError, match="a stage differs from the whole"):
        checked(whole, index)


def test_a_critic_s_values_are_0_at_first() -> None:
    """Also after the check."""
    found = cut("qwen3", packed=False, critic=True)[1].model.get_parameter("value_head.weight")
    assert not found.any()
