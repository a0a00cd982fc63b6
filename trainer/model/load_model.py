"""Load Hugging Face models and shard them over the ranks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from services.lib.transformer.load_causal import load_causal
from services.lib.transformer.packing import can_pack
from services.lib.transformer.transformer_blocks import transformer_blocks
from trainer.config import TrainerConfig
from trainer.model.critic import CriticModel, add_value_head
from trainer.model.lora import add_adapter
from trainer.model.onednn_linear import use_onednn

__all__ = ["DTYPES", "Models", "import_model_code", "load_models", "load_sharded", "load_whole"]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What a policy trains."""

    policy: nn.Module
    """The causal language model, with the critic's layer if `critic` is "layer"."""
    critic: CriticModel | None
    """The critic's own model, if `critic` is "model"."""
    packed: bool
    """Whether they compute packed rows."""


def load_sharded(config: TrainerConfig, mesh: DeviceMesh, *, critic: bool = False) -> Models:
    """Load the models; shard each block, then the rest.

    Args:
        config: of the trainer.
        mesh: of the ranks.
        critic: the algorithm has a critic.

    Raises:
        ValueError: a folder is incomplete, or holds another kind of model.
    """
    models = load_models(config, critic=critic)
    shard = partial(
        fully_shard, mesh=mesh, mp_policy=_precision(config.dtype), offload_policy=_place(config)
    )
    for model in filter(None, (models.policy, models.critic)):
        for block in transformer_blocks(getattr(model, "backbone", model)):
            shard(block)
        shard(model)
    return models


def load_models(config: TrainerConfig, *, critic: bool = False) -> Models:
    """Load the causal language model of `config.model`, and a critic.

    Raises:
        ValueError: a folder is incomplete, or holds another kind of model.
    """
    model = _load_prepared(config, config.model)
    if config.lora.rank:
        add_adapter(model, config)
    packed = config.batch.packing and can_pack(model)
    if critic and config.critic == "layer":
        add_value_head(model)
    own = _load_critic(config, model, packed) if critic and config.critic == "model" else None
    return Models(policy=model, critic=own, packed=packed)


def _load_critic(config: TrainerConfig, policy: nn.Module, packed: bool) -> CriticModel:
    folder = config.critic_model or config.model
    model = _load_prepared(config, folder)
    sizes = [each.get_input_embeddings().weight.shape[0] for each in (model, policy)]  # type: ignore[operator]
    if sizes[0] < sizes[1]:
        raise ValueError(
            f"critic_model {folder} knows {sizes[0]} token ids, the policy has {sizes[1]}: give a "
            "model with the policy's tokenizer"
        )
    if packed and not can_pack(model):
        raise ValueError(
            f"critic_model {folder} cannot compute packed rows, the policy can: set batch.packing "
            "to false, or give another critic_model"
        )
    return CriticModel(model)


def _load_prepared(config: TrainerConfig, folder: Path) -> nn.Module:
    model = load_whole(config, folder)
    # Dropout would make log-probs differ from the engine's. Gradients are not affected.
    model.eval()
    use_onednn(model)
    if config.activation_checkpointing:
        for block in transformer_blocks(model):
            _checkpoint_activations(block)
    return model


def _checkpoint_activations(block: nn.Module) -> None:
    """Checkpoint the activations of a block in place, so that parameters keep their names."""
    block.forward = partial(
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
    )


def load_whole(config: TrainerConfig, folder: Path) -> nn.Module:
    """Load the causal language model in `folder`, in the type of the master weights.

    Raises:
        ValueError: the folder is incomplete, or holds another kind of model.
    """
    master = torch.float32 if config.dtype == "bfloat16" else DTYPES[config.dtype]
    model: nn.Module = load_causal(folder, master)
    # What is kept on the host may be more than the device holds: blocks go there one by one.
    return model if config.cpu_offload else model.to(config.device)


def import_model_code(folder: Path) -> None:
    """Import what `load_whole` needs for this folder, which takes seconds; nothing is loaded.

    A folder that cannot be loaded is not reported here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with suppress(OSError, ValueError, KeyError), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def _precision(dtype: str) -> MixedPrecisionPolicy:
    if dtype != "bfloat16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _place(config: TrainerConfig) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=config.device == "cuda")
