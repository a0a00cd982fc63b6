"""Load a Hugging Face model and shard it over the ranks."""

from __future__ import annotations

from functools import partial

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

from services.lib.model_folder import check_model_folder
from services.lib.transformer_blocks import transformer_blocks
from trainer.config import TrainerConfig
from trainer.model.lora import add_adapter
from trainer.model.onednn_linear import use_onednn
from trainer.model.packing import can_pack
from trainer.policy.forward import add_value_head

__all__ = ["DTYPES", "load_sharded", "load_whole"]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_sharded(
    config: TrainerConfig, mesh: DeviceMesh, *, critic: bool = False
) -> tuple[nn.Module, bool]:
    """Load the causal language model of `config.model`; shard each block, then the rest.

    Args:
        config: of the trainer.
        mesh: of the ranks.
        critic: add a value head.

    Returns:
        The model, and whether it supports packed rows.

    Raises:
        ValueError: the folder is incomplete, or holds another kind of model.
    """
    model = load_whole(config)
    # Dropout would make log-probs differ from the engine's. Gradients are not affected.
    model.eval()
    use_onednn(model)
    if config.lora.rank:
        add_adapter(model, config)
    packed = config.batch.packing and can_pack(model)
    if critic:
        add_value_head(model)
    shard = partial(
        fully_shard, mesh=mesh, mp_policy=_precision(config.dtype), offload_policy=_place(config)
    )
    for block in transformer_blocks(model):
        if config.activation_checkpointing:
            _checkpoint_activations(block)
        shard(block)
    shard(model)
    return model, packed


def _checkpoint_activations(block: nn.Module) -> None:
    """Checkpoint the activations of a block in place, so that parameters keep their names."""
    block.forward = partial(
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
    )


def load_whole(config: TrainerConfig) -> nn.Module:
    """Load the causal language model of `config.model` in the type of the master weights.

    Raises:
        ValueError: the folder is incomplete, or holds another kind of model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    check_model_folder(config.model)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    master = torch.float32 if config.dtype == "bfloat16" else DTYPES[config.dtype]
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            config.model,
            dtype=master,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model {config.model}: {error}") from error
    # What is kept on the host may be more than the device holds: blocks go there one by one.
    return model if config.cpu_offload else model.to(config.device)


def _precision(dtype: str) -> MixedPrecisionPolicy:
    if dtype != "bfloat16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _place(config: TrainerConfig) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=config.device == "cuda")
