"""The engine a configuration names, or an error that names the mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.server.config import RolloutServerConfig
from rollout.server.engines import build_engine
from rollout.server.engines.fake import FakeEngine
from services.chassis.errors import ConfigError
from tests.lib.rollout.server.support import save_model


def test_fake_engine_takes_its_fields() -> None:
    """The configuration's limits are the engine's."""
    engine = build_engine(RolloutServerConfig(engine="fake", max_running=3, fake_vocab_size=9))
    assert isinstance(engine, FakeEngine)
    assert (engine.info.max_running, engine.info.vocab_size) == (3, 9)


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ("torhc", "did you mean torch"),
        ("no.such:Engine", "no.such"),
        ("rollout.server.engines.fake:FakeEngin", "FakeEngine"),
        ("torch", "model is not set"),
    ],
)
def test_unusable_engine_is_named(engine: str, named: str) -> None:
    """An unknown name, a missing plug-in and a missing model have different errors."""
    with pytest.raises(ConfigError, match=named):
        build_engine(RolloutServerConfig(engine=engine))


def test_model_folder_without_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    """What is wrong with a model folder ends the process as a configuration error."""
    folder = save_model(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        build_engine(RolloutServerConfig(model=folder))
