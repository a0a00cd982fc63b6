"""Output that nobody reads any longer, or that a full disk refuses, ends no launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PRINTS = """
import sys
from pathlib import Path
from services.launcher.report.output import survive_closed_output
if sys.argv[1] == "survive":
    survive_closed_output()
for number in range(20_000):
    print("step", number, flush=True)
Path(sys.argv[2]).write_text("summary")
"""


@pytest.mark.parametrize("output", ["closed pipe", "full disk"])
@pytest.mark.parametrize("kind", ["survive", "plain"])
def test_a_run_ends_by_itself_whatever_becomes_of_its_output(
    tmp_path: Path, output: str, kind: str
) -> None:
    """Control: plain streams end the program before it has written its summary."""
    summary = tmp_path / "summary"
    command = [sys.executable, "-c", _PRINTS, kind, str(summary)]
    if output == "full disk":
        with Path("/dev/full").open("w") as full:
            code = subprocess.run(command, stdout=full, stderr=full, check=False).returncode
    else:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"step 0\n"
            process.stdout.close()
        code = process.returncode
    assert (code == 0, summary.exists()) == ((True, True) if kind == "survive" else (False, False))
