"""The form of measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import Report, ratio


def test_the_last_line_is_the_json_that_is_also_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs read the last line, or the file: both say the same."""
    Report(bench="demo", figures={"speed": 2.0}, raw={"speed": [2.0]}, seeds=[7]).publish(tmp_path)
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line == (tmp_path / "demo.json").read_text().strip()
    result = json.loads(line)
    assert {"bench", "figures", "raw", "seeds", "versions", "peers"} <= result.keys()
    assert {"commit", "date", "machine", "runs"} <= result.keys()
    assert result["runs"] == 1
    assert json.loads(line)["figures"] == {"speed": 2.0}


def test_a_ratio_is_the_median_of_interleaved_samples() -> None:
    """One outlier on a noisy machine does not decide."""
    assert ratio([2, 4, 6, 8, 100], [1, 2, 3, 4, 5]) == 2


def test_a_ratio_of_few_samples_is_refused() -> None:
    """Four samples prove nothing."""
    with pytest.raises(ValueError, match="at least 5"):
        ratio([1, 2, 3, 4], [1, 2, 3, 4])
