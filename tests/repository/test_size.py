"""The project grows by decision only: upper bounds of its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.size import sizes

ROOT = next(each for each in Path(__file__).parents if (each / "pyproject.toml").exists())
BOUNDS = {
    "product_lines": 90_950,
    "product_files": 640,
    "test_lines": 117_260,
    "settings": 412,
    "make_targets": 20,
    "words_of_pages": 63_300,
}
"""Raised only by what a new capability is granted, lowered by what is taken away."""


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    """Of this checkout."""
    return sizes(ROOT)


@pytest.mark.parametrize("name", BOUNDS)
def test_nothing_grows_unnoticed(figures: dict[str, int], name: str) -> None:
    """The figure is at most its bound."""
    assert figures[name] <= BOUNDS[name]


def test_the_rooms_are_all_of_the_product(figures: dict[str, int]) -> None:
    """Control: what is counted adds up, and there is much of it."""
    rooms = sum(value for name, value in figures.items() if name.endswith("_lines")) - sum(
        figures[name] for name in ("product_lines", "test_lines")
    )
    assert rooms == figures["product_lines"] > 10_000
