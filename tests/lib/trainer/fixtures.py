"""A tiny model for all tests of the trainer, and one undisturbed run to compare with."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from seamflow.channel import connect

from tests.lib.trainer.ranks.gang_run import run_rank
from tests.lib.trainer.support import JOB_CONFIG, make_model
from tests.lib.trainer.training import Training
from tests.lib.trajectory_manager.client import Client, running_manager
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis.connect import redis_store


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder; read only."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def straight_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps on one rank without interruption, checkpoint after the fifth."""
    out = tmp_path_factory.mktemp("straight")
    job = {
        "config": JOB_CONFIG,
        "model": str(model),
        "out": str(out),
        "steps": list(range(1, 11)),
        "save_after": 5,
    }
    run_rank(job)
    return out


@pytest.fixture
async def training(redis_url: str, tmp_path: Path, model: Path) -> AsyncIterator[Training]:
    """A run that begins with `begin`."""
    async with (
        redis_store(redis_url, Durability.FAST, 5.0) as store,
        running_manager(store) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        yield Training(Client(channel, uuid.uuid4().hex), port, tmp_path, model)
