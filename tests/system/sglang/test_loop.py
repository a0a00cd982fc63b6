"""The whole quickstart with two real SGLang servers; afterwards every token is accounted for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.report import Report
from tests.lib.sglang.engines import ChecksumWatch, loads_of
from tests.lib.sglang.logprobs import recompute, sampled_spans
from tests.lib.sglang.quickstart import Quickstart, stored_trajectories

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

NODES = ("node-a", "node-b")
STEPS = 16


async def test_a_whole_training_run_keeps_its_promises(
    quickstart: Callable[..., Quickstart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights move into running engines, turns go on across them, and no token is in doubt."""
    monkeypatch.setenv("SEAMFLOW_TRAINER_NUM_STEPS", str(STEPS))
    run = quickstart("loop")
    watch = ChecksumWatch(run)
    async with watch.watching(NODES):
        summary = await run.train()
    recomputed = recompute(sampled_spans(await stored_trajectories(run)), run.weights)
    loaded = {node: set(loads_of(run, node)) for node in NODES}
    figures = {
        "weight_updates": summary["weight_updates"],
        "turns_interrupted": summary["turns_interrupted"],
        "turns_resumed": summary["turns_resumed"],
        "tokens_recorded": summary["tokens_recorded"],
        "tokens_lost": summary["tokens_lost"],
        "tokens_duplicated": summary["tokens_duplicated"],
        "tokens_with_wrong_version": summary["tokens_with_wrong_version"],
        "spans_recomputed": recomputed.num_spans,
        "logprob_max_difference": recomputed.max_difference,
        "updates_of_each_engine": min(map(len, loaded.values())),
        "tensors_unlike_published": len(watch.wrong),
    }
    assert not watch.wrong
    assert {node: watch.checked[node] - {0} for node in NODES} == loaded
    assert min(map(len, loaded.values())) >= 10
    assert summary["turns_interrupted"] == summary["turns_resumed"] >= 20
    assert summary["tokens_lost"] == summary["tokens_duplicated"] == 0
    assert summary["tokens_with_wrong_version"] == 0
    assert recomputed.num_tokens == summary["tokens_recorded"]
    assert recomputed.max_difference <= 1e-4, recomputed.worst
    Report(bench="sglang_loop", figures=figures, seeds=[run.config.seed]).publish()
