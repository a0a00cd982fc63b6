"""Deltas of weights in float32 are named before a run starts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.launcher.checks.run_settings import deltas_that_cannot_pay, divided_threads, num_cores
from services.launcher.process_plan import plan
from services.launcher.supervisor import child_environment
from tests.lib.launcher.support import make_config, make_layout


def settings(dtype: str, encodings: tuple[str, ...], rank: int = 0) -> Any:
    """What counts of a trainer's and a rollout server's."""
    return {
        "trainer": SimpleNamespace(dtype=dtype, lora=SimpleNamespace(rank=rank)),
        "rollout_server/0": SimpleNamespace(weight_encodings=encodings),
        "weights": SimpleNamespace(),
    }


def test_deltas_of_float32_are_named_with_the_cure() -> None:
    """Who asks, why it saves nothing, and what to set."""
    (line,) = deltas_that_cannot_pay(settings("float32", ("delta", "zstd")))
    for part in ("rollout_server/0", "float32", 'dtype = "bfloat16"', '["zstd"]'):
        assert part in line


@pytest.mark.parametrize(
    "given",
    [
        settings("bfloat16", ("delta",)),
        settings("float32", ("zstd",)),
        settings("float32", ("delta",), rank=8),
        {"rollout_server": SimpleNamespace(weight_encodings=("delta",))},
    ],
)
def test_nothing_is_said_where_deltas_may_pay_or_none_are_asked_for(given: Any) -> None:
    """Small types, no deltas, adapters, and a run without a trainer."""
    assert deltas_that_cannot_pay(given) == []


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
