"""What every engine does, in the tests of this folder.

SGLang joins with `pytest -m sglang`, as one server for the whole folder that every test takes over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollout.server.engines.engine import Engine
from tests.integration.rollout.server.engine_contract.engines import (
    INTERVAL,
    KINDS,
    SGLANG_CONTEXT,
    SLOTS,
    make_engine,
)
from tests.lib.rollout.server import sglang_server
from tests.lib.rollout.server.support import save_model


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of one model."""
    base = tmp_path_factory.mktemp("models")
    return save_model(base / "a", seed=1), save_model(base / "b", seed=2)


@pytest.fixture(scope="package", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sglang_server.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="package")
def sglang_url(folders: tuple[Path, Path]) -> Iterator[str]:
    """Where one SGLang listens, for all tests of the contract."""
    config = sglang_server.sglang_config(
        folders[0], max_running=SLOTS, max_context=SGLANG_CONTEXT, stream_interval=INTERVAL
    )
    with sglang_server.sglang_server(config) as url:
        yield url


@pytest.fixture(params=KINDS)
async def engine(
    request: pytest.FixtureRequest, folders: tuple[Path, Path]
) -> AsyncIterator[Engine]:
    """A started engine of each kind."""
    engine = make_engine(request.param, folders[0], request)
    await engine.start()
    yield engine
    await engine.close()
