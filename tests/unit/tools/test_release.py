"""A release says the same version everywhere, and says what is new."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path

import pytest

from services.chassis.errors import ConfigError
from tools.release import check, released, write

ROOT = Path(__file__).parents[3]
PLACES = ("pyproject.toml", "sdk/seamflow/release.py", "deploy/helm/seamflow/Chart.yaml")
IMAGES = ("docker-compose.yml", "deploy/compose.images.yml", "deploy/compose.gpu.yml")
FILES = (*PLACES, *IMAGES, "deploy/docker/smoke.py", "CHANGELOG.md")
DAY = date(2027, 1, 2)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that a release changes."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_written_release_agrees_and_the_next_development_does_not(tree: Path) -> None:
    write(tree, "0.3.0", DAY)
    assert check(tree, "0.3.0") == []
    assert "## Unreleased\n\n## 0.3.0 (2027-01-02)\n" in (tree / "CHANGELOG.md").read_text()
    write(tree, "0.4.0.dev0", DAY)
    assert released(tree) == "0.3.0"
    assert len(check(tree, "0.3.0")) == len(FILES) - 1


@pytest.mark.parametrize("name", FILES)
def test_a_place_that_was_left_behind_is_named(tree: Path, name: str) -> None:
    old = (tree / name).read_text()
    write(tree, "0.3.0", DAY)
    (tree / name).write_text(old)
    (wrong,) = check(tree, "0.3.0")
    assert name in wrong


def test_a_release_needs_a_version_and_something_new(tree: Path) -> None:
    with pytest.raises(ConfigError, match=r"version is"):
        write(tree, "0.3", DAY)
    write(tree, "0.3.0", DAY)
    with pytest.raises(ConfigError, match="say what is new"):
        write(tree, "0.3.1", DAY)


def test_this_tree_is_above_its_newest_release() -> None:
    """Calls, images and packages of what follows a release never say that they are it."""
    assert check(ROOT, released(ROOT)) != []
