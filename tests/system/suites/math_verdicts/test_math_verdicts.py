"""The reward "math" beside math-verify alone, in short: a process, as it uses alarms."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.suites.math_verdicts.pairs import collections


def test_no_collection_has_more_false_verdicts_than_the_library_alone() -> None:
    """In neither direction; in sum it has fewer of both."""
    command = [sys.executable, "-m", "tests.suites.math_verdicts", "--pairs", "120"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])["figures"]
    for kind in ("false_ones", "false_zeros"):
        assert figures[f"ours.{kind}"] < figures[f"math_verify.{kind}"]


def test_a_judge_that_always_or_never_agrees_has_false_verdicts() -> None:
    """The control: both right and wrong answers are in each collection."""
    for name, pairs in collections(54, 0, packages=False).items():
        assert {pair.is_right for pair in pairs} == {True, False}, name
