"""A Hugging Face model cut into stages that keep its own forward pass.

A stage is the model with fewer layers: embeddings at the first stage alone, final norm and output
layer at the last. Later stages get the hidden states of the one before as `inputs_embeds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from services.lib.transformer.routers import replaying
from services.lib.transformer.row_rope import row_rope
from trainer.config import TrainerConfig
from trainer.data.micro_batch import weightless
from trainer.model.critic import VALUE_HEAD, CriticModel, is_critic
from trainer.model.load_model import Models, master_type
from trainer.model.load_sharded import EmptyModels, empty_models, load_sharded, ranks_mesh
from trainer.model.load_slices import empty_causal, fill, materialize
from trainer.pipeline.layout import POLICY, Layout
from trainer.policy.model_input import ModelInput, model_input, predicted

_NEEDED = ("layers", "embed_tokens", "norm")
_TOLERANCE = 1e-3
"""Of hidden states, logits and values, relative to the greatest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a whole model computes for a few tokens: its stages must do the same."""

    given: ModelInput
    hidden: Mapping[int, torch.Tensor]
    """Into layers, by their number."""
    output: torch.Tensor
    attention: str
    """What its layers compute attention with, as transformers names it."""


@torch.no_grad()
def try_whole(
    model: nn.Module, num_stages: int, *, packed: bool, device: str, logit_tokens: int = 1024
) -> Trial:
    """Pass a few tokens through a model. Collective if it is sharded.

    Raises:
        ValueError: the model cannot be cut, or has fewer layers than stages.
    """
    layers = _backbone(model).layers
    starts = [_span(model, index, num_stages).start for index in range(1, num_stages)]
    given = _trial_input(packed, row_rope(model) is not None, device)
    hidden: dict[int, torch.Tensor] = {}
    hooks = [_watch(layers[number], number, hidden) for number in starts]
    with _value_head_of_ones(model):
        output = _output(model, given.arguments, given, logit_tokens)
    for hook in hooks:
        hook.remove()
    attention = _backbone(model).config._attn_implementation
    return Trial(given=given, hidden=hidden, output=output, attention=attention)


class Stage(nn.Module):
    """The stage `index` of `num_stages` of a model, which is cut in place.

    Raises:
        ValueError: the model cannot be cut, or has fewer layers than stages.
    """

    def __init__(
        self, model: nn.Module, index: int, num_stages: int, *, logit_tokens: int = 1024
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.model: Any = model
        """The model with the layers of this stage."""
        self.by_row = row_rope(model) is not None
        """Whether it needs the length of each row."""
        self.hidden_size = _backbone(model).config.hidden_size
        """Of what passes from stage to stage."""
        self._span, self._logit_tokens = _span(model, index, num_stages), logit_tokens
        names = {id(each): name for name, each in _tensors(model)}
        self._cut()
        self.names = {name: names[id(each)] for name, each in _tensors(model)}
        """Of parameters and buffers in the whole model, by their names here."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Its parameters by their names in the whole model."""
        return {self.names[name]: each for name, each in self.model.named_parameters()}

    @property
    def dtype(self) -> torch.dtype:
        """Of what passes from stage to stage."""
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    def forward(self, given: ModelInput, hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states; of the last stage predictions, or values of a critic's own model.

        Args:
            given: the model's input.
            hidden: of the stage before; None for the first stage.
        """
        arguments = dict(given.arguments)
        if hidden is not None:
            del arguments["input_ids"]
            arguments["inputs_embeds"] = hidden
        with replaying(given.routed_experts):
            if self.is_last:
                return _output(self.model, arguments, given, self._logit_tokens)
            states: torch.Tensor = _backbone(self.model)(**arguments).last_hidden_state
        return states

    def _cut(self) -> None:
        backbone, lo, hi = _backbone(self.model), self._span.start, self._span.stop
        backbone.layers = nn.ModuleList(list(backbone.layers)[lo:hi])
        backbone.config.num_hidden_layers = hi - lo
        if getattr(backbone.config, "layer_types", None):
            backbone.config.layer_types = backbone.config.layer_types[lo:hi]
        if not self.is_first:
            backbone.embed_tokens = nn.Identity()
        if not self.is_last:
            backbone.norm = nn.Identity()
            # Never computed here, and its parameters are not this stage's.
            _drop_output(self.model)

    @torch.no_grad()
    def check(self, trial: Trial) -> None:
        """Check that the stage computes what the whole model does.

        Raises:
            ValueError: it does not.
        """
        hidden = None if self.is_first else trial.hidden[self._span.start]
        expected = trial.output if self.is_last else trial.hidden[self._span.stop]
        with _value_head_of_ones(self.model):
            error = (self(trial.given, hidden) - expected).abs().max().item()
        if not error <= _TOLERANCE * max(1.0, expected.abs().max().item()):
            raise ValueError(
                f"{type(self.model).__name__} cannot be cut into stages, a stage differs from the "
                f"whole by {error:g}: set backend to 'fsdp'"
            )


def parameter_stages(model: nn.Module, num_stages: int) -> dict[str, int]:
    """The stage of each parameter of a whole model; of shared embeddings, the first one."""
    backbone = _backbone(model)
    spans = [_span(model, index, num_stages) for index in range(num_stages)]
    stages = {
        id(parameter): index
        for index, span in enumerate(spans)
        for layer in list(backbone.layers)[span.start : span.stop]
        for parameter in layer.parameters()
    }
    stages |= {id(parameter): 0 for parameter in backbone.embed_tokens.parameters()}
    return {name: stages.get(id(p), num_stages - 1) for name, p in model.named_parameters()}


def _backbone(model: Any) -> Any:
    backbone = model.backbone if isinstance(model, CriticModel) else model.base_model
    missing = [name for name in _NEEDED if not hasattr(backbone, name)]
    if missing:
        raise ValueError(
            f"{type(model).__name__} cannot be cut into stages, it has no {', '.join(missing)}: "
            "set backend to 'fsdp'"
        )
    return backbone


def _span(model: nn.Module, index: int, num_stages: int) -> range:
    """The layers of a stage."""
    number = len(_backbone(model).layers)
    if number < num_stages:
        raise ValueError(
            f"{type(model).__name__} has {number} layers and cannot be cut into {num_stages} "
            "stages: use fewer ranks, pipeline.critic_stages for a small critic, or backend 'fsdp'"
        )
    return range(number * index // num_stages, number * (index + 1) // num_stages)


def _output(
    model: Any, arguments: dict[str, Any], given: ModelInput, logit_tokens: int
) -> torch.Tensor:
    if isinstance(model, CriticModel):
        values: torch.Tensor = model(**arguments, **given.output_arguments)
        return values
    found: torch.Tensor = predicted(model, given, logit_tokens, **arguments)
    return found


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _value_head_of_ones(model: nn.Module) -> Iterator[None]:
    """Within the block: at first the layer of a critic's model is 0, which hides what is before."""
    head = getattr(model, VALUE_HEAD) if isinstance(model, CriticModel) else None
    weight = head.weight if isinstance(head, nn.Linear) else None
    if weight is not None:
        weight.fill_(1.0)
    yield
    if weight is not None:
        weight.zero_()


def _drop_output(model: Any) -> None:
    if isinstance(model, CriticModel):
        model.value_head = nn.Identity()
        return
    model.set_output_embeddings(nn.Identity())
    if hasattr(model, "value_head"):
        model.value_head = nn.Identity()


def _watch(layer: nn.Module, number: int, seen: dict[int, torch.Tensor]) -> Any:
    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[number] = args[0] if args else kwargs["hidden_states"]

    return layer.register_forward_pre_hook(keep, with_kwargs=True)


def _trial_input(packed: bool, by_row: bool, device: str) -> ModelInput:
    ones = np.ones((1, 4))
    batch = replace(
        weightless(),
        token_ids_BT=np.array([[1, 2, 3, 4]], np.int32),
        lengths_B=np.array([4]),
        loss_mask_BT=ones.astype(np.bool_),
        temperatures_BT=ones.astype(np.float32),
    )
    return model_input(batch, device, packed=packed, by_row=by_row)


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

    Before that the whole models are loaded once as FSDP shards them, so that each stage can be
    compared with what the whole computes.

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
