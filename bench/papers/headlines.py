"""What is compared: each headline of the papers, and the runs that stand for its sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Step = Mapping[str, Any]
"""A line of a run's metrics."""
Rate = Callable[[Sequence[Step]], float]
"""Of the steps that count, after the one before them; more is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A run of an example with some settings changed."""

    example: str
    """File of examples/papers, without its ending."""
    flags: tuple[str, ...] = ()
    cores: Mapping[str, int] = field(default_factory=dict)
    """Core by the end of a process's name: a node is a core, and its processes share that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Our side first; each other one is an alternative configuration of the same work."""

    paper: str
    """What it claims, against what."""
    sides: Mapping[str, Side]
    rate: Rate
    how: str
    """What is real, and what is not."""


def rollouts_per_second(steps: Sequence[Step]) -> float:
    """The number of trained rollouts, divided by the seconds between the end of the first step and
    the end of the last step."""
    first, *counted = steps
    seconds = counted[-1]["time"] - first["time"]
    return float(sum(step["num_rollouts"] for step in counted) / seconds)


def trained_tokens_per_second(steps: Sequence[Step]) -> float:
    """Trained tokens over the time that the trainer computed."""
    counted = steps[1:]
    seconds = sum(step["seconds"]["train"] for step in counted)
    return float(sum(step["num_tokens"] for step in counted) / seconds)


def _set(*settings: str) -> tuple[str, ...]:
    return tuple(f"--set={each}" for each in settings)


_TWO_NODES = {"node-a": 0, "node-b": 1, "trainer": 1}
_REAL = "launcher, services, torch engines and trainer; a node is a core of its own"

HEADLINES = {
    "multiplexing": Headline(
        paper="SeamlessFlow: 2.0 times the token throughput of verl, 1.55 times with agents",
        sides={
            "multiplexed": Side(
                example="multiplexed",
                flags=("--max-staleness=1", *_set("scheduler.lending=gated")),
                cores=_TWO_NODES,
            ),
            "disaggregated": Side(
                example="disaggregated", flags=("--max-staleness=1",), cores=_TWO_NODES
            ),
            "colocated": Side(
                example="colocated",
                flags=(
                    '--nodes=["node-a: rollout train", "node-b: rollout train"]',
                    "--trainer-nodes=2",
                    "--max-staleness=1",
                ),
                cores={"node-a": 0, "node-b": 1},
            ),
        },
        rate=rollouts_per_second,
        how=_REAL,
    ),
    "tail_start": Headline(
        paper="RLHFuse: generation and inference 1.2 to 1.6 times as fast with R_t",
        sides={
            "tail_start": Side(example="tail_start", cores=_TWO_NODES),
            "whole": Side(
                example="tail_start",
                flags=_set("trainer.batch.start_at_tail=false"),
                cores=_TWO_NODES,
            ),
        },
        rate=rollouts_per_second,
        how=_REAL,
    ),
    "streaming": Headline(
        paper="StreamRL: 1.06 to 1.41 times its colocated form, synchronous",
        sides={
            "streamed": Side(example="streamed", cores=_TWO_NODES),
            "whole": Side(
                example="streamed", flags=_set("trainer.batch.stream_groups=0"), cores=_TWO_NODES
            ),
        },
        rate=rollouts_per_second,
        how=_REAL,
    ),
    "inter_stage_fusion": Headline(
        paper="RLHFuse: generation and inference 1.2 to 1.6 times as fast",
        sides={
            "fused": Side(
                example="inter_stage_fusion", cores={"node-a": 0, "node-b": 1, "trainer": 1}
            ),
            "serial": Side(
                example="inter_stage_fusion",
                flags=_set("scoring.start_at_tail=false", "scoring.request_samples=1000000"),
                cores={"node-a": 0, "node-b": 1, "trainer": 1},
            ),
        },
        rate=rollouts_per_second,
        how=_REAL,
    ),
    "fused_pipeline": Headline(
        paper="RLHFuse: training 1.2 to 1.3 times as fast with actor and critic in one pipeline",
        sides={
            "fused": Side(example="fused_pipeline", flags=("--max-staleness=0",)),
            "serial": Side(
                example="fused_pipeline",
                flags=("--max-staleness=0", *_set("trainer.pipeline.schedule=serial")),
            ),
        },
        rate=trained_tokens_per_second,
        how="launcher, services, two ranks on two cores; all processes share them",
    ),
}
