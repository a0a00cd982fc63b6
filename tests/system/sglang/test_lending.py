"""A node with a real SGLang is lent and taken back under load; afterwards every token is there."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bench.report import Report
from tests.lib.sglang.engines import ChecksumWatch, loads_of
from tests.lib.sglang.logprobs import recompute, sampled_spans
from tests.lib.sglang.quickstart import Quickstart, stored_trajectories

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LENT = "node-a"
STEPS = 12
SWITCHES = 20


async def test_twenty_switches_lose_no_token(
    quickstart: Callable[..., Quickstart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns wait and continue when the engine is back; it loads the newest weights, once.

    The run's only node, so that each step takes it and gives it back.
    """
    monkeypatch.setenv("SEAMFLOW_TRAINER_NUM_STEPS", str(STEPS))
    monkeypatch.setenv("SEAMFLOW_LAUNCHER_NODES", json.dumps([f"{LENT}: rollout train"]))
    run = quickstart("lending")
    watch = ChecksumWatch(run)
    async with watch.watching([LENT]):
        summary = await run.train()
    recomputed = recompute(sampled_spans(await stored_trajectories(run)), run.weights)
    loads = loads_of(run, LENT)
    figures = {
        "node_switches": summary["node_lendings"] + summary["node_returns"],
        "loads_of_a_version_max": max(loads.values()),
        "weight_updates": summary["weight_updates"],
        "versions_loaded": len(loads),
        "turns_interrupted": summary["turns_interrupted"],
        "turns_resumed": summary["turns_resumed"],
        "tokens_recorded": summary["tokens_recorded"],
        "tokens_lost": summary["tokens_lost"],
        "tokens_duplicated": summary["tokens_duplicated"],
        "tokens_with_wrong_version": summary["tokens_with_wrong_version"],
        "logprob_max_difference": recomputed.max_difference,
        "tensors_unlike_published": len(watch.wrong),
    }
    assert figures["node_switches"] >= SWITCHES
    assert max(loads.values()) == 1, loads
    assert not watch.wrong
    assert summary["turns_interrupted"] == summary["turns_resumed"] > 0
    assert summary["tokens_lost"] == summary["tokens_duplicated"] == 0
    assert summary["tokens_with_wrong_version"] == 0
    assert recomputed.num_tokens == summary["tokens_recorded"]
    assert recomputed.max_difference <= 1e-4, recomputed.worst
    Report(bench="sglang_lending", figures=figures, seeds=[run.config.seed]).publish()
