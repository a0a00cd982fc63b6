"""Train-minus-rollout log-probs of a mixture of experts, with and without replay of its experts."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.report import Report
from rollout.server.engines.engine import Engine, PauseMode
from rollout.server.engines.sglang.sglang_engine import SGLangEngine
from tests.lib.rollout.server.routed_experts import (
    SHAPE,
    chosen,
    logprobs,
    recorded,
    same_choices,
    save_experts,
    trained,
    whole,
)
from tests.lib.rollout.server.sglang_server import ENVIRONMENT, FLAGS, sglang_config
from tests.lib.rollout.server.support import request
from trainer.model.load_model import DTYPES

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

_TURNS, _NEW, _PAUSES = 32, 96, 3
_SEEDS = [0]


Sampled = tuple[list[int], int, list[float], NDArray[Any]]


async def sampled(engine: Engine) -> list[Sampled]:
    """Sequences, their prompts' lengths, log-probs and records; engines pause in between."""
    prompts = [tuple(3 + (7 * n + 5 * i) % 60 for i in range(8 + n)) for n in range(_TURNS)]
    wanted = [
        replace(request(prompt, max_new_tokens=_NEW, seed=None), routed_from=0)
        for prompt in prompts
    ]
    running = [asyncio.create_task(recorded(engine.generate(each))) for each in wanted]
    for _ in range(_PAUSES):
        await asyncio.sleep(0.1)
        await engine.pause(PauseMode.RETRACT)
        await engine.resume()
    found = await asyncio.gather(*running)
    return [
        ([*prompt, *ids], len(prompt), values, whole(records, len(prompt) + len(ids)))
        for prompt, (ids, values, records) in zip(prompts, found, strict=True)
    ]


def figures(model: torch.nn.Module, turns: list[Sampled], dtype: str) -> Mapping[str, float]:
    """Over all sampled tokens, in nats; and the share of tokens with another expert."""
    differences: dict[str, list[float]] = {"free": [], "replayed": []}
    other = []
    for ids, start, values, experts in turns:
        for name, given in (("free", None), ("replayed", experts)):
            mine = logprobs(model, ids, given)[start - 1 :]
            differences[name] += (mine - torch.tensor(values)).abs().tolist()
        own = chosen(model, ids)
        other += (np.sort(own[1:], -1) != np.sort(experts[1:], -1)).any((1, 2)).tolist()
    return {
        f"{dtype}_{name}_{kind}": value
        for name, found in differences.items()
        for kind, value in (("mean", statistics.fmean(found)), ("max", max(found)))
    } | {f"{dtype}_tokens_with_another_expert": statistics.fmean(other)}


async def test_replay_takes_the_routers_out_of_the_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 most of it; in float32 what is recorded is what the trainer chooses itself."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    folder = save_experts(tmp_path)
    found: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        model = trained(folder, DTYPES[dtype])
        flags = tuple(dtype if flag == "float32" else flag for flag in FLAGS)
        engine = SGLangEngine(sglang_config(folder, record_routed_experts=True, sglang_flags=flags))
        await engine.start()
        turns = await sampled(engine)
        await engine.close()
        for ids, _start, _values, experts in turns:
            assert (experts[1:] != SHAPE.none).all()
            if dtype == "float32":
                assert same_choices(experts[1:], chosen(model, ids)[1:])
        found |= figures(model, turns, dtype)
    Report(bench="routed_experts", figures=found, seeds=_SEEDS).publish()
    assert found["float32_replayed_max"] <= 1e-4
    assert found["bfloat16_tokens_with_another_expert"] > 0
    assert found["bfloat16_replayed_mean"] < found["bfloat16_free_mean"]
    assert found["bfloat16_replayed_max"] < 0.5 * found["bfloat16_free_max"]
