"""Checkpoints in a bucket of an S3 server: written, resumed from, refused with the cure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.chassis.errors import ConfigError, DependencyUnavailable
from tests.lib.trainer.s3_server import forget_connections, s3_server
from tests.lib.trainer.support import trainer_config
from tests.lib.trainer.training import Training, other_run
from trainer.cli import build
from trainer.object_path import ObjectPath


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectPath]:
    """A folder in an empty bucket."""
    with s3_server(monkeypatch) as folder:
        yield folder


async def test_a_run_resumes_from_a_bucket(
    training: Training, store: ObjectPath, tmp_path: Path
) -> None:
    """And ends with the weights of one whose checkpoints are on a disk, bit for bit."""
    local = other_run(training, tmp_path / "local")
    for run, values in ((training, {"checkpoint__store": str(store)}), (local, {})):
        await run.fill(5)
        await run.train(3, **values)
        records = await run.train(5, **values)
        assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
        assert (await run.readiness()).committed_step == 5
    assert {path.name for path in store.glob("step_*")} == {"step_000000004", "step_000000005"}
    assert not list(training.checkpoints.glob("step_*"))
    theirs = local.weights()
    assert all(tensor.equal(theirs[name]) for name, tensor in training.weights().items())


async def refused(
    model: Path, folder: Path, store: str, error: type[Exception] = ConfigError
) -> str:
    """What a trainer with such checkpoints says when it starts."""
    config = trainer_config(
        run_id="r", model=model, checkpoint__folder=folder, checkpoint__store=store
    )
    with pytest.raises(error) as caught:
        async with build(config):
            pytest.fail("was built")
    return str(caught.value)


async def test_what_is_missing_is_named_at_the_start(
    model: Path, tmp_path: Path, store: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket, credentials, the server."""
    message = await refused(model, tmp_path, "s3://nowhere/run")
    assert "s3://nowhere/run cannot be written" in message
    assert "create the bucket" in message
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    forget_connections()
    assert "credentials" in await refused(model, tmp_path, str(store))


async def test_a_store_that_does_not_answer_is_no_mistake_of_the_configuration(
    model: Path, tmp_path: Path, store: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer ends with the exit code of a dependency, and is started again."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    forget_connections()
    said = await refused(model, tmp_path, str(store), DependencyUnavailable)
    assert "127.0.0.1:1" in said
