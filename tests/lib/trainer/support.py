"""A tiny real model, random ragged samples, and a gang to train them with."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from trainer.config import TrainerConfig

ROOT = Path(__file__).parents[3]
VOCABULARY = 16
# Neither are all tokens alike nor are they their own denominator, as they would be by default.
JOB_CONFIG = {
    "dtype": "float64",
    "optimizer__learning_rate": 3e-3,
    "batch__micro_batch_tokens": 60,
    "algorithm__name": "grpo",
}

ROUNDING = 1e-6
"""Of weights and losses after a few steps in float64: the model normalises in float32, and what is
computed once, or together, depends on the micro-batch."""


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of nested tables: {"lora__rank": 4} is {"lora": {"rank": 4}}."""
    tables: dict[str, Any] = {}
    for path, value in settings.items():
        table, _, name = path.rpartition("__")
        (tables.setdefault(table, {}) if table else tables)[name] = value
    return tables


def trainer_config(**settings: Any) -> TrainerConfig:
    """Trainer settings, those of nested tables as `optimizer__learning_rate`.

    Each step has a checkpoint unless `checkpoint__every` is given.
    """
    return TrainerConfig.model_validate(nested({"checkpoint__every": 1, **settings}))


def changed(config: TrainerConfig, **settings: Any) -> TrainerConfig:
    """A copy with other settings."""
    given = config.model_dump()
    for name, value in nested(settings).items():
        given[name] = {**given[name], **value} if isinstance(value, dict) else value
    return TrainerConfig.model_validate(given)


def make_model(folder: Path, seed: int = 0, kind: str = "qwen3", **settings: Any) -> Path:
    """Write two layers of an architecture in float32 with a character tokenizer.

    Settings are of its configuration.
    """
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    config = AutoConfig.for_model(kind, **{**small, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    vocabulary = {chr(97 + index): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def make_sample(
    rng: np.random.Generator,
    sample_id: str,
    group_id: str,
    *,
    newest_version: int = 2,
    temperature: float = 1.0,
    reward: float | None = None,
) -> trajectory_pb2.Sample:
    """A ragged two-turn sample: prompt, answer, observation, answer; mixed weight versions.

    The second turn is a quarter hotter than the first.
    """
    sizes = rng.integers(1, 7, 4)
    kinds = (False, True, False, True)
    total = int(sizes.sum())
    spans, start, mask = [], 0, []
    for size, policy in zip(sizes.tolist(), kinds, strict=True):
        spans.append(
            tokens_pb2.Span(
                start=start,
                num_tokens=size,
                origin=tokens_pb2.ORIGIN_POLICY if policy else tokens_pb2.ORIGIN_ENVIRONMENT,
                weight_version=int(rng.integers(0, newest_version + 1)) if policy else 0,
                version_source=tokens_pb2.VERSION_SOURCE_ENGINE
                if policy
                else tokens_pb2.VERSION_SOURCE_UNSPECIFIED,
            )
        )
        start += size
        mask += [policy] * size
    logprobs = np.where(mask, np.log(rng.uniform(0.02, 0.3, total)), 0.0)
    others = np.random.default_rng(zlib.crc32(sample_id.encode()))
    reference = np.log(others.uniform(0.02, 0.3, total)).astype("<f4")
    return trajectory_pb2.Sample(
        sample_id=sample_id,
        rollout_id=sample_id,
        group_id=group_id,
        tokens=tokens_pb2.PackedTokens(
            token_ids=rng.integers(0, VOCABULARY, total).astype("<i4").tobytes(),
            logprobs=logprobs.astype("<f4").tobytes(),
            spans=spans,
        ),
        loss_mask=bytes(mask),
        rewards=[
            tokens_pb2.Reward(
                name="reward", value=float(rng.normal()) if reward is None else reward
            )
        ],
        turns=[
            _turn("t1", sizes[:2].sum(), temperature),
            _turn("t2", sizes[2:].sum(), 1.25 * temperature),
        ],
        columns=[trajectory_pb2.Column(name="ref_logprobs", values=reference.tobytes())],
    )


def _turn(turn_id: str, num_tokens: int, temperature: float) -> trajectory_pb2.SampleTurn:
    sampling = tokens_pb2.SamplingParams(temperature=temperature)
    return trajectory_pb2.SampleTurn(turn_id=turn_id, num_tokens=int(num_tokens), sampling=sampling)


def make_samples(seed: int, groups: int = 3, group_size: int = 4) -> list[trajectory_pb2.Sample]:
    """Complete groups of ragged samples, members adjacent; the second of each was cut off."""
    rng = np.random.default_rng(seed)
    samples = []
    for group, member in product(range(groups), range(group_size)):
        name, of_group = f"s{seed}-{group}-{member}", f"g{seed}-{group}"
        samples.append(make_sample(rng, name, of_group, temperature=0.8 + 0.1 * group))
        samples[-1].truncated = member == 1
    return samples


def temperatures_of(sample: trajectory_pb2.Sample) -> NDArray[np.float32]:
    """Of each token's turn."""
    values = np.array([turn.sampling.temperature for turn in sample.turns], np.float32)
    return np.repeat(values, [turn.num_tokens for turn in sample.turns])


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child process that finds the tree and uses one thread."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    paths = f"{ROOT}{os.pathsep}{ROOT / 'sdk'}"
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **extra}


def read_lines(path: Path) -> Sequence[dict[str, Any]]:
    """The records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
