"""Settings that make a trainer fit its devices, each proven by counting again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from services.chassis.config.settings import Settings
from services.lib.transformer.can_pack import claims_to_pack
from tools.plan.run_shape import RunShape
from tools.plan.training_count import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    WEIGHTS,
    TrainingCount,
)
from trainer.config import TrainerConfig
from trainer.model.context_ranks import check_heads, check_packed, check_ranks
from trainer.model.load_slices import empty_causal

Count = Callable[[RunShape], TrainingCount]

_GAIN = 0.98
"""A setting that leaves more than this share of the bytes is no cure."""
_DOUBLED = {"launcher.trainer_ranks", "trainer.context_parallel"}
"""Settings that may help again."""
_LOGIT_TOKENS = 256
_LORA_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """Settings of a run in place of its own."""

    settings: Mapping[str, str]
    """By name, as in the file."""
    shape: RunShape
    count: TrainingCount


def find_cures(shape: RunShape, count: TrainingCount, usable: int, counted: Count) -> Cure:
    """Change settings, those for the largest part first, until a rank fits or none is left.

    Args:
        shape: of the run.
        count: of its ranks.
        usable: bytes of a device that tensors can have.
        counted: counts the ranks of a run.
    """
    best, tried = Cure(settings={}, shape=shape, count=count), set[str]()
    while best.count.device_bytes > usable:
        found = next(_candidates(best, tried), None)
        if found is None:
            break
        name, value, changed = found
        tried.add(name)
        after = counted(changed)
        if after.device_bytes < _GAIN * best.count.device_bytes:
            settings = {**best.settings, name: value}
            best = Cure(settings=settings, shape=changed, count=after)
            tried -= _DOUBLED
    return best


def _candidates(best: Cure, tried: set[str]) -> Iterator[tuple[str, str, RunShape]]:
    """Settings that are not tried, those for the largest part first."""
    parts = best.count.by_part
    for part in sorted(parts, key=lambda each: -parts[each]):
        for make in _BY_PART[part]:
            found = make(best.shape)
            if found is not None and found[0] not in tried:
                yield found


def _checkpointing(shape: RunShape) -> tuple[str, str, RunShape] | None:
    if shape.trainer.checkpoints_activations:
        return None
    return _with(shape, "activation_checkpointing", value=True)


def _offload(shape: RunShape) -> tuple[str, str, RunShape] | None:
    if shape.trainer.activation_offload or not shape.trainer.checkpoints_activations:
        return None
    return _with(shape, "activation_offload", value=True)


def _shorter(shape: RunShape) -> tuple[str, str, RunShape] | None:
    """No micro-batch is smaller than a rollout."""
    batch, least = shape.trainer.batch, shape.lengths.longest
    if batch.micro_batch_tokens < 2 * least:
        return None
    changed = batch.model_copy(update={"micro_batch_tokens": least})
    return _named(shape, "batch.micro_batch_tokens", str(least), {"batch": changed})


def _more_together(shape: RunShape) -> tuple[str, str, RunShape] | None:
    """A context group of twice as many ranks, if the model and the ranks allow it."""
    trainer, size = shape.trainer, 2 * shape.trainer.context_parallel
    model = empty_causal(trainer.model, torch.float32)
    try:
        check_ranks(size, trainer.replicas, shape.ranks)
        check_heads(model, size)
        check_packed(model, size, packed=trainer.batch.packing and claims_to_pack(model))
    except ValueError:
        return None
    return _named(shape, "context_parallel", str(size), {"context_parallel": size})


def _fewer_logits(shape: RunShape) -> tuple[str, str, RunShape] | None:
    batch = shape.trainer.batch
    if batch.logit_tokens <= _LOGIT_TOKENS:
        return None
    changed = batch.model_copy(update={"logit_tokens": _LOGIT_TOKENS})
    return _named(shape, "batch.logit_tokens", str(_LOGIT_TOKENS), {"batch": changed})


def _narrower(shape: RunShape) -> tuple[str, str, RunShape] | None:
    if shape.trainer.dtype == "bfloat16":
        return None
    return _named(shape, "dtype", '"bfloat16"', {"dtype": "bfloat16"})


def _more_ranks(shape: RunShape) -> tuple[str, str, RunShape] | None:
    """A machine has 8 devices at most."""
    ranks = 2 * shape.ranks_per_node
    if ranks > 8:
        return None
    return "launcher.trainer_ranks", str(ranks), shape.changed(shape.trainer, ranks)


def _on_host(shape: RunShape) -> tuple[str, str, RunShape] | None:
    return None if shape.trainer.cpu_offload else _with(shape, "cpu_offload", value=True)


def _adapter(shape: RunShape) -> tuple[str, str, RunShape] | None:
    if shape.trainer.lora.rank or shape.trainer.critic == "model":
        return None
    lora: Settings = shape.trainer.lora.model_copy(update={"rank": _LORA_RANK})
    return _named(shape, "lora.rank", str(_LORA_RANK), {"lora": lora})


def _with(shape: RunShape, name: str, *, value: bool) -> tuple[str, str, RunShape]:
    return _named(shape, name, str(value).lower(), {name: value})


def _named(
    shape: RunShape, name: str, value: str, update: Mapping[str, object]
) -> tuple[str, str, RunShape]:
    trainer: TrainerConfig = shape.trainer.model_copy(update=dict(update))
    return f"trainer.{name}", value, shape.changed(trainer, shape.ranks_per_node)


_STATE = (_more_ranks, _on_host, _adapter)
_BY_PART: Mapping[str, tuple[Callable[[RunShape], tuple[str, str, RunShape] | None], ...]] = {
    ACTIVATIONS: (_checkpointing, _shorter, _narrower, _offload, _more_together),
    LOGITS: (_fewer_logits, _shorter),
    GATHERED: (_narrower, _adapter),
    WEIGHTS: _STATE,
    GRADIENTS: _STATE,
    OPTIMIZER: _STATE,
}
