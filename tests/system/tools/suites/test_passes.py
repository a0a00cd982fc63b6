"""Which suite comes next, and what is recorded of those that passed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.suites.passes import (
    Pass,
    Suite,
    last_passes,
    next_in_rotation,
    record_pass,
    suites,
)

ROOT = next(each for each in Path(__file__).parents if (each / "pyproject.toml").exists())


def suite(name: str, *, in_ci: bool = True) -> Suite:
    """One with little about it."""
    return Suite(name=name, about="", run="", in_ci=in_ci)


def test_the_one_that_passed_longest_ago_is_next() -> None:
    """One without a pass before all others; those that CI cannot run never."""
    given = [suite("a"), suite("b"), suite("c", in_ci=False)]
    passes = {"a": Pass(date="2026-11-02", commit="1"), "b": Pass(date="2026-11-01", commit="2")}
    assert next_in_rotation(given, passes).name == "b"
    assert next_in_rotation([*given, suite("d")], passes).name == "d"


def test_a_pass_replaces_the_one_before_and_no_other(tmp_path: Path) -> None:
    """Read back from the file."""
    (tmp_path / "bench").mkdir()
    before = {"commit": "01234567", "date": "2026-11-01", "machine": "any"}
    record_pass(tmp_path, "b", 61.4, before)
    first = record_pass(tmp_path, "a", 10.0, before)
    second = record_pass(tmp_path, "b", 62.0, before)
    assert last_passes(tmp_path) == {"a": first, "b": second}
    assert second == Pass(date="2026-11-01", commit="01234567", seconds=62)


def test_each_suite_has_a_short_form_among_the_tests() -> None:
    """A renamed test is noticed."""
    known = suites(ROOT)
    assert known
    for each in known:
        assert (ROOT / each.short).is_file(), f"{each.name}: {each.short}"


def test_a_suite_is_run_by_its_name_and_an_unknown_one_named(tmp_path: Path) -> None:
    """With or without the prefix of tests; the environment's python is found first."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("*.pyc"))
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "suites.toml").write_text(
        '[test-one]\nabout = "a"\nshort = "s"\nrun = "command -v python > found; exit $CODE"\n'
    )
    for code, name in (("0", "one"), ("3", "test-one")):
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'sdk'}",
            "CODE": code,
        }
        command = [sys.executable, "-m", "tools.suites", "suite", name]
        assert subprocess.call(command, cwd=tmp_path, env=environment) == int(code)
        found = (tmp_path / "found").read_text().strip()
        assert Path(found).parent == Path(sys.executable).parent
    assert list(last_passes(tmp_path)) == ["test-one"], "the one that ended with 0"
    command[-1] = "two"
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    )
    assert "there is no 'two'; give one of test-one" in done.stderr
