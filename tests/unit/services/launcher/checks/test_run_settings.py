"""Deltas of weights in float32 are named before a run starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.launcher.checks.run_settings import divided_threads, num_cores
from services.launcher.process_plan import plan
from services.launcher.supervisor import child_environment
from tests.lib.launcher.support import make_config, make_layout

NAMES = ("redis", "scheduler", "trainer-0", "rollout_server-a", "rollout_server-b", "scoring-r")


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
@pytest.mark.parametrize(
    ("given", "cores", "right"),
    [("64", 2, "1"), ("64", 16, "4"), ("5", 16, "4"), ("8,2", 16, "4"), (" 9 ", 4, "1")],
)
def test_they_are_divided(name: str, given: str, cores: int, right: str) -> None:
    """Cores by four processes that compute, one at least; the line has all figures."""
    found, (line,) = divided_threads({name: given}, NAMES, cores)
    assert found == {name: right}
    for part in (name, given.partition(",")[0].strip(), f"{cores} cores", f"gets {right};"):
        assert part in line


@pytest.mark.parametrize("given", ["4", "1", "0", "", "many", "-3"])
def test_what_fits_stays(given: str) -> None:
    """Control: nothing is said, and what is no number is the library's matter."""
    assert divided_threads({"OMP_NUM_THREADS": given}, NAMES, 16) == ({}, [])


def test_the_names_are_those_of_a_run(tmp_path: Path) -> None:
    """Two rollout servers and a trainer compute."""
    config = make_config(nodes=("a: rollout", "b: rollout train"))
    names = plan(config, make_layout(config, tmp_path))
    found, (line,) = divided_threads({"OMP_NUM_THREADS": "64"}, names, 12)
    assert found == {"OMP_NUM_THREADS": "4"}, line


def test_children_get_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher sets it for itself."""
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    changes, _ = divided_threads(os.environ, NAMES, num_cores())
    monkeypatch.setenv("OMP_NUM_THREADS", changes["OMP_NUM_THREADS"])
    assert int(child_environment({})["OMP_NUM_THREADS"]) <= num_cores()
