"""What a rank computes on its micro-batches: a gradient, or predictions."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Add the gradient of a chunk to the gradient of the step."""

    weight_version: int
    """Base version of the step: staleness is relative to it."""
    num_tokens: int
    """Trainable tokens of the chunk, over all ranks."""
    denominator: float
    """The chunk's term in the denominator of the step's loss."""
    micro_batches: tuple[MicroBatch, ...]
    """The rank's micro-batches; every rank has the same number. None with a mini-batch: those of
    its `Predict`, which the rank has."""
    actions: tuple[tuple[int, int, int], ...] = ()
    """In a pipeline, the rank's tasks in order: model, kind, micro-batch (`trainer/pipeline`)."""
    mini_batch: int | None = None
    """Number of the mini-batch of an earlier `Predict`; None: the step has one update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict:
    """Keep the log-probs and values of a mini-batch under the weights at the start of a step."""

    mini_batch: int
    """Its number, from 0; what an earlier step kept under it is forgotten."""
    micro_batches: tuple[MicroBatch, ...]
    """As those of `Accumulate`."""
    actions: tuple[tuple[int, int, int], ...] = ()
    """As those of `Accumulate`."""
