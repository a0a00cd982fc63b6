"""A run that is resumed by other rules, or from another model, is refused before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.chassis.errors import ConfigError
from services.launcher import same_run
from services.launcher.config import LauncherConfig
from services.launcher.same_run import (
    check_same_run,
    check_same_store,
    note_beginning,
    note_creation,
)
from tests.lib.launcher.support import make_config, make_layout


def _model(folder: Path, *, width: int = 3, value: float = 1.0) -> str:
    folder.mkdir()
    save_file({"w": torch.full((width,), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": width}))
    return str(folder)


def _begun(folder: Path, **fields: Any) -> Callable[[LauncherConfig], None]:
    """A run has begun in `folder`; checks a configuration that would go on with it."""
    config = make_config(**fields)
    note_beginning(config, make_layout(config, folder))
    return lambda given: check_same_run(given, make_layout(given, folder))


def test_other_rules_are_named_with_both_values(tmp_path: Path) -> None:
    """One line, with the cure."""
    model = _model(tmp_path / "model")
    check = _begun(tmp_path, model=model, group_size=8)
    check(make_config(model=model, group_size=8))
    with pytest.raises(ConfigError, match=r"other rules: group_size \(was 8, is 4\); set them"):
        check(make_config(model=model, group_size=4))
    note_beginning(make_config(model=model, group_size=4), make_layout(make_config(), tmp_path))
    with pytest.raises(ConfigError, match="group_size"):
        check(make_config(model=model, group_size=4))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"width": 4}, "architecture and weights differ"),
        ({"value": 2.0}, "weights differ"),
    ],
)
def test_another_model_is_named(tmp_path: Path, other: dict[str, Any], named: str) -> None:
    """Of another shape, or of the same with other weights; a copy elsewhere is the same model."""
    check = _begun(tmp_path, model=_model(tmp_path / "model"))
    check(make_config(model=_model(tmp_path / "copy")))
    with pytest.raises(ConfigError, match=rf"other' and run|other', and run .*{named}"):
        check(make_config(model=_model(tmp_path / "other", **other)))


def test_without_the_note_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same change goes unseen."""
    check = _begun(tmp_path, model=_model(tmp_path / "model"), group_size=8)
    monkeypatch.setattr(same_run, "json_object", lambda file: {})
    check(make_config(model=str(tmp_path / "model"), group_size=4))


def test_a_model_that_the_run_prepares_is_not_compared(tmp_path: Path) -> None:
    """It is in the run's folder, and not there yet at the first start."""
    check = _begun(tmp_path, prepare="my_model")
    check(make_config(prepare="my_model"))


def test_a_model_that_the_run_has_prepared_is_compared_too(tmp_path: Path) -> None:
    """From when it is there on; control: before, nothing is known of it."""
    fields = {"prepare": "my.module", "model": "{run}/prepared/model"}
    config = make_config(**fields)
    layout = make_layout(config, tmp_path)
    note_beginning(config, layout)
    other = make_config(model=_model(tmp_path / "other", value=2.0))
    check_same_run(other, make_layout(other, tmp_path))
    layout.prepared_marker.parent.mkdir()
    _model(tmp_path / "prepared" / "model")
    layout.prepared_marker.touch()
    note_beginning(config, layout)
    check_same_run(config, layout)
    with pytest.raises(ConfigError, match="weights differ"):
        check_same_run(other, make_layout(other, tmp_path))


@pytest.mark.parametrize(
    ("found", "named"),
    [("", "no such run"), ("2026-11-30T00:00:00Z", "another run of that name, of 2026-11-30")],
)
def test_a_store_that_has_lost_the_run_is_named(tmp_path: Path, found: str, named: str) -> None:
    """With what is lost and the flag; a new run, and the run's own store, are none."""
    config = make_config()
    layout = make_layout(config, tmp_path)
    check_same_store(config, layout, found)
    note_creation(layout, "2026-11-29T00:00:00Z")
    check_same_store(config, layout, "2026-11-29T00:00:00Z")
    with pytest.raises(ConfigError, match=rf"{named}.* step ledger are lost.*accept_lost_samples"):
        check_same_store(config, layout, found)
