"""Which suite comes next, and what is recorded of those that passed."""

from __future__ import annotations

import re
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
    return Suite(name=name, about="", short="", in_ci=in_ci)


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


def test_each_suite_is_a_target_and_has_a_short_form_among_the_tests() -> None:
    """A renamed target or test is noticed."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    known = suites(ROOT)
    assert known
    for each in known:
        assert each.name in targets
        assert (ROOT / each.short).is_file(), f"{each.name}: {each.short}"


def test_every_target_that_is_a_suite_is_listed() -> None:
    """Targets that start with test- or chaos-, but for those that `make test` has within."""
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^((?:test|chaos)-[a-z-]+):", text, flags=re.MULTILINE))
    parts = {"test-unit", "test-trackers", "test-algorithms", "test-sdk-range"}
    assert targets - parts <= {each.name for each in suites(ROOT)}
