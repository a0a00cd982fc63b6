"""One micro-batch of a rank of the trainer, counted: the trainer's own code on tensors without
memory.

The pass is that of a micro-batch after another one, in a step after another one: gradients and the
optimizer's state are there. The update follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from services.lib.transformer.can_pack import claims_to_pack
from services.lib.transformer.load_causal import transformer_blocks
from services.lib.transformer.row_attention.packed_attention import use_rows
from tools.forecast.block_sections import START, UPDATE, divide
from tools.forecast.flops import Flops
from tools.forecast.live_bytes import LiveBytes, Section
from trainer.config import TrainerConfig
from trainer.data.micro_batch import MicroBatch
from trainer.model.context_ranks import check_heads, check_packed, context_group
from trainer.model.critic import CRITIC, take_values
from trainer.model.load_sharded import EmptyModels, empty_models, shard
from trainer.model.load_slices import empty_causal
from trainer.policy.model_input import ModelInput, model_input, predicted
from trainer.policy.optimizer import Optimizer

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
GATHERED, ACTIVATIONS, LOGITS = "gathered weights", "activations", "logits"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS)
"""Of a rank's memory. Gathered: whole weights of what is computed, and their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A pass; every figure is linear in the number of equal blocks."""

    sections: Mapping[Section, Mapping[str, float]]
    """Bytes by part at the peak of each section."""
    flops: float
    """Floating-point operations."""
    parameters: float
    """Of all models, whole."""
    trained: float
    """Parameters that the optimizer updates."""
    offloaded_bytes: float
    """Of activations, on the host."""
    exchanged_bytes: float
    """That a rank sends to the others of its context group."""


def counted_pass(
    config: TrainerConfig, rows: MicroBatch, mesh: DeviceMesh, *, critic: bool
) -> Counted:
    """Count a pass with all blocks that the folder of `config.model` describes.

    Args:
        config: of the trainer, on the CPU and without cpu_offload.
        rows: the micro-batch.
        mesh: of the ranks.
        critic: the algorithm has a critic.

    Raises:
        ValueError: the model cannot be made, or a setting does not fit it.
    """
    labels, host = _Labels(), Counter[str]()
    live, flops, exchanges = LiveBytes(labels), Flops(), _Exchanges()
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
        for number, (whole, _) in enumerate(models.parts):
            divide(transformer_blocks(whole), number, live)
        with live, flops, exchanges, _known_products(config.dtype):
            _pass(models, given, config, live)
            _update(optimizer, live)
    return Counted(
        sections={key: peak.by_label for key, peak in live.peaks.items()},
        flops=flops.total,
        parameters=sum(each.numel() for each in parameters.values()),
        trained=sum(each.numel() for each in parameters.values() if each.requires_grad),
        offloaded_bytes=host["bytes"],
        exchanged_bytes=exchanges.num_bytes * (1 - 1 / config.context_parallel),
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


def _pass(models: EmptyModels, given: ModelInput, config: TrainerConfig, live: LiveBytes) -> None:
    live.begin(START)
    tokens = config.batch.logit_tokens
    loss = predicted(models.policy, given, tokens, **given.arguments).sum()
    values = take_values(models.policy)
    if models.critic is not None:
        values = models.critic(**given.arguments, **given.output_arguments)
    if values is not None:
        loss = loss + values.float().sum()
    loss.backward()


def _update(optimizer: Optimizer, live: LiveBytes) -> None:
    live.begin(UPDATE)
    _scale(optimizer)
    optimizer.update(0.0)


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


class _Exchanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, counts the bytes of all-to-alls, with what a rank keeps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and count what it sends."""
        if func._overloadpacket is torch.ops.c10d.alltoall_base_:
            self.num_bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


class _OnHost(saved_tensors_hooks):
    """What is saved within it has no memory on the device until it is asked for."""

    def __init__(self, live: LiveBytes, host: Counter[str], *, pin_memory: bool) -> None:
        super().__init__(partial(_packed, live, host), torch.clone)


def _packed(live: LiveBytes, host: Counter[str], tensor: torch.Tensor) -> torch.Tensor:
    host["bytes"] += tensor.nbytes
    with live.not_counting():
        return tensor.detach().clone()
