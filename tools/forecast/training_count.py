"""What a rank of the trainer holds and computes, by its configuration and the model's config.json.

Equal blocks are counted with a few of them, as each section of a pass is linear in their number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from services.lib.transformer.load_causal import transformer_blocks
from tools.forecast.counted_pass import (
    GRADIENTS,
    OPTIMIZER,
    PARTS,
    WEIGHTS,
    Counted,
    counted_pass,
)
from tools.forecast.sample_rows import sample_rows
from trainer.config import TrainerConfig
from trainer.model.context_ranks import check_ranks
from trainer.model.load_sharded import ranks_mesh
from trainer.model.load_slices import empty_causal

_FEW = 4
"""Blocks that are counted, and one more: fewer lack one in the middle of a pass."""
_ON_HOST = (WEIGHTS, GRADIENTS, OPTIMIZER)


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


def count_training(
    config: TrainerConfig,
    *,
    ranks: int,
    rollout_tokens: int,
    prompt_tokens: int,
    critic: bool = False,
    whole: bool = False,
) -> TrainingCount:
    """Count a rank's bytes and operations; its process has no other process group.

    Args:
        config: of the trainer; of `model`, config.json is read.
        ranks: of the trainer.
        rollout_tokens: of each rollout.
        prompt_tokens: tokens of it that are not trained.
        critic: the algorithm has a critic.
        whole: count every block, also where a few are enough.

    Raises:
        ValueError: the model cannot be made, or a setting does not fit it.
    """
    check_ranks(config.context_parallel, config.replicas, ranks)
    rows = sample_rows(config.batch.micro_batch_tokens, rollout_tokens, prompt_tokens)
    # The host has what cpu_offload keeps there; a pass allocates the same without it.
    changes = {"device": "cpu", "cpu_offload": False}
    changes["activation_checkpointing"] = config.checkpoints_activations
    count = partial(_count, config.model_copy(update=changes), rows, critic=critic)
    with _alone(ranks, config.replicas) as mesh:
        num_blocks = 0 if whole or config.critic_model else _equal_blocks(config.model)
        if num_blocks <= _FEW + 1:
            found = count(mesh, config.model)
        else:
            few, more = (
                _shortened(config.model, n, partial(count, mesh)) for n in (_FEW, _FEW + 1)
            )
            found = _extrapolated(few, more, num_blocks)
    return _training_count(found, rows.token_ids_BT.size, on_host=config.cpu_offload)


@contextmanager
def _alone(ranks: int, replicas: int) -> Iterator[DeviceMesh]:
    """A mesh of ranks of which only this one is there: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield ranks_mesh("cpu", replicas)
    finally:
        dist.destroy_process_group()


def _count(
    config: TrainerConfig, rows: Any, mesh: DeviceMesh, folder: Path, *, critic: bool
) -> Counted:
    return counted_pass(config.model_copy(update={"model": folder}), rows, mesh, critic=critic)


def _equal_blocks(folder: Path) -> int:
    """Blocks of a model; 0 if one differs from the first in its shapes or its attention."""
    model = empty_causal(folder, torch.float32)
    blocks = transformer_blocks(model)
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    is_equal = len({_shape(block) for block in blocks}) == 1 and len(kinds) <= 1
    return len(blocks) if is_equal else 0


def _shape(block: nn.Module) -> tuple[object, ...]:
    return tuple((name, each.shape) for name, each in block.named_parameters())


def _shortened(folder: Path, blocks: int, count: Any) -> Counted:
    """Count the model of a folder as if it had fewer blocks."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    text["num_hidden_layers"] = blocks
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:blocks]
    with TemporaryDirectory() as short:
        (Path(short) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        found: Counted = count(Path(short))
    return found


def _extrapolated(few: Counted, more: Counted, blocks: int) -> Counted:
    def at(before: float, after: float) -> float:
        return before + (blocks - _FEW) * (after - before)

    sections = {
        key: {part: at(peak.get(part, 0), more.sections[key].get(part, 0)) for part in PARTS}
        for key, peak in few.sections.items()
    }
    names = [each.name for each in fields(Counted) if each.name != "sections"]
    return Counted(
        sections=sections, **{name: at(getattr(few, name), getattr(more, name)) for name in names}
    )


def _training_count(found: Counted, tokens: int, *, on_host: bool) -> TrainingCount:
    def on_device(peak: Mapping[str, float]) -> dict[str, int]:
        kept = {part: round(peak.get(part, 0)) for part in PARTS}
        return {part: 0 if on_host and part in _ON_HOST else kept[part] for part in PARTS}

    peaks = list(found.sections.values())
    state = sum(peaks[0].get(part, 0) for part in _ON_HOST) if on_host else 0
    return TrainingCount(
        by_part=max(map(on_device, peaks), key=lambda parts: sum(parts.values())),
        host_bytes=round(state + found.offloaded_bytes),
        flops=round(found.flops),
        tokens=tokens,
        parameters=round(found.parameters),
        trained=round(found.trained),
        exchanged_bytes=round(found.exchanged_bytes),
    )
