"""A Hugging Face model cut into stages that keep its own forward pass.

A stage is the model with fewer layers: embeddings at the first stage alone, final norm and output
layer at the last. Later stages get the hidden states of the one before as `inputs_embeds`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from services.lib.transformer.routers import replaying
from services.lib.transformer.row_rope import row_rope
from trainer.data.micro_batch import weightless
from trainer.model.critic import VALUE_HEAD, CriticModel
from trainer.policy.model_input import ModelInput, model_input, predicted

__all__ = ["Stage", "parameter_stages"]

_NEEDED = ("layers", "embed_tokens", "norm")
_TOLERANCE = 1e-3
"""Of hidden states, logits and values, relative to the greatest."""


class Stage(nn.Module):
    """The stage `index` of `num_stages` of a model, which is cut in place.

    Raises:
        ValueError: the model cannot be cut, or has fewer layers than stages.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        num_stages: int,
        *,
        packed: bool,
        device: str,
        logit_tokens: int = 1024,
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
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        _set_value_head(model, 1.0)  # at first 0, which hides what is before it
        given, hidden, expected = self._tried(_trial_input(packed, self.by_row, device))
        self._cut()
        self.trained = {names[id(each)]: each for each in model.parameters()}
        """Its parameters by their names in the whole model."""
        for parameter in self.trained.values():
            # Not in the file they were loaded from, whose memory cannot be released.
            parameter.data = parameter.data.clone()
        self._compare(given, hidden, expected)
        _set_value_head(model, 0.0)

    @property
    def dtype(self) -> torch.dtype:
        """Of what passes from stage to stage."""
        return next(iter(self.trained.values())).dtype

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
    def _tried(self, given: ModelInput) -> tuple[ModelInput, torch.Tensor | None, torch.Tensor]:
        """What the whole model passes to this stage, and on from it."""
        layers = _backbone(self.model).layers
        seen: dict[int, torch.Tensor] = {}
        edges = [n for n in (self._span.start, self._span.stop) if 0 < n < len(layers)]
        hooks = [_watch(layers[n], n, seen) for n in edges]
        output = _output(self.model, given.arguments, given, self._logit_tokens)
        for hook in hooks:
            hook.remove()
        return given, seen.get(self._span.start), seen.get(self._span.stop, output)

    @torch.no_grad()
    def _compare(
        self, given: ModelInput, hidden: torch.Tensor | None, expected: torch.Tensor
    ) -> None:
        """Check that the stage computes what the whole model does."""
        error = (self(given, hidden) - expected).abs().max().item()
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


@torch.no_grad()
def _set_value_head(model: nn.Module, weight: float) -> None:
    """The weights of a critic model's layer, if it has not been dropped."""
    head = getattr(model, VALUE_HEAD) if isinstance(model, CriticModel) else None
    if isinstance(head, nn.Linear):
        head.weight.fill_(weight)


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
