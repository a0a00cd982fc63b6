"""Wrong settings are rejected at startup, with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.chassis.errors import ConfigError
from tests.lib.trainer.support import changed, trainer_config
from trainer.checkpoint import checkpoint_files
from trainer.cli import build
from trainer.config import TrainerConfig


@pytest.fixture
def config(model: Path, tmp_path: Path) -> TrainerConfig:
    """A config that would work."""
    return trainer_config(run_id="r", model=model, checkpoint__folder=tmp_path / "checkpoints")


async def refused(config: TrainerConfig, **changes: object) -> str:
    """The error message of a changed config."""
    with pytest.raises(ConfigError) as caught:
        async with build(changed(config, **changes)):
            pytest.fail("was built")
    return str(caught.value)


async def test_an_existing_checkpoint_is_never_resumed_by_accident(config: TrainerConfig) -> None:
    """Without `resume` it is an error that names the folder, the step and the setting."""
    folder = checkpoint_files.begin(config.checkpoint.folder, 7)
    state = checkpoint_files.Checkpoint(
        run_id="other",
        step=7,
        weight_version=7,
        world_size=1,
        settings={},
        record={},
    )
    (folder / checkpoint_files.shard_name(0, 1)).touch()
    checkpoint_files.complete(folder, state, keep=1)
    message = await refused(config)
    assert "step 7" in message
    assert "set resume" in message
    assert "run 'other', not 'r'" in await refused(config, resume=True)


async def test_an_incomplete_model_folder_is_named_with_what_it_lacks(
    config: TrainerConfig, tmp_path: Path
) -> None:
    """Missing folder, then missing weights."""
    assert "no such folder" in await refused(config, model=tmp_path / "nowhere")
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    message = await refused(config, model=folder)
    assert "has no weights" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", 0),
        ("algorithm__clip_low", -0.1),
        ("optimizer__beta2", 1.0),
        ("optimizer__max_grad_norm", 0),
    ],
)
def test_a_value_out_of_bounds_is_named(config: TrainerConfig, field: str, value: float) -> None:
    """Field, value and bound."""
    with pytest.raises(ValueError, match=rf"(?s){field.replace('__', '.')}.* should be "):
        changed(config, **{field: value})
