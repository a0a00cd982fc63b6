"""How a run ended is known afterwards, to `seamflow runs` and the other commands."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from seamflow.cli.main import main
from seamflow.inspect.endpoints import add_flags, resolve
from seamflow.inspect.lives import recorded_life
from seamflow.inspect.run_folders import run_folders

from services.chassis.errors import ConfigError


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
        with recorded_life(folder):
            assert run_folders(folder.parent)[0]["state"] == "running"
            if error is not None:
                raise error
    except (KeyboardInterrupt, ConfigError):
        assert error is not None
    assert run_folders(folder.parent)[0]["state"] == state
    lines = (folder / "lives.jsonl").read_text().splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["started", state]


@pytest.mark.parametrize("command", ["status", "why-stuck", "dead-letters", "columns"])
def test_commands_say_that_the_run_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """And how its services are started again, instead of naming each that does not answer."""
    folder = folder_of(tmp_path)
    with pytest.raises(ConfigError), recorded_life(folder):
        raise ConfigError("no metric")
    with pytest.raises(SystemExit):
        main([command, "--run-folder", str(folder)])
    shown = "".join(capsys.readouterr())
    assert "failed at" in shown
    assert "(no metric)" in shown
    assert "seamflow serve --config FILE --name first --resume" in shown


def test_a_killed_run_is_told_without_asking_its_services(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has not written how it ended; no call is tried again and again."""
    folder = folder_of(tmp_path)
    (folder / "logs").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["dead-letters", "--run-folder", str(folder)])
    assert ended.value.code == 69
    (line,) = capsys.readouterr().err.splitlines()
    assert "`seamflow train --config FILE --name first --resume` continues it" in line


def test_what_is_in_the_folder_is_read_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """status, and the answers that an agent of the launcher has received."""
    folder = folder_of(tmp_path)
    with recorded_life(folder):
        steps = [{"step": 1, "reward_mean": 0.1}, {"step": 2, "reward_mean": 0.5, "grad_norm": 0}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
        (folder / "evaluation.jsonl").write_text('{"step": 2, "mean": 0.75, "is_best": true}\n')
        parts = [{"rollout_id": "r", "turn_id": "t", "token_ids": ids} for ids in ([5, 6], [7])]
        (folder / "received.jsonl").write_text("".join(json.dumps(p) + "\n" for p in parts) + "{")

    def shown(*command: str) -> str:
        with pytest.raises(SystemExit):
            main([*command, "--run-folder", str(folder)])
        return "".join(capsys.readouterr())

    status = shown("status")
    assert "step 2; mean reward 0.100 (step 1) → 0.500 (step 2)" in status
    assert "grad_norm 0 !" in status
    assert "held-out reward, step 2: 0.750  (best)" in status
    assert shown("tail").splitlines()[0] == "r"
    assert "5 6 7" in shown("tail", "r")
    assert "holds no answers of rollout 'other'" in shown("tail", "other")


def test_a_run_that_was_moved_is_continued_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model too, if it lies in the folder."""
    folder = folder_of(tmp_path)
    addresses = json.loads((folder / "addresses.json").read_text())
    facts = {"folder": str(folder), "model": str(folder / "prepared" / "model")}
    (folder / "addresses.json").write_text(json.dumps({**addresses, **facts}))
    with recorded_life(folder):
        pass
    moved = folder.rename(tmp_path / "first")

    with pytest.raises(SystemExit):
        main(["status", "--run-folder", str(moved)])
    shown = capsys.readouterr().out
    assert f"--name first --runs-folder {tmp_path} --resume" in shown
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = parser.parse_args(["--run-folder", str(moved)])
    assert resolve(given, {}).model == str(moved / "prepared" / "model")
