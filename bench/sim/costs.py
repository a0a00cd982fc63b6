"""What the emulated GPU work costs, read from `costs.toml`, which names its sources."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from services.lib.decode_latency import DecodeLatency
from services.node_agent.known_devices import USABLE, Device

_FILE = Path(__file__).with_name("costs.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """An inference engine on one node."""

    decode_seconds: DecodeLatency
    """Seconds of a decode step by sequences in the batch."""
    decode_seconds_per_cached_token: float
    """Added to each step for every token of keys and values it reads."""
    cached_tokens: int
    """Tokens whose keys and values fit."""
    prefill_tokens_per_second: float
    """Prompt tokens; decoding waits meanwhile."""
    update_seconds: float
    """Pause, swap of fetched weights, resume; keys and values are then computed again."""

    def step_seconds(self, sequences: int, cached_tokens: float) -> float:
        """Seconds of one decode step, one token for each of `sequences`."""
        attention = self.decode_seconds_per_cached_token * cached_tokens
        return self.decode_seconds.seconds(sequences) + attention


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCosts:
    """An optimizer step on a gang of nodes."""

    tokens_per_second: float
    """Of one node."""
    step_seconds: float
    """Of every step, however many tokens and nodes."""

    def seconds(self, tokens: int, nodes: int, *, share: float = 1.0) -> float:
        """Seconds of `share` of an optimizer step on `tokens`, perfectly balanced over `nodes`."""
        return tokens / (self.tokens_per_second * nodes) + share * self.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchingCosts:
    """A node changes its activity; processes stay."""

    activate_seconds: float
    """Device state in."""
    deactivate_seconds: float
    """Device state out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """All of them."""

    engine: EngineCosts
    training: TrainingCosts
    """Training, scoring by a reference included."""
    switching: SwitchingCosts


def load_costs(file: Path = _FILE) -> Costs:
    """Read a cost model."""
    table = tomllib.loads(file.read_text())
    latency = DecodeLatency.from_table(table["engine"].pop("decode_seconds"))
    return Costs(
        engine=EngineCosts(decode_seconds=latency, **table["engine"]),
        training=TrainingCosts(**table["training"]),
        switching=SwitchingCosts(**table["switching"]),
    )


def costs_of(kind: Device, reference: Device, costs: Costs) -> Costs:
    """The same work on nodes of another kind, by the roofline.

    A decode step reads the same bytes, at the other bandwidth; but it computes what a prefill of as
    many tokens does, and is no faster than that. Prefill and training go by FLOP/s.

    Args:
        kind: what the nodes are.
        reference: what `costs` were measured on.
        costs: of `reference`.
    """
    slower = reference.bandwidth / kind.bandwidth
    faster = kind.flops / reference.flops
    engine = costs.engine
    prefill = engine.prefill_tokens_per_second * faster
    steps = zip(engine.decode_seconds.batches, engine.decode_seconds.step_seconds, strict=True)
    bytes_of_token = engine.decode_seconds_per_cached_token * reference.bandwidth
    more_bytes = USABLE * (kind.memory_bytes - reference.memory_bytes)
    return replace(
        costs,
        engine=replace(
            engine,
            decode_seconds=DecodeLatency.of({b: max(s * slower, b / prefill) for b, s in steps}),
            decode_seconds_per_cached_token=engine.decode_seconds_per_cached_token * slower,
            cached_tokens=engine.cached_tokens + int(more_bytes / bytes_of_token),
            prefill_tokens_per_second=prefill,
        ),
        training=replace(
            costs.training, tokens_per_second=costs.training.tokens_per_second * faster
        ),
    )
