"""Tail migration: move the last samples of a batch to few instances, so that the others can score
or train (RLHFuse, arXiv 2409.13221, inter-stage fusion).

Generation ends with a few long samples on every instance: small batches that leave the devices
mostly idle. Once R_t samples remain they migrate to m instances, which frees the others. R_t is
chosen by simulation on sampled lengths.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.lib.decode_latency import DecodeLatency
from tools.planning.instance import Instance

__all__ = [
    "Engines",
    "Migration",
    "best_migration",
    "instances_kept",
    "num_kept",
    "simulated",
    "thresholds",
]

_SHARES = tuple(range(5, 100, 5))
"""Tried values of R_t, in percent of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The instances that generate, and their costs.

    Raises:
        ValueError: a field out of range.
    """

    num_instances: int
    """n, all equal."""
    latency: DecodeLatency
    """Seconds of a decode step by batch size."""
    flat_factor: float = 1.2
    """BS_max is the largest batch whose step takes at most this factor of the fastest step."""
    cache_bytes: int
    """C: bytes of one instance for KV cache."""
    sequence_bytes: int
    """M: bytes of KV cache of a sample of maximum length."""
    prompt_tokens: int = 0
    """Tokens of a prompt, prefilled again when its sample migrates."""
    prefill_seconds: float
    """Seconds of prefilling one token."""
    switch_seconds: float = 0.0
    """Seconds from the end of generation on an instance to the start of scoring there."""
    score_seconds: float
    """Seconds in which one freed instance scores a sample (reference, reward, critic)."""

    def __post_init__(self) -> None:
        for field in ("num_instances", "cache_bytes", "sequence_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be at least 1")
        for field in ("prompt_tokens", "prefill_seconds", "switch_seconds", "score_seconds"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be at least 0")
        if self.sequence_bytes > self.cache_bytes:
            raise ValueError(
                f"sequence_bytes is {self.sequence_bytes}, cache_bytes {self.cache_bytes}: "
                "an instance must hold at least one sample"
            )
        self.latency.saturation(self.flat_factor)

    @property
    def slots(self) -> int:
        """Samples that an instance runs concurrently."""
        return self.cache_bytes // self.sequence_bytes

    @property
    def flat_batch(self) -> int:
        """BS_max: the batch size up to which a step takes no longer."""
        return self.latency.saturation(self.flat_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A threshold and its predicted effect."""

    remaining: int
    """R_t: the tail migrates as soon as at most this many samples remain; 0: never."""
    num_kept: int
    """m: instances that continue generating; all of them if nothing migrates."""
    seconds: float
    """Predicted seconds until the last sample is generated and scored."""


def num_kept(remaining: int, engines: Engines) -> int:
    """m = max(⌈R_t / BS_max⌉, ⌈R_t * M / C⌉), at most n: the fewest that neither slow down nor
    overflow their cache."""
    for_speed = -(-remaining // engines.flat_batch)
    for_memory = -(-remaining * engines.sequence_bytes // engines.cache_bytes)
    return min(max(for_speed, for_memory), engines.num_instances)


def instances_kept(remaining: Mapping[str, int], count: int) -> tuple[str, ...]:
    """The `count` instances with most samples left: they have least to receive; ties by name.

    Args:
        remaining: samples left by instance.
        count: m.
    """
    return tuple(heapq.nsmallest(count, remaining, key=lambda name: (-remaining[name], name)))


def best_migration(lengths: Sequence[int], engines: Engines) -> Migration:
    """The R_t of 5, 10 … 95 % of the batch with the least predicted time, or none if none helps.

    Among equally fast ones the smallest.

    Args:
        lengths: tokens of each sample of a batch, in the order in which they are given out.
        engines: what generates and scores them.

    Raises:
        ValueError: no lengths, or one below 1.
    """
    outcomes = [simulated(lengths, engines, remaining) for remaining in thresholds(len(lengths))]
    return min(outcomes, key=lambda outcome: outcome.seconds)


def thresholds(batch: int) -> list[int]:
    """The R_t tried for a batch of this size, ascending; 0: nothing migrates."""
    return sorted({0} | {batch * share // 100 for share in _SHARES})


def simulated(lengths: Sequence[int], engines: Engines, remaining: int) -> Migration:
    """Simulate a batch whose tail migrates at R_t = `remaining`; exact under these rules.

    Sample i starts on instance i mod n, and an instance admits its own samples in order as slots
    become free. The tail migrates when at most R_t samples remain: all instances stop, the decode
    step in flight is lost, the m with most samples left stay, each sample of the others goes to the
    one with fewest and is prefilled again there before decoding continues. From then on the freed
    instances score generated samples, in order; the others join when they are done. Without a
    migration, scoring starts when all samples are generated.

    Raises:
        ValueError: no lengths, one below 1, or `remaining` not within the batch.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths must hold at least one sample, each of at least 1 token")
    if not 0 <= remaining < len(lengths):
        raise ValueError(f"remaining is {remaining}: it must be within 0..{len(lengths) - 1}")
    kept = num_kept(remaining, engines)
    ends = sorted(end for instance in _started(lengths, engines) for end in instance.run())
    if remaining == 0 or kept == engines.num_instances:
        free = [ends[-1]] * engines.num_instances
        seconds = _scored([ends[-1]] * len(ends), free, engines)
        return Migration(remaining=0, num_kept=engines.num_instances, seconds=seconds)
    moved = ends[-remaining - 1]
    instances = _started(lengths, engines)
    ready = [moved for instance in instances for _ in instance.run(until=moved)]
    stay = _gathered(instances, kept, moved, engines)
    ready += [end for instance in stay for end in instance.run()]
    free = [moved] * (engines.num_instances - kept) + [instance.clock for instance in stay]
    return Migration(remaining=remaining, num_kept=kept, seconds=_scored(ready, free, engines))


def _started(lengths: Sequence[int], engines: Engines) -> list[Instance]:
    return [
        Instance(lengths[index :: engines.num_instances], engines.latency, engines.slots)
        for index in range(engines.num_instances)
    ]


def _gathered(
    instances: Sequence[Instance], kept: int, moment: float, engines: Engines
) -> list[Instance]:
    """The instances that stay, with the samples of the others, ready to continue."""
    order = sorted(range(len(instances)), key=lambda index: -instances[index].num_samples)
    stay = [instances[index] for index in order[:kept]]
    for instance in stay:
        instance.clock = moment
    for index in order[kept:]:
        for done, left in instances[index].samples():
            target = min(stay, key=lambda instance: instance.num_samples)
            # A sample that has not begun costs what it would have cost where it was.
            again = (engines.prompt_tokens + done) * engines.prefill_seconds if done else 0.0
            target.receive(left, again)
    return stay


def _scored(ready: Sequence[float], free: Sequence[float], engines: Engines) -> float:
    """When the last sample is scored: in order of `ready`, each by the first that is free."""
    scorers = [moment + engines.switch_seconds for moment in free]
    heapq.heapify(scorers)
    end = 0.0
    for moment in sorted(ready):
        end = max(end, max(moment, scorers[0]) + engines.score_seconds)
        heapq.heapreplace(scorers, max(moment, scorers[0]) + engines.score_seconds)
    return end
