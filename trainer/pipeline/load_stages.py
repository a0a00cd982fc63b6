"""Load the stages of a rank: each reads what it holds of the folders, and no other weights.

Before that the whole models are loaded once as FSDP shards them, so that each stage can be compared
with what the whole computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config import TrainerConfig
from trainer.model.critic import is_critic
from trainer.model.load_model import Models, master_type
from trainer.model.load_sharded import EmptyModels, empty_models, load_sharded, ranks_mesh
from trainer.model.load_slices import empty_causal, fill, materialize
from trainer.pipeline.layout import POLICY, Layout
from trainer.pipeline.stage import Stage, Trial, try_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStages:
    """What a rank of a pipeline has."""

    stages: dict[int, Stage]
    """By model."""
    buffers: Mapping[str, torch.Tensor]
    """Of the whole policy, those that a model folder has; they never change."""
    packed: bool
    """Whether sequences are computed without padding."""


def load_stages(config: TrainerConfig, layout: Layout, rank: int, *, critic: bool) -> LoadedStages:
    """Load this rank's stages. Collective.

    Args:
        config: of the trainer.
        layout: of the stages.
        rank: this one.
        critic: the algorithm has a critic.

    Raises:
        ValueError: a folder is incomplete, its model cannot fit, or cannot be cut so.
    """
    # Numbers are compared, so the whole computes in the type of the master weights.
    exact = "float32" if config.dtype == "bfloat16" else config.dtype
    mesh = ranks_mesh(config.device, 1)
    whole = load_sharded(config.model_copy(update={"dtype": exact}), mesh, critic=critic)
    trials = [_tried(whole, model, layout, config) for model in range(len(layout.ranks))[:2]]
    buffers = dict(_persistent_buffers(whole.policy))
    packed, conversions = whole.packed, getattr(whole.policy, "_weight_conversions", None)
    del whole
    stages = {}
    for model, index in layout.stages_on(rank).items():
        trial = trials[min(model, 1)]
        stages[model] = _stage(config, model, index, layout, trial, critic=critic)
        stages[model].check(trial)
    stages[POLICY].model._weight_conversions = conversions
    return LoadedStages(stages=stages, buffers=buffers, packed=packed)


def _tried(whole: Models, model: int, layout: Layout, config: TrainerConfig) -> Trial:
    return try_whole(
        _model(whole, model),
        len(layout.ranks[model]),
        packed=whole.packed,
        device=config.device,
        logit_tokens=config.batch.logit_tokens,
    )


def _model(models: Models | EmptyModels, model: int) -> nn.Module:
    found = models.policy if model == POLICY else models.critic
    assert found is not None, "a layout with a critic is for a critic model"
    return found


def _stage(
    config: TrainerConfig, model: int, index: int, layout: Layout, trial: Trial, *, critic: bool
) -> Stage:
    """A stage, filled from the folder of its model."""
    empty = empty_models(config, critic=critic)
    base: Any = empty.policy if model == POLICY else empty.critic_base
    folder = config.model if model == POLICY else config.critic_model or config.model
    names = _folder_names(_model(empty, model), base)
    stages = len(layout.ranks[model])
    stage = Stage(_model(empty, model), index, stages, logit_tokens=config.batch.logit_tokens)
    base.set_attn_implementation(trial.attention)
    materialize(stage.model, config.device)
    stage.model.to(config.device)
    wanted = {
        names[stage.names[name]]: tensor.detach()
        for name, tensor in (*stage.model.named_parameters(), *_persistent_buffers(stage.model))
        if stage.names[name] in names
    }
    fill(wanted, empty_causal(folder, master_type(config)), folder)
    return stage


def _folder_names(model: nn.Module, base: nn.Module) -> dict[str, str]:
    """By names of a model, those of its folder; a critic's layer is not in there.

    Args:
        model: not cut yet.
        base: the causal language model that it is made of.
    """
    in_folder = {id(each): name for name, each in (*base.named_parameters(), *base.named_buffers())}
    return {
        name: in_folder[id(each)]
        for name, each in (*model.named_parameters(), *model.named_buffers())
        if id(each) in in_folder and not is_critic(name)
    }


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    persistent = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer
