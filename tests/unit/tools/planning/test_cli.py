"""`python -m tools.planning`, for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.planning.cli import main

ROOT = Path(__file__).parents[4]


PROFILE = "[generation]\n8 = 500.0\n64 = 62.5\n[training]\n8 = 300\n64 = 37.5\n"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile whose best split of 64 nodes is 40 and 24."""
    path = tmp_path / "profile.toml"
    path.write_text(PROFILE)
    return path


def row(output: str, name: str) -> list[str]:
    """The cells of the row called `name`."""
    line = next(line for line in output.splitlines() if f"│ {name}" in line)
    return [cell.strip() for cell in line.strip().strip("│").split("│")][1:]


def test_two_datacentres_are_shown_with_their_full_size(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is given back, and what it costs."""
    main([f"--profile={profile}", "--generation-nodes=32", "--training-nodes=64"])
    output = capsys.readouterr().out
    assert row(output, "best")[:2] == ["32", "19"]
    assert row(output, "all")[:2] == ["32", "64"]


def test_kinds_of_devices_give_a_plan_its_price(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """32 nodes of 8 H20s at 1.00 and 19 of 8 H800s at 2.85, for 125 s; without kinds no column."""
    given = [f"--profile={profile}", "--generation-nodes=32", "--training-nodes=64"]
    main(given)
    assert "dollars" not in capsys.readouterr().out
    main([*given, "--generation-kind=h20-96", "--training-kind=h800-80", "--devices=8"])
    best = row(capsys.readouterr().out, "best")
    hourly = 8 * (32 * 1.0 + 19 * 2.85)
    assert float(best[-1]) == pytest.approx(hourly * float(best[4]) / 3600, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--generation-kind=h20-96"], "give both"),
        (["--generation-kind=h20", "--training-kind=h800-80"], "'h20': give one of"),
    ],
)
def test_an_unknown_kind_is_refused(
    flags: list[str], part: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With those that are known."""
    with pytest.raises(SystemExit):
        main([f"--profile={profile}", "--nodes=64", *flags])
    assert part in capsys.readouterr().err


ROLES = """
[rollout]
seconds = { 4 = 620.0, 64 = 52.0 }
elastic = true
switch_seconds = 6.0
[reward]
seconds = { 1 = 80.0, 8 = 10.0 }
streams_from = ["rollout"]
shares_nodes = false
[train]
seconds = { 8 = 190.0, 64 = 31.0 }
after = ["reward"]
switch_seconds = 6
"""


def test_roles_are_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which tags how many nodes carry, and when each role works."""
    path = tmp_path / "roles.toml"
    path.write_text(ROLES)
    main([f"--roles={path}", "--nodes=64", "--device-bytes=1"])
    output = capsys.readouterr().out
    assert row(output, "rollout, train") == ["62"]
    assert row(output, "reward") == ["2"]
    assert row(output, "train")[0] == row(output, "rollout ")[1]


def pools(path: Path) -> dict[str, Any]:
    """Those of a written plan, each of which the chart has with the same keys."""
    chart = yaml.safe_load((ROOT / "deploy/helm/seamflow/values.yaml").read_text())["nodePools"]
    planned: dict[str, Any] = json.loads(path.read_text())["nodePools"]
    assert planned.keys() == chart.keys()
    assert all(values.keys() <= chart[name].keys() for name, values in planned.items())
    return planned


def test_a_split_is_written_as_pools_of_the_chart(profile: Path, tmp_path: Path) -> None:
    """Helm carries it out."""
    main([f"--profile={profile}", "--nodes=64", f"--values={tmp_path / 'plan.json'}"])
    assert pools(tmp_path / "plan.json") == {
        "rollout": {"enabled": True, "replicas": 40, "tags": ["rollout"]},
        "train": {"enabled": True, "replicas": 24, "tags": ["train"]},
    }


def test_a_placement_is_written_as_pools_of_the_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool without nodes is switched off; tags for which the chart has no pool are an error."""
    path, plan = tmp_path / "roles.toml", tmp_path / "plan.json"
    without_reward = ROLES.replace('after = ["reward"]', 'after = ["rollout"]')
    head, _, tail = without_reward.partition("[reward]")
    path.write_text(head + tail[tail.index("[train]") :])
    flags = [f"--roles={path}", "--nodes=64", "--device-bytes=1", f"--values={plan}"]
    main(flags)
    assert pools(plan) == {
        "train": {"enabled": True, "replicas": 64, "tags": ["rollout", "train"]},
        "rollout": {"enabled": False},
    }
    path.write_text(ROLES)
    with pytest.raises(SystemExit, match="64"):
        main(flags)
    assert "no pool of its own for 2 nodes with the tags ['reward']" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one role"),
        ("rollout = 3", "[rollout]: 3 is no table"),
        ("[rollout]", "[rollout]: seconds by number of nodes are not set"),
        (ROLES.replace("switch_seconds", "switch_second"), "[rollout]: switch_second: unknown key"),
        (ROLES.replace("switch_seconds", "profile"), "[rollout]: profile: unknown key"),
        (
            ROLES.replace('after = ["reward"]', 'after = ["critic"]'),
            "after of train names 'critic'",
        ),
    ],
)
def test_wrong_roles_end_with_78(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the file and the place in it."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match="78"):
        main([f"--roles={path}", "--nodes=64", "--device-bytes=1"])
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error


def test_roles_take_nodes_and_their_memory(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage is checked before the file is read."""
    with pytest.raises(SystemExit, match="64"):
        main([f"--roles={profile}", "--nodes=64"])
    assert "--roles takes --nodes and --device-bytes" in capsys.readouterr().err


def test_help_shows_what_a_profile_looks_like(capsys: pytest.CaptureFixture[str]) -> None:
    """It can be written from --help alone."""
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    output = capsys.readouterr().out
    assert "[generation]" in output
    assert "--generation-nodes" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--profile takes --nodes, or --generation-nodes and --training-nodes"),
        (["--nodes=64", "--training-nodes=8"], "takes --nodes, or"),
        (["--nodes=many"], "invalid int value: 'many'"),
        (["--nodes=15"], "num_nodes is 15: too few to do both stages"),
        (["--generation-nodes=4", "--training-nodes=8"], "generation_nodes is 4: too few"),
    ],
)
def test_wrong_usage_ends_with_64(
    profile: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the cure."""
    with pytest.raises(SystemExit, match="64"):
        main([f"--profile={profile}", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("generation = [", "not TOML"),
        ("[generation]\n8 = 1.0\n", "[training]: seconds by number of nodes are not set"),
        (PROFILE + "[rollout]\n", "rollout: unknown key"),
        (PROFILE.replace("8 = 300", "many = 300"), "[training]: 'many' is no number of nodes"),
        (PROFILE.replace("8 = 300", "8 = 'slow'"), "[training]: Input should be a valid number"),
        (PROFILE.replace("8 = 300", "8 = 3"), "[training]: 64 nodes take 37.5 s and 8 take 3.0 s"),
    ],
)
def test_a_wrong_profile_ends_with_78(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the file and the place in it."""
    path = tmp_path / "wrong.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="78"):
        main([f"--profile={path}", "--nodes=64"])
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error


FUSED = """
[actor]
stages = 8
micro_batches = 8
forward_seconds = 5
backward_seconds = [10, 10, 10, 10, 10, 10, 10, 10]
activation_bytes = 1.95
"""


CRITIC = """
[critic]
stages = 4
micro_batches = 4
forward_seconds = 4
backward_seconds = 8
activation_bytes = 2
"""


def test_a_fused_pipeline_is_shown_next_to_unfused_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """RLHFuse's third setting: 225 instead of 297; and a line for each node."""
    path = tmp_path / "pipelines.toml"
    path.write_text(FUSED + CRITIC)
    main([f"--fuse={path}"])
    output = capsys.readouterr().out
    assert row(output, "1F1B, queued")[0] == "297"
    assert row(output, "greedy")[0] == "239"
    assert row(output, "found by")[0] == row(output, "least possible")[0] == "225"
    assert sum("A" in line and "a" in line for line in output.splitlines()[-8:]) == 8


def test_the_device_limits_the_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte less than a micro-batch of each model is an error."""
    path = tmp_path / "pipelines.toml"
    path.write_text(FUSED + CRITIC)
    with pytest.raises(SystemExit):
        main([f"--fuse={path}", "--device-bytes=3"])
    assert "a node needs 3.95" in capsys.readouterr().err


def test_the_cost_of_a_failed_stage_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rerouting through a peer costs what the bound says; the last stage gains nothing."""
    path = tmp_path / "pipelines.toml"
    four = FUSED.replace("stages = 8", "stages = 4").replace("= 5", "= 1")
    path.write_text(four.replace("[10, 10, 10, 10, 10, 10, 10, 10]", "2"))
    main([f"--fuse={path}", "--replicas=2"])
    output = capsys.readouterr().out
    assert [row(output, str(stage))[0] for stage in range(4)] == ["48", "51", "54", "57"]


def test_a_misspelt_key_of_a_pipeline_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its nearest neighbour."""
    path = tmp_path / "pipelines.toml"
    path.write_text(FUSED.replace("micro_batches", "micro_batch"))
    with pytest.raises(SystemExit):
        main([f"--fuse={path}"])
    assert "[actor]: micro_batch: unknown key" in capsys.readouterr().err
