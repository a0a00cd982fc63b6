"""The Dockerfiles, as far as they can be judged without building them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from deploy.docker.install import requirements_of, torch_of
from tests.lib.deploy.support import DOCKERFILES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions with their arguments, continuation lines joined, comments dropped."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [
        (line.split()[0], line.split(maxsplit=1)[1])
        for line in lines
        if line and not line.startswith("#")
    ]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_the_final_user_is_not_root(path: Path) -> None:
    """By number, so that Kubernetes can verify it."""
    users = [argument for name, argument in instructions(path) if name == "USER"]
    assert users[-1] == "10001:10001"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_no_shell_is_needed(path: Path) -> None:
    """Every command is in exec form, at build time and at run time."""
    for name, argument in instructions(path):
        if name in ("RUN", "CMD", "ENTRYPOINT"):
            assert argument.startswith("["), f"{name} {argument}"
        if name == "HEALTHCHECK" and argument != "NONE":
            assert "CMD [" in argument


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_the_base_can_be_replaced(path: Path) -> None:
    """Every stage goes back to BASE_IMAGE, whose default is pinned."""
    first, *_ = instructions(path)
    assert first[0] == "ARG"
    assert first[1].startswith("BASE_IMAGE=python:3.11")
    bases = [argument.split()[0] for name, argument in instructions(path) if name == "FROM"]
    assert bases[0] == "${BASE_IMAGE}"
    assert set(bases[1:]) == {"chassis", "${SHARED}"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_exists(path: Path) -> None:
    """Paths are relative to the repository."""
    for name, argument in instructions(path):
        if name == "COPY" and not argument.startswith("--from"):
            for source in argument.split()[:-1]:
                assert (ROOT / source).exists(), source


def test_the_shared_bases_are_stages() -> None:
    """Those that SHARED may name, chassis without being named; torch is on chassis."""
    (path,) = DOCKERFILES
    lines = instructions(path)
    froms = [argument.split() for name, argument in lines if name == "FROM"]
    stages = {words[2]: words[0] for words in froms if len(words) == 3}
    assert stages["torch"] == "chassis"
    assert ("ARG", "SHARED=chassis") in lines


def test_torch_s_base_has_what_every_user_of_torch_needs() -> None:
    """So that nothing of it is installed a second time beside it."""
    (path,) = DOCKERFILES
    assert ("RUN", '["python", "install.py", "scoring"]') in instructions(path)
    shared = set(requirements_of("scoring", ROOT / "pyproject.toml"))
    for extra in ("trainer", "rollout-server"):
        assert shared <= set(requirements_of(extra, ROOT / "pyproject.toml"))


def test_torch_comes_from_its_own_index() -> None:
    """Images with torch install the pinned one first; the others install none."""
    project = ROOT / "pyproject.toml"
    assert torch_of(requirements_of("trainer,launcher", project)) == ["torch==2.13.0"]
    assert torch_of(requirements_of("weights", project)) == []


@pytest.mark.parametrize("extra", ["weights", "trainer,launcher", "quickstart"])
def test_an_image_has_all_that_its_extras_name(extra: str) -> None:
    """Extras of extras too, and what the SDK needs; nothing of ours, which no index serves."""
    found = set(requirements_of(extra, ROOT / "pyproject.toml"))
    named = {requirement for name in extra.split(",") for requirement in EXTRAS[name]}
    assert found >= {each for each in named if not each.startswith("seamflow")}
    assert found >= {*EXTRAS["chassis"], *PROJECT["dependencies"]}
    assert not [each for each in found if each.startswith("seamflow")]
