"""Load whole Hugging Face models, and prepare them as the trainer computes with them."""
# ruff: noqa: N803, N806 -- tensors carry their shapes in their names

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from services.lib.routed_experts import RoutingShape
from services.lib.transformer.load_causal import load_causal, transformer_blocks
from services.lib.transformer.routers import prepare_routers, recompute_contexts
from trainer.config import TrainerConfig
from trainer.model.critic import CriticModel

OnHost = Callable[..., AbstractContextManager[Any]]
"""`save_on_cpu`, or what takes its place; gets `pin_memory`."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What a policy trains."""

    policy: nn.Module
    """The causal language model, with the critic's layer if `critic` is "layer"."""
    critic: CriticModel | None
    """The critic's own model, if `critic` is "model"."""
    packed: bool
    routing: RoutingShape | str
    """How the policy's routers choose, or why they cannot replay recorded experts."""


def replayable(model: nn.Module) -> RoutingShape | str:
    """Prepare the routers of a model to replay recorded experts; a text says why they cannot."""
    try:
        return prepare_routers(model)
    except ValueError as error:
        return str(error)


def prepared(model: nn.Module, config: TrainerConfig, on_host: OnHost | None = None) -> nn.Module:
    """A model as the trainer computes with it, in place.

    Args:
        on_host: keeps what is saved within it on the host, for `activation_offload`; None:
            `save_on_cpu`.
    """
    # Dropout would make log-probs differ from the engine's. Gradients are not affected.
    model.eval()
    use_onednn(model)
    if config.checkpoints_activations:
        for block in transformer_blocks(model):
            host = partial(on_host or save_on_cpu, pin_memory=config.device == "cuda")
            _checkpoint_activations(block, host if config.activation_offload else None)
    return model


def _checkpoint_activations(block: nn.Module, host: OnHost | None) -> None:
    """Checkpoint the activations of a block in place, so that parameters keep their names."""
    again = partial(
        checkpoint,
        block.forward,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=recompute_contexts,
    )
    block.forward = again if host is None else partial(_offloaded, again, host)


def _offloaded(forward: Callable[..., Any], host: OnHost, *args: Any, **kwargs: Any) -> Any:
    """The input that a checkpoint keeps goes to the host, and comes back for the recomputation."""
    with host():
        return forward(*args, **kwargs)


def load_whole(config: TrainerConfig, folder: Path) -> nn.Module:
    """Load the causal language model in `folder`, in the type of the master weights.

    Raises:
        ValueError: the folder is incomplete, or holds another kind of model.
    """
    model: nn.Module = load_causal(folder, master_type(config))
    # What is kept on the host may be more than the device holds: blocks go there one by one.
    return model if config.cpu_offload else model.to(config.device)


def master_type(config: TrainerConfig) -> torch.dtype:
    """Type of the weights that the optimizer updates."""
    return torch.float32 if config.dtype == "bfloat16" else DTYPES[config.dtype]


def check_critic(critic: Any, policy: Any, folder: Path) -> None:
    """Raise `ValueError` unless a critic knows the policy's token ids.

    Args:
        critic: the causal language model that it is made of.
        policy: the policy's.
        folder: of the critic.
    """
    sizes = [each.get_input_embeddings().weight.shape[0] for each in (critic, policy)]
    if sizes[0] < sizes[1]:
        raise ValueError(
            f"critic_model {folder} knows {sizes[0]} token ids, the policy has {sizes[1]}: give a "
            "model with the policy's tokenizer"
        )


def import_model_code(folder: Path) -> None:
    """Import what `load_whole` needs for this folder, which takes seconds; nothing is loaded.

    A folder that cannot be loaded is not reported here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with suppress(OSError, ValueError, KeyError), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


# Multiplications; for smaller products, calling oneDNN from Python costs more than it saves.
_SMALLEST = 1 << 21


def use_onednn(model: nn.Module) -> None:
    """Let the model's linear layers use oneDNN where that is faster, if torch supports it.

    In place; only `forward` changes, parameters, names and hooks stay. MKL, which torch uses, has
    no AVX-512 on processors of other makers than Intel. Measured on such a one, with 1,870 tokens
    and 256 by 768 weights: 230 GFLOP/s instead of 100, for gradients of weights 165.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        # No subclasses: they may override `forward`.
        if type(module) is nn.Linear:
            module.__class__ = _Linear


class _Linear(nn.Linear):
    """`x @ weight.T + bias`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's name
        """Return [..., O] for [..., I]."""
        if not self._gains(input):
            return functional.linear(input, self.weight, self.bias)
        result: Tensor = _Products.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result

    def _gains(self, input: Tensor) -> bool:  # noqa: A002
        # Checked in each call: a sharded weight is gathered and cast only during it.
        return (
            input.dim() > 1
            and input.device.type == "cpu"
            and input.dtype == self.weight.dtype == torch.float32
            and input.numel() * self.out_features >= _SMALLEST
        )


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        # Save only what the required gradients need.
        for_x, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight_OI if for_x else None)
        return _product(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_NO = grad.flatten(0, -2)
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            _product(grad, weight_OI.t()) if for_x else None,
            _product(grad_NO.t(), x.flatten(0, -2).t()) if for_weight else None,
            grad_NO.sum(0) if for_bias else None,
        )


def _product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    # A private operator of torch, whose release is pinned.
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return result


def checkpoint_tensors(
    model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All weights of a model as `save_pretrained` would name and split them.

    A Mixtral's experts are one parameter of its modules, and three tensors each in its checkpoint.

    Args:
        model: made by `from_pretrained`.
        tensors: its parameters and buffers by the names of its modules.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted = revert_weight_conversion(model, dict(tensors))  # type: ignore[arg-type]
    return {name: tensor.contiguous() for name, tensor in reverted.items()}
