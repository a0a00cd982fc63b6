"""A name that no algorithm has is refused before anything starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.chassis import plugins
from trainer.config.optimization import ALGORITHMS, AlgorithmConfig


def test_a_name_that_nothing_has_is_refused_with_its_neighbour() -> None:
    with pytest.raises(ValidationError, match=r"give one of .*; did you mean grpo\?"):
        AlgorithmConfig(name="grop")


@pytest.mark.parametrize("name", [*ALGORITHMS, "package.module:Name"])
def test_built_in_algorithms_and_plug_ins_are_taken(name: str) -> None:
    assert AlgorithmConfig(name=name).name == name


@pytest.mark.parametrize("path", ALGORITHMS.values())
def test_each_name_stands_for_something(path: str) -> None:
    assert callable(plugins.load(path))
