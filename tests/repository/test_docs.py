"""The pages: what they link to exists, and what is promised names the test that proves it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUARANTEES = ROOT / "docs" / "guarantees.md"
PAGES = (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md")))

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_PATH = re.compile(r"`(?P<path>[\w./-]+/[\w.-]+\.(?:py|md|toml|proto|lua|conf))`")
_NOT_PROMISED = "What is not promised"


def links(text: str) -> Iterator[tuple[str, str]]:
    """Text and target of each link to a file of the repository, without the part after #."""
    for link in _LINK.finditer(text):
        target = link["target"].partition("#")[0]
        if target and "://" not in target:
            yield link["text"], target


@cache
def functions(file: Path) -> frozenset[str]:
    """Names of the functions of a Python file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, found))


def named(text: str) -> Iterator[tuple[str, Path]]:
    """Each function that `text` names as [`name`](file.py), relative to the page of guarantees."""
    for name, target in links(text):
        if name.startswith("`") and target.endswith(".py"):
            yield name.strip("`"), (GUARANTEES.parent / target).resolve()


def proves(name: str, file: Path) -> bool:
    """Whether a function is a test, or a scenario of `make chaos-store`."""
    if file.is_relative_to(ROOT / "tests" / "chaos"):
        return True
    return file.is_relative_to(ROOT / "tests") and name.startswith("test_")


def promises() -> Iterator[str]:
    """Each promise of the page, one list item with its proof."""
    for section in GUARANTEES.read_text(encoding="utf-8").split("\n#"):
        if _NOT_PROMISED not in section.partition("\n")[0]:
            for item in section.split("\n- ")[1:]:
                yield item.partition("\n\n")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_exists(page: Path) -> None:
    """Files and folders of the repository, as links or as paths in code."""
    text = page.read_text(encoding="utf-8")
    paths = [page.parent / target for _, target in links(text)]
    paths += [ROOT / path["path"] for path in _PATH.finditer(text)]
    assert paths
    assert [path for path in paths if not path.exists()] == []


def test_what_the_guarantees_name_exists() -> None:
    """A test that was renamed leaves no promise without proof behind."""
    proofs = list(named(GUARANTEES.read_text(encoding="utf-8")))
    assert proofs
    assert [f"{file.name}::{name}" for name, file in proofs if name not in functions(file)] == []


def test_each_promise_names_its_proof() -> None:
    """At least one test or scenario; what has none belongs to what is not promised."""
    found = list(promises())
    assert len(found) > 50
    assert [p for p in found if not any(proves(*proof) for proof in named(p))] == []


def test_a_promise_without_proof_is_noticed() -> None:
    """Negative control: a helper is no proof, and neither is a link without a name."""
    assert not proves(
        "lose_the_master", ROOT / "tests/integration/trajectory_manager/store/test_topologies.py"
    )
    assert not proves("redis_store", ROOT / "trajectory_manager/store/redis/connect.py")
    assert list(named("Nothing is lost: see [the test](../tests/repository/test_docs.py).")) == []
