"""Plug-ins by "package.module:Name"."""

from __future__ import annotations

import pytest

from services.chassis.plugins import load


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
