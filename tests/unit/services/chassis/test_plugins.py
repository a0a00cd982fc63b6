"""Plug-ins by "package.module:Name"."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from services.chassis.errors import ConfigError
from services.chassis.plugins import load, make


def test_a_plugin_is_what_its_path_names() -> None:
    """The named object itself is returned."""
    assert load("services.chassis.plugins:load") is load


@pytest.mark.parametrize("path", ["", "services.chassis", "services.chassis.plugins:", ":load"])
def test_a_path_of_another_form_is_an_error(path: str) -> None:
    """Only the one form is accepted."""
    with pytest.raises(ValueError, match="must have the form"):
        load(path)


def test_a_misspelt_name_shows_the_nearest() -> None:
    """The error names what was probably meant."""
    with pytest.raises(ValueError, match="did you mean 'load'"):
        load("services.chassis.plugins:laod")


BUILT_IN = {"list": "builtins:list", "number": "builtins:int"}


def test_a_setting_names_a_built_in_or_a_plugin() -> None:
    """Either is called with what the caller gives."""
    assert make("shape", "list", BUILT_IN, "ab") == ["a", "b"]
    assert make("shape", "builtins:dict", BUILT_IN, a=1) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lists", "shape is 'lists': give one of list, number, .*; did you mean list"),
        ("builtins:lst", "shape builtins:lst: .*did you mean 'list'"),
        ("no_such_module:Name", "shape no_such_module:Name: No module named"),
        ("number", "shape number: invalid literal"),
    ],
)
def test_a_setting_that_cannot_be_made_is_a_configuration_error(name: str, message: str) -> None:
    """Unknown, missing and failing plug-ins have different errors; each names the setting."""
    with pytest.raises(ConfigError, match=message):
        make("shape", name, BUILT_IN, "x")


def test_a_built_in_is_ours_in_a_folder_with_a_module_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a checkout beside an installed wheel; what the user names is taken from there."""
    (tmp_path / "json.py").write_text("JSONDecoder = None")
    monkeypatch.setenv("SEAMFLOW_USER_FOLDER", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    built_in = {"json": "json:JSONDecoder"}
    assert isinstance(make("decoder", "json", built_in), json.JSONDecoder)
    with pytest.raises(ConfigError, match="has the name of a module that this process needs"):
        make("decoder", "json:JSONDecoder", built_in)
