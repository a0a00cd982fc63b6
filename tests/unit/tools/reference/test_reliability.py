"""The scorecard: what its rows name exists, and its verdicts follow from the figures."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tools.provenance import ROOT
from tools.reference.reliability import Scorecard, reliability_page
from tools.suites.passes import suites

CARD = Scorecard(ROOT)
LIMITED = {"what": "w", "at_most": {"drill.lost": 0}, "at_least": {"drill.kills": 50}}


def functions(file: Path) -> set[str]:
    """Names of the functions of a Python file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize("row", CARD.rows, ids=lambda row: row["what"][:40])
def test_each_row_has_evidence_that_exists_or_says_what_is_missing(row: dict[str, Any]) -> None:
    """A renamed test or figure leaves no row behind."""
    figures = [*row.get("at_most", {}), *row.get("at_least", {}), *row.get("shown", [])]
    assert figures or row.get("tests") or row["missing"]
    for figure in figures:
        CARD.value(figure)
    for test in row.get("tests", []):
        file, _, name = test.partition("::")
        assert name in functions(ROOT / file), test


def test_there_are_28_rows() -> None:
    """None is left out because it is not met."""
    assert len(CARD.rows) == 28
    rows, _, suites_outside = reliability_page(ROOT).partition("## Suites")
    assert rows.count("\n| ") == 28 + 1
    assert suites_outside.count("\n| `make ") == len(suites(ROOT))


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"lost": 0, "kills": 50}, "met"),
        ({"lost": 1, "kills": 50}, "**not met**"),
        ({"lost": 0, "kills": 20}, "partly"),
        (None, "not measured"),
    ],
)
def test_a_verdict_follows_from_the_figures(
    tmp_path: Path, figures: dict[str, float] | None, verdict: str
) -> None:
    """Nobody writes it."""
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    (tmp_path / "bench" / "scorecard.toml").write_text("row = []")
    if figures is not None:
        (results / "drill.json").write_text(json.dumps({"figures": figures}))
    assert Scorecard(tmp_path).verdict(LIMITED) == verdict


def test_a_figure_that_a_result_lacks_is_noticed() -> None:
    """Negative control."""
    with pytest.raises(KeyError):
        CARD.value("chaos_store.tokens_found")
