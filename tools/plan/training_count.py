"""What a rank of the trainer holds and computes, by its configuration and the model's config.json.

The trainer's own code makes, shards and passes through the model on tensors without memory, in a
process group without other ranks. The pass is that of a micro-batch after another one, in a step
after another one: gradients and the optimizer's state are there. The update follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from services.lib.transformer.can_pack import claims_to_pack
from services.lib.transformer.row_attention.packed_attention import use_rows
from tools.plan.live_bytes import Flops, LiveBytes
from trainer.config import TrainerConfig
from trainer.data.micro_batch import MicroBatch
from trainer.model.context_ranks import check_heads, check_packed, check_ranks, context_group
from trainer.model.critic import CRITIC, take_values
from trainer.model.load_sharded import EmptyModels, empty_models, ranks_mesh, shard
from trainer.model.load_slices import empty_causal
from trainer.policy.model_input import ModelInput, model_input, predicted
from trainer.policy.optimizer import Optimizer

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
GATHERED, ACTIVATIONS, LOGITS = "gathered weights", "activations", "logits"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS)
"""Of a rank's memory. Gathered: whole weights of what is computed, and their gradients."""
_STATE = (WEIGHTS, GRADIENTS, OPTIMIZER)
"""Parts that ranks share, and that cpu_offload keeps on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCount:
    """A rank in a step of two micro-batches or more."""

    by_part: Mapping[str, int]
    """Bytes on the device of each of `PARTS`, when most are alive."""
    host_bytes: int
    """Bytes on the host: of cpu_offload and activation_offload."""
    flops: int
    """Floating-point operations of a micro-batch, recomputation included."""
    tokens: int
    """Tokens of a micro-batch, which the ranks of a context group compute together."""
    parameters: int
    """Of all models, frozen ones included."""
    trained: int
    """Parameters that the optimizer updates."""
    exchanged_bytes: int
    """That a rank sends to others of its context group in a micro-batch."""

    @property
    def device_bytes(self) -> int:
        """The most bytes that are alive on the device at a time."""
        return sum(self.by_part.values())

    def shared_by(self, times: float) -> TrainingCount:
        """About the same count with `times` as many ranks, which share the state."""
        parts = {
            part: round(size / times) if part in _STATE else size
            for part, size in self.by_part.items()
        }
        return replace(self, by_part=parts)


def count_training(
    config: TrainerConfig,
    *,
    ranks: int,
    rollout_tokens: int,
    prompt_tokens: int,
    critic: bool = False,
) -> TrainingCount:
    """Count a rank's bytes and operations; its process has no other process group.

    Args:
        config: of the trainer; of `model`, config.json is read.
        ranks: of the trainer.
        rollout_tokens: of each rollout.
        prompt_tokens: tokens of it that are not trained.
        critic: the algorithm has a critic.

    Raises:
        ValueError: the model cannot be made, or a setting does not fit it.
    """
    check_ranks(config.context_parallel, config.replicas, ranks)
    rows = sample_rows(config.batch.micro_batch_tokens, rollout_tokens, prompt_tokens)
    # The host has what cpu_offload keeps there; a pass allocates the same without it.
    changes = {"device": "cpu", "cpu_offload": False}
    changes["activation_checkpointing"] = config.checkpoints_activations
    with _alone(ranks, config.replicas) as mesh:
        counted = config.model_copy(update=changes)
        return _counted(counted, rows, mesh, critic=critic, on_host=config.cpu_offload)


def sample_rows(micro_batch_tokens: int, rollout_tokens: int, prompt_tokens: int) -> MicroBatch:
    """As many rollouts as a micro-batch takes, at least one, which have no token in common.

    Args:
        micro_batch_tokens: budget of a micro-batch.
        rollout_tokens: of each rollout.
        prompt_tokens: its first tokens, which are not trained.
    """
    shape = max(micro_batch_tokens // rollout_tokens, 1), rollout_tokens
    first = np.arange(shape[0], dtype=np.int32)
    zeros, trained = np.zeros(shape, np.float32), np.ones(shape, np.bool_)
    trained[:, :prompt_tokens] = False
    return MicroBatch(
        token_ids_BT=np.repeat(first[:, None], shape[1], 1),
        behaviour_logprobs_BT=zeros,
        reference_logprobs_BT=zeros,
        loss_mask_BT=trained,
        weight_versions_BT=np.zeros(shape, np.int64),
        lengths_B=np.full(shape[0], shape[1]),
        rollouts_B=first.astype(np.int64),
        groups_B=first.astype(np.int64),
        sequences_B=first.astype(np.int64),
        advantages_B=np.ones(shape[0]),
        weights_B=np.ones(shape[0]),
        bootstrap_B=np.zeros(shape[0], np.bool_),
        temperatures_BT=np.ones(shape, np.float32),
        turn_rewards_BT=zeros,
    )


@contextmanager
def _alone(ranks: int, replicas: int) -> Iterator[DeviceMesh]:
    """A mesh of ranks of which only this one is there: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield ranks_mesh("cpu", replicas)
    finally:
        dist.destroy_process_group()


def _counted(
    config: TrainerConfig, rows: MicroBatch, mesh: DeviceMesh, *, critic: bool, on_host: bool
) -> TrainingCount:
    labels, host = _Labels(), Counter[str]()
    live = LiveBytes(labels, lambda label: not (on_host and label in _STATE))
    flops = Flops()
    packs = _packs(config)
    context = context_group(config.context_parallel)
    given = model_input(rows, "cpu", packed=packs, context=context)
    models = empty_models(config, critic=critic, on_host=partial(_OnHost, live, host))
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = _placed(models, config, mesh, packs=packs)
        labels.know(models)
        optimizer = Optimizer(parameters, config, parameters)
        _after_a_step(optimizer, parameters)
        _count_state(optimizer, parameters, live)
        with live, flops, _known_products(config.dtype):
            _pass(models, given, config)
            _scale(optimizer)
            optimizer.update(0.0)
    parts = {part: live.peak.get(part, 0) for part in PARTS}
    return TrainingCount(
        by_part={part: 0 if on_host and part in _STATE else parts[part] for part in PARTS},
        host_bytes=host["bytes"] + (sum(parts[part] for part in _STATE) if on_host else 0),
        flops=flops.total,
        tokens=rows.token_ids_BT.size,
        parameters=sum(each.numel() for each in parameters.values()),
        trained=sum(each.numel() for each in parameters.values() if each.requires_grad),
        exchanged_bytes=round(live.exchanged_bytes * (1 - 1 / config.context_parallel)),
    )


def _packs(config: TrainerConfig) -> bool:
    model = empty_causal(config.model, torch.float32)
    packs = config.batch.packing and claims_to_pack(model)
    check_heads(model, config.context_parallel)
    check_packed(model, config.context_parallel, packed=packs)
    return packs


@contextmanager
def _known_products(dtype: str) -> Iterator[None]:
    """Tensors without memory know the products of experts in bfloat16 alone; else another
    operation of the same results takes their place."""
    from transformers.integrations import moe

    known = moe._can_use_grouped_mm
    if dtype != "bfloat16":
        moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = known


def _placed(
    models: EmptyModels, config: TrainerConfig, mesh: DeviceMesh, *, packs: bool
) -> dict[str, nn.Parameter]:
    """Shard the models; their parameters by the names that checkpoints have."""
    parameters: dict[str, nn.Parameter] = {}
    for whole, model in models.parts:
        if packs:
            use_rows(whole)
        shard(whole, model, config, mesh)
        prefix = "" if model is models.policy else CRITIC
        parameters |= {f"{prefix}{name}": each for name, each in model.named_parameters()}
    return parameters


def _after_a_step(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """As they are after a step and a micro-batch of the next one."""
    for last in (False, True):
        for parameter in parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        if not last:
            _scale(optimizer)
            optimizer.update(0.0)


def _scale(optimizer: Optimizer) -> None:
    for prefix in ("", CRITIC):
        optimizer.squared_norm(prefix, lambda _: True)
        optimizer.scale_gradients(prefix, 1.0)


def _count_state(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], live: LiveBytes
) -> None:
    for tensor in optimizer.tensors().values():
        live.count(tensor, OPTIMIZER)
    for parameter in parameters.values():
        live.count(parameter, WEIGHTS)
        if parameter.grad is not None:
            live.count(parameter.grad, GRADIENTS)


def _pass(models: EmptyModels, given: ModelInput, config: TrainerConfig) -> None:
    tokens = config.batch.logit_tokens
    loss = predicted(models.policy, given, tokens, **given.arguments).sum()
    values = take_values(models.policy)
    if models.critic is not None:
        values = models.critic(**given.arguments, **given.output_arguments)
    if values is not None:
        loss = loss + values.float().sum()
    loss.backward()


class _Labels:
    """The part that a new tensor belongs to, by its shape."""

    def __init__(self) -> None:
        self._vocabulary = -1
        self._whole: set[torch.Size] = set()

    def know(self, models: EmptyModels) -> None:
        """Learn the shapes of the models' parameters."""
        policy: Any = models.policy
        self._vocabulary = policy.get_input_embeddings().weight.shape[0]
        for _, model in models.parts:
            self._whole |= {each.shape for each in model.parameters()}

    def __call__(self, tensor: torch.Tensor) -> str:
        """FSDP gathers and adds up in tensors of one dimension."""
        shape = tensor.shape
        if shape in self._whole or (tensor.dim() == 1 and tensor.is_floating_point()):
            return GATHERED
        return LOGITS if tensor.dim() > 1 and shape[-1] == self._vocabulary else ACTIVATIONS


class _OnHost(saved_tensors_hooks):
    """What is saved within it has no memory on the device until it is asked for."""

    def __init__(self, live: LiveBytes, host: Counter[str], *, pin_memory: bool) -> None:
        super().__init__(partial(_packed, live, host), torch.clone)


def _packed(live: LiveBytes, host: Counter[str], tensor: torch.Tensor) -> torch.Tensor:
    host["bytes"] += tensor.nbytes
    with live.not_counting():
        return tensor.detach().clone()
