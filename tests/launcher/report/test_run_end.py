"""How a run ended is known afterwards, to `seamflow runs` and the other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from seamflow.cli.main import main
from seamflow.cli.run_folders import run_folders

from services.chassis.errors import ConfigError
from services.launcher.report.run_end import recorded_end


def folder_of(tmp_path: Path) -> Path:
    """A run that no process serves any more."""
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    addresses = {"run_id": "first", "rollout_gateway": "127.0.0.1:9", "trainer": "127.0.0.1:9"}
    (folder / "addresses.json").write_text(json.dumps(addresses))
    return folder


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "finished"), (KeyboardInterrupt(), "stopped"), (ConfigError("no metric"), "failed")],
)
def test_runs_tells_how_each_ended(tmp_path: Path, error: BaseException | None, state: str) -> None:
    """Finished, stopped by Ctrl-C, or failed."""
    folder = folder_of(tmp_path)
    try:
        with recorded_end(folder):
            assert run_folders(folder.parent)[0]["state"] == "killed"
            if error is not None:
                raise error
    except (KeyboardInterrupt, ConfigError):
        assert error is not None
    assert run_folders(folder.parent)[0]["state"] == state


@pytest.mark.parametrize("command", ["status", "why-stuck", "dead-letters"])
def test_commands_say_that_the_run_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """And how its services are started again, instead of naming each that does not answer."""
    folder = folder_of(tmp_path)
    with pytest.raises(ConfigError), recorded_end(folder):
        raise ConfigError("no metric")
    with pytest.raises(SystemExit):
        main([command, "--run-folder", str(folder)])
    shown = "".join(capsys.readouterr())
    assert "failed at" in shown
    assert "(no metric)" in shown
    assert "seamflow serve --config FILE --resume" in shown
