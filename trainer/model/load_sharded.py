"""Load models that FSDP2 shards: made without memory, and filled by each rank with its rows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from services.lib.model_files.model_folder import check_model_folder, check_same_tokens
from services.lib.routed_experts import RoutingShape
from services.lib.transformer.can_pack import can_pack, check_padded
from services.lib.transformer.load_causal import transformer_blocks
from trainer.config import TrainerConfig
from trainer.model.context_ranks import check_heads, check_packed
from trainer.model.critic import CriticModel, add_value_head
from trainer.model.load_model import Models, OnHost, check_critic, master_type, prepared, replayable
from trainer.model.load_slices import empty_causal, fill, folder_tensors, materialize
from trainer.model.lora import add_adapter
from trainer.model.token_predictions import check_predictions, predict_within


def ranks_mesh(device: str, replicas: int) -> DeviceMesh:
    """The mesh of a trainer's ranks: its last dimension is that of the parts of a model.

    Raises:
        ValueError: the replicas do not share the ranks evenly.
    """
    num_ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device, (num_ranks,))
    if num_ranks % replicas:
        raise ValueError(
            f"replicas is {replicas} and there are {num_ranks} ranks: give a divisor of "
            "their number"
        )
    shape = (replicas, num_ranks // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyModels:
    """The models of a trainer, prepared and without memory for their parameters."""

    policy: nn.Module
    """The causal language model, with adapters and the critic's layer where they are set."""
    critic: CriticModel | None
    critic_base: nn.Module | None
    """The causal language model that the critic's own is made of."""
    routing: RoutingShape | str
    """As that of `Models`."""

    @property
    def parts(self) -> list[tuple[nn.Module, nn.Module]]:
        """The models that are sharded, each after the causal language model that it is made of."""
        pairs = ((self.policy, self.policy), (self.critic_base, self.critic))
        return [(whole, model) for whole, model in pairs if whole is not None and model is not None]


def load_sharded(config: TrainerConfig, mesh: DeviceMesh, *, critic: bool = False) -> Models:
    """Load the models, sharded: each rank reads what it holds. Collective.

    Raises:
        ValueError: a folder is incomplete, holds another kind of model, or its model cannot fit.
    """
    folders = (config.model, _critic_folder(config))
    check_model_folder(config.model)
    if critic and config.critic == "model":
        check_model_folder(folders[1])
        check_same_tokens(config.model, folders[1], "critic_model")
    models = empty_models(config, critic=critic)
    for whole, _ in models.parts:
        check_padded(whole.config)
        check_heads(whole, config.context_parallel)
    part, num_parts = mesh.get_local_rank(mesh.ndim - 1), mesh.size(-1)
    check_memory((model for _, model in models.parts), config, num_parts)
    for (whole, model), folder in zip(models.parts, folders, strict=False):
        shard(whole, model, config, mesh)
        own = dict(folder_tensors(model, whole))
        fill(own, whole, folder, part=part, num_parts=num_parts)
    check_predictions(models.policy, config.device)
    packed = config.batch.packing and _packs(models, config)
    check_packed(models.policy, config.context_parallel, packed=packed)
    for _, model in models.parts:
        # After a forward pass without a backward one, the weights outside of the blocks are whole.
        cast(FSDPModule, model).reshard()
    return Models(policy=models.policy, critic=models.critic, packed=packed, routing=models.routing)


def empty_models(
    config: TrainerConfig, *, critic: bool = False, on_host: OnHost | None = None
) -> EmptyModels:
    """The models as `load_sharded` shards them, from config.json alone; no weights are read.

    Raises:
        ValueError: transformers does not know such a model, or it takes no adapter.
    """
    policy = _empty(config, config.model, on_host)
    routing = replayable(policy)
    if config.lora.rank:
        add_adapter(policy, config)
    if critic and config.critic == "layer":
        add_value_head(policy)
    predict_within(policy)
    if not critic or config.critic != "model":
        return EmptyModels(policy=policy, critic=None, critic_base=None, routing=routing)
    base = _empty(config, _critic_folder(config), on_host)
    check_critic(base, policy, _critic_folder(config))
    critic_model = CriticModel(base)
    return EmptyModels(policy=policy, critic=critic_model, critic_base=base, routing=routing)


def shard(whole: nn.Module, model: nn.Module, config: TrainerConfig, mesh: DeviceMesh) -> None:
    """Shard a model without memory, block by block and the rest, and give it memory.

    Args:
        whole: the causal language model that it is made of.
        model: what is sharded: `whole`, or a critic made of it.
    """
    precision, place = mixed_precision(config.dtype), _place(config)
    for module in (*transformer_blocks(whole), model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=place)
    materialize(model, "cpu" if config.cpu_offload else config.device)


def _critic_folder(config: TrainerConfig) -> Path:
    return config.critic_model or config.model


def _packs(models: EmptyModels, config: TrainerConfig) -> bool:
    precision = torch.bfloat16 if config.dtype == "bfloat16" else None
    tried = partial(can_pack, device=config.device, precision=precision, attention=config.attention)
    packed = tried(models.policy)
    critic = models.critic
    if critic is None or not packed:
        return packed
    hidden = partial(_last_hidden, critic)
    if not tried(critic.backbone, hidden):
        raise ValueError(
            f"critic_model {_critic_folder(config)} cannot compute packed rows, the policy can: "
            "set batch.packing to false, or give another critic_model"
        )
    return True


def _last_hidden(critic: CriticModel, **arguments: Any) -> torch.Tensor:
    """Within the critic's own forward pass, where its weights are gathered."""
    with critic.giving_hidden():
        hidden: torch.Tensor = critic(**arguments)
    return hidden.float()


def _empty(config: TrainerConfig, folder: Path, on_host: OnHost | None) -> nn.Module:
    model: nn.Module = empty_causal(folder, master_type(config))
    return prepared(model, config, on_host)


def mixed_precision(dtype: str) -> MixedPrecisionPolicy:
    """Types of the gathered weights and of the sums of gradients."""
    if dtype != "bfloat16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _place(config: TrainerConfig) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=config.device == "cuda")


_CGROUP = Path("/sys/fs/cgroup/memory.max")
_MOMENTS = 2
"""Of AdamW, for each parameter."""
_GB = 1e9


def state_bytes(models: Iterable[nn.Module]) -> int:
    """Bytes of weights, gradients and optimizer state, without what a pass computes.

    Args:
        models: whose parameters may be without memory; tied ones count once.
    """
    return sum(
        parameter.nbytes * (2 + _MOMENTS if parameter.requires_grad else 1)
        for model in models
        for parameter in model.parameters()
    )


def check_memory(models: Iterable[nn.Module], config: TrainerConfig, num_parts: int) -> None:
    """Compare the least that a rank needs with what its device, or this machine, has at most.

    Args:
        num_parts: ranks that share the state.

    Raises:
        ValueError: it cannot fit.
    """
    need = state_bytes(models) / num_parts
    if config.device == "cuda" and not config.cpu_offload:
        have, where = float(torch.cuda.mem_get_info()[1]), "its device"
    else:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        have, where = _host_bytes() / ranks, f"this machine, for each of its {ranks} ranks,"
    if need > have:
        offload = "" if config.cpu_offload or config.device == "cpu" else "cpu_offload = true, "
        raise ValueError(
            f"model {config.model}: weights, gradients and optimizer state are "
            f"{need / _GB:.1f} GB on each of {num_parts} ranks, and {where} has "
            f"{have / _GB:.1f} GB: use more ranks, {offload}lora.rank, or a smaller model "
            "(`seamflow plan` says what fits)"
        )


def _host_bytes() -> int:
    """Memory of this machine, or of this process's control group if that is less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP.read_text(encoding="utf-8").strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdecimal() else whole
