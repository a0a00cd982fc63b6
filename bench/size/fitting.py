"""Bytes of a rank for runs of real size on devices of 80 GB, part by part.

Beside each, the same with all logits at a time and every activation kept, as before there were
chunks of logits and checkpointed activations by default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.size.model_shapes import MODELS
from services.node_agent.known_devices import device
from tools.plan.training_count import TrainingCount, count_training
from trainer.config import TrainerConfig

_PROMPT_TOKENS = 512
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    name: str
    model: str
    """Of `MODELS`."""
    ranks: int
    row_tokens: int
    """Of a micro-batch, which is one row."""
    settings: Mapping[str, object] = field(default_factory=dict)


_RUNS = (
    _Run(name="4b_16k", model="qwen3-4b", ranks=4, row_tokens=16_384),
    _Run(
        name="32b_32k",
        model="qwen3-32b",
        ranks=16,
        row_tokens=32_768,
        settings={"activation_offload": True},
    ),
    _Run(name="30b_a3b_64k", model="qwen3-30b-a3b", ranks=16, row_tokens=65_536),
)


def fitting() -> dict[str, float]:
    """GB of each run by part, what is left of 80 GB as a share, and GB with the former defaults."""
    return {name: value for run in _RUNS for name, value in _figures(run)}


def _figures(run: _Run) -> Iterator[tuple[str, float]]:
    found = _count(run, run.settings)
    for part, size in found.by_part.items():
        yield f"{run.name}.{part.replace(' ', '_')}_gb", size / _GB
    yield f"{run.name}.gb", found.device_bytes / _GB
    yield f"{run.name}.spare", 1 - found.device_bytes / device("h100-80").usable_bytes
    former = {"activation_checkpointing": False, "logit_tokens": run.row_tokens}
    yield f"{run.name}.former_gb", _count(run, former).device_bytes / _GB


def _count(run: _Run, settings: Mapping[str, object]) -> TrainingCount:
    given = dict(settings)
    batch = {"micro_batch_tokens": run.row_tokens}
    if "logit_tokens" in given:
        batch["logit_tokens"] = int(str(given.pop("logit_tokens")))
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[run.model]))
        config = TrainerConfig.model_validate(
            {
                "run_id": "size",
                "model": folder,
                "checkpoint": {"folder": folder},
                "dtype": "bfloat16",
                "device": "cuda",
                "batch": batch,
                **given,
            }
        )
        return count_training(
            config, ranks=run.ranks, rollout_tokens=run.row_tokens, prompt_tokens=_PROMPT_TOKENS
        )


if __name__ == "__main__":
    for figure, value in fitting().items():
        print(f"{figure:32} {value:8.3f}")
