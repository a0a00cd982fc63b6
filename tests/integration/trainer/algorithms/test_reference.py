"""A reference policy: a scoring service with a real trainer and the real trajectory manager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.chassis.errors import ConfigError
from services.scoring.cli import build
from services.scoring.config import ScoringConfig
from tests.lib.trainer.support import make_model
from tests.lib.trainer.training import Training

REFERENCE = {"algorithm__reference_column": "ref_logprobs"}


@asynccontextmanager
async def scoring(training: Training, model: Path) -> AsyncIterator[None]:
    """A service that scores samples by a frozen model."""
    config = ScoringConfig(
        run_id=training.client.run_id,
        column="ref_logprobs",
        model=model,
        trajectory_manager=f"127.0.0.1:{training.port}",
    )
    async with build(config) as service:
        task = asyncio.ensure_future(service.background[0]())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def begun(training: Training) -> None:
    """Samples for two steps, which wait for their column."""
    names = [f"t{number}" for number in range(6)]
    await training.begin(*names, max_staleness=3, required_columns=["ref_logprobs"])
    await training.play(12)


async def test_the_distance_from_the_first_model_grows_from_nothing(training: Training) -> None:
    """The reference is what training begins with; its log-probs came over two services."""
    await begun(training)
    async with scoring(training, training.model):
        first, second = await training.train(2, kl__loss=0.1, dtype="float64", **REFERENCE)
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["reference_kl"] > 1e-6


async def test_another_reference_is_far_from_the_beginning_on(
    training: Training, tmp_path: Path
) -> None:
    """Negative control: a model with other weights."""
    await begun(training)
    async with scoring(training, make_model(tmp_path / "other", seed=1)):
        (first,) = await training.train(1, **REFERENCE)
    assert first["reference_kl"] > 0.01


async def test_a_missing_reference_column_is_reported(training: Training) -> None:
    """The run does not require the column, so samples lack it: the error names the cure."""
    await training.begin("a", "b", "c")
    await training.play(6)
    with pytest.raises(ConfigError, match=r"has no column 'ref_logprobs' .* required_columns"):
        await training.train(1, **REFERENCE)
