"""What `seamflow runs` lists without any service."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from seamflow.cli.main import main
from seamflow.inspect.run_folders import run_folders


def make_run(parent: Path, name: str, started: int, **files: object) -> Path:
    """A run folder with these JSON files, started at a time in seconds."""
    folder = parent / name
    folder.mkdir(parents=True)
    for file, content in {"addresses": {"rollout_gateway": "127.0.0.1:1"}, **files}.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    os.utime(folder / "addresses.json", (started, started))
    return folder


def test_runs_are_listed_with_state_steps_and_best(tmp_path: Path) -> None:
    """The newest first; the link to the latest is not a run, nor is any other folder."""
    first = make_run(tmp_path, "first", 1_000, summary={})
    (first / "metrics.jsonl").write_text(
        '{"step": 1, "reward_mean": 0.1}\n{"step": 2, "reward_mean": 0.25}\n{"step": 3, "rew'
    )
    (first / "checkpoints" / "best").mkdir(parents=True)
    (first / "checkpoints" / "best" / "best.json").write_text('{"step": 2, "value": 0.5}')
    make_run(tmp_path, "second", 2_000)
    (tmp_path / "latest").symlink_to("second")
    (tmp_path / "other").mkdir()
    second, found = run_folders(tmp_path)
    assert (second["run"], second["state"], second["steps"]) == ("second", "killed", "0")
    assert found["run"] == "first"
    assert found["state"] == "finished"
    assert (found["steps"], found["reward"], found["best"]) == ("2", "0.250", "0.500 at step 2")


def test_a_run_whose_gateway_answers_is_running(tmp_path: Path) -> None:
    """Also one that was resumed after its summary."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        make_run(tmp_path, "now", 1_000, summary={}, addresses={"rollout_gateway": address})
        assert run_folders(tmp_path)[0]["state"] == "running"


def test_the_command_prints_a_line_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what to do where there is none."""
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["runs", "--folder", str(tmp_path)])
        assert ended.value.code == 0
        make_run(tmp_path, f"run-{_}", 1_000)
    nothing, header, line = capsys.readouterr().out.splitlines()
    assert "start one with `seamflow train`" in nothing
    assert header.split()[:2] == ["run", "state"]
    assert line.split()[:2] == ["run-0", "killed"]


def test_a_run_has_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is listed in one line; control: a folder that is no run gets none."""
    make_run(tmp_path, "good", 1_000)
    where = ("runs", "--folder", str(tmp_path), "--note")
    with pytest.raises(SystemExit) as ended:
        main([*where, "good", "twice the rate\n#rate"])
    assert ended.value.code == 0
    assert "twice the rate #rate" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*where, "none", "lost"])
    assert ended.value.code == 64
    assert "none is no folder of a run" in capsys.readouterr().err
    assert [row["note"] for row in run_folders(tmp_path)] == ["twice the rate #rate"]


def test_a_run_that_does_not_learn_is_marked(tmp_path: Path) -> None:
    """By the names of the rules; one that learns is ok."""
    for name, reward, spread in (("good", 0.3, 0.2), ("bad", 0.0, 0.0)):
        step = {"reward_mean": reward, "reward_std": spread}
        lines = (json.dumps({"step": i, **step}) + "\n" for i in range(3))
        (make_run(tmp_path, name, 1_000) / "metrics.jsonl").write_text("".join(lines))
    found = {row["run"]: row["health"] for row in run_folders(tmp_path)}
    assert found == {"good": "ok", "bad": "rewards_equal"}
