"""Releases that cannot work together say so at the first call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.version import Version
from seamflow.release import RELEASE, __version__, works_with

ROOT = Path(__file__).parents[5]


@pytest.mark.parametrize(
    ("other", "works"),
    [
        ("3.4", True),
        ("3.5", True),
        ("3.3", True),
        ("3.6", False),
        ("3.2", False),
        ("2.4", False),
        ("4.4", False),
        ("3.4.1", False),
        ("", False),
        ("new", False),
    ],
)
def test_releases_one_minor_version_apart_work_together(other: str, works: bool) -> None:
    """One before and one after; no other major version; no other form."""
    assert works_with(other, "3.4") is works


def test_the_release_is_that_of_the_version() -> None:
    """<major>.<minor>."""
    assert __version__.startswith(f"{RELEASE}.")


def test_the_version_is_above_the_newest_release() -> None:
    """What is not released yet has a number of its own, so that its contract is told apart."""
    headings = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    newest = headings[0]
    assert works_with(".".join(newest.split(".")[:2]))
    assert Version(newest) < Version(__version__)
    assert Version("0.2.0") < Version("0.3.0.dev0") < Version("0.3.0"), "as versions compare"


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("docker-compose.yml", r"image: seamflow/[\w-]+:(\S+)"),
        ("deploy/helm/seamflow/Chart.yaml", r"appVersion: (\S+)"),
        ("pyproject.toml", r'^version = "(\S+)"'),
    ],
)
def test_images_and_packages_have_the_same_version(file: str, pattern: str) -> None:
    """All that names it."""
    assert {*re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)} == {__version__}
