"""Load models that FSDP2 shards: made without memory, and filled by each rank with its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from services.lib.model_files.model_folder import check_model_folder
from services.lib.transformer.packing import can_pack
from services.lib.transformer.transformer_blocks import transformer_blocks
from trainer.config import TrainerConfig
from trainer.model.critic import CriticModel, add_value_head
from trainer.model.load_model import Models, check_critic, master_type, prepared
from trainer.model.load_slices import empty_causal, fill, materialize
from trainer.model.lora import add_adapter
from trainer.model.token_predictions import check_predictions, predict_within

__all__ = ["OwnCritic", "load_parts", "load_sharded"]


def load_sharded(config: TrainerConfig, mesh: DeviceMesh, *, critic: bool = False) -> Models:
    """Load the models, sharded: each rank reads what it holds. Collective.

    Args:
        config: of the trainer.
        mesh: of the ranks.
        critic: the algorithm has a critic.

    Raises:
        ValueError: a folder is incomplete, or holds another kind of model.
    """
    policy, own = load_parts(config, mesh, critic=critic)
    check_predictions(policy, config.device)
    packed = config.batch.packing and _packs(policy, own, config)
    for model in filter(None, (policy, own and own.critic)):
        # After a forward pass without a backward one, the weights outside of the blocks are whole.
        cast(FSDPModule, model).reshard()
    return Models(policy=policy, critic=None if own is None else own.critic, packed=packed)


def load_parts(
    config: TrainerConfig, mesh: DeviceMesh, *, critic: bool = False
) -> tuple[nn.Module, OwnCritic | None]:
    """The policy's model and a critic's own, sharded and filled; nothing is computed with them.

    Arguments and errors are those of `load_sharded`.
    """
    policy = _empty(config, config.model)
    if config.lora.rank:
        add_adapter(policy, config)
    if critic and config.critic == "layer":
        add_value_head(policy)
    predict_within(policy)
    own = _empty_critic(config, policy) if critic and config.critic == "model" else None
    shard = partial(
        fully_shard, mesh=mesh, mp_policy=_precision(config.dtype), offload_policy=_place(config)
    )
    _load(policy, policy, config, config.model, shard, mesh)
    if own is not None:
        _load(own.model, own.critic, config, own.folder, shard, mesh)
    return policy, own


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCritic:
    """A critic's own model."""

    critic: CriticModel
    """What is computed with."""
    model: nn.Module
    """The causal language model that it is made of."""
    folder: Path
    """Of its weights."""


def _empty_critic(config: TrainerConfig, policy: nn.Module) -> OwnCritic:
    folder = config.critic_model or config.model
    model = _empty(config, folder)
    check_critic(model, policy, folder)
    return OwnCritic(critic=CriticModel(model), model=model, folder=folder)


def _packs(policy: nn.Module, own: OwnCritic | None, config: TrainerConfig) -> bool:
    precision = torch.bfloat16 if config.dtype == "bfloat16" else None
    packed = can_pack(policy, device=config.device, precision=precision)
    if own is None or not packed:
        return packed
    hidden = partial(_last_hidden, own.critic)
    if not can_pack(own.critic.backbone, hidden, device=config.device, precision=precision):
        raise ValueError(
            f"critic_model {own.folder} cannot compute packed rows, the policy can: set "
            "batch.packing to false, or give another critic_model"
        )
    return True


def _last_hidden(critic: CriticModel, **arguments: Any) -> torch.Tensor:
    """Within the critic's own forward pass, where its weights are gathered."""
    with critic.giving_hidden():
        hidden: torch.Tensor = critic(**arguments)
    return hidden.float()


def _empty(config: TrainerConfig, folder: Path) -> nn.Module:
    check_model_folder(folder)
    model: nn.Module = empty_causal(folder, master_type(config))
    return prepared(model, config)


def _load(
    whole: nn.Module,
    model: nn.Module,
    config: TrainerConfig,
    folder: Path,
    shard: Callable[[nn.Module], object],
    mesh: DeviceMesh,
) -> None:
    """Shard a model without memory, block by block and the rest, and fill it.

    Args:
        whole: the causal language model, whose names the folder has.
        model: what is sharded: `whole`, or a critic made of it.
        config: of the trainer.
        folder: of the weights.
        shard: one module.
        mesh: of the ranks.
    """
    for block in transformer_blocks(whole):
        shard(block)
    shard(model)
    materialize(model, "cpu" if config.cpu_offload else config.device)
    part, num_parts = mesh.get_local_rank(mesh.ndim - 1), mesh.size(-1)
    fill(model, whole, folder, part=part, num_parts=num_parts)


def _precision(dtype: str) -> MixedPrecisionPolicy:
    if dtype != "bfloat16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _place(config: TrainerConfig) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=config.device == "cuda")
