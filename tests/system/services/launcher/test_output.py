"""Output that nobody reads any longer, or that a full disk refuses, ends no launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.chassis.errors import DependencyUnavailable
from services.launcher.phases.start import Start
from services.launcher.report.view import View
from tests.lib.launcher.support import make_config, make_layout

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


async def test_what_prepares_prints_to_a_log_where_there_is_no_terminal(tmp_path: Path) -> None:
    """A closed output would end it; where it fails, the message names the log."""
    module = f"made_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(
        "import sys\nprint('begins')\nraise SystemExit(len(sys.argv))\n"
    )
    config = make_config(prepare=module)
    layout = make_layout(config, tmp_path / "run")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(DependencyUnavailable, match=r"exited with code 5; see .*prepare\.log"),
    ):
        patch.chdir(tmp_path)
        await Start(config, layout, {}, View(tmp_path / "metrics.jsonl")).prepare()
    assert (layout.logs() / "prepare.log").read_text() == "begins\n"
