"""The `seamflow` command as a process, against a small run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import seamflow as seamflow_package

from tests.lib.mostly_long import mostly_long
from tests.lib.sdk.run_services import Run, environment, policy, trajectory, turn, write_addresses
from tests.lib.sdk.support import serving

NOBODY = "127.0.0.1:1"


async def seamflow(*arguments: str, cwd: Path, **variables: str) -> tuple[int, str, str]:
    """Exit code, output and errors of one command."""
    ours = {name: v for name, v in os.environ.items() if not name.startswith("SEAMFLOW_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "seamflow.cli.main", *arguments),
        cwd=cwd,
        env={**ours, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(30):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, out.decode(), err.decode()


@asynccontextmanager
async def running(folder: Path, run: Run) -> AsyncIterator[None]:
    """The run, with its runs/latest below `folder`."""
    async with serving(*run.added()) as address:
        run.offer_server(address)
        write_addresses(folder / "runs" / "latest", address)
        yield


async def test_status_is_one_screen(tmp_path: Path) -> None:
    """Groups, steps, trainer, weights, gateway, nodes and servers; exit code 0."""
    async with running(tmp_path, Run()):
        code, out, err = await seamflow("status", cwd=tmp_path)
    assert (code, err) == (0, "")
    for part in (
        "2 ready of 4 a step, 3 running (12 rollouts), 1 admissible; 40 tasks queued",
        "7 leased, 6 committed",
        "31 groups admitted, 2 discarded, 5 samples replaced",
        "2 dead letters, 0 groups waiting for columns, 0 kept for replay; 123,456 tokens stored",
        "waiting, step 6 of 200, published v6, checkpoint at step 5, ranks 2",
        "loss 0.125",
        "v6 of step 6",
        "gateway  serving",
        "n0    rollout,train  rollout (lent)  active  7",
        "8/16",
    ):
        assert part in out
    assert len(out.splitlines()) <= 24


async def test_status_as_json_leaves_nothing_out(tmp_path: Path) -> None:
    """Zeros are numbers, absent messages null, enums their names."""
    async with running(tmp_path, Run()):
        code, out, _ = await seamflow("status", "--json", cwd=tmp_path)
    snapshot = json.loads(out)
    assert code == 0
    assert snapshot["readiness"]["num_ready_groups"] == 2
    assert snapshot["trainer"]["state"] == "TRAINER_STATE_WAITING"
    assert snapshot["trainer"]["metrics"] == {"loss": 0.125}
    assert snapshot["nodes"][0]["assignment"]["node_index"] == 0
    assert snapshot["nodes"][0]["capability_tags"] == ["rollout", "train"]
    assert snapshot["servers"][0]["info"]["num_queued"] == 0
    assert snapshot["oldest_rollout"] is None


async def test_an_unreachable_service_is_shown_with_its_settings(tmp_path: Path) -> None:
    """The others are shown all the same; exit code 69."""
    async with running(tmp_path, Run()):
        code, out, _ = await seamflow("status", "--scheduler", NOBODY, cwd=tmp_path)
    assert code == 69
    assert f"{NOBODY} does not answer; set by --scheduler or SEAMFLOW_SCHEDULER" in out
    assert "2 ready of 4" in out


async def test_an_unknown_run_is_an_error(tmp_path: Path) -> None:
    """The service's own words, and exit code 69."""
    async with running(tmp_path, Run()):
        code, out, _ = await seamflow("status", "--run", "other", cwd=tmp_path)
    assert code == 69
    assert "no run 'other'" in out


async def test_why_stuck_prints_causes_and_cures(tmp_path: Path) -> None:
    """Plain sentences for people, the same as objects for programs."""
    async with running(tmp_path, Run()):
        code, out, _ = await seamflow("why-stuck", cwd=tmp_path)
        _, as_json, _ = await seamflow("why-stuck", "--json", cwd=tmp_path)
    assert code == 0
    assert "The trainer waits for 4 groups for step 7: 2 ready" in out
    assert [finding["rule"] for finding in json.loads(as_json)] == ["trainer_waits_for_groups"]


async def test_drain_and_its_undo(tmp_path: Path) -> None:
    """The scheduler is called; a wrong name is a usage error."""
    run = Run()
    async with running(tmp_path, run):
        code, out, _ = await seamflow("drain", "n0", cwd=tmp_path)
        assert (code, run.node.draining) == (0, True)
        assert "n0 is drained" in out
        await seamflow("drain", "n0", "--undo", cwd=tmp_path)
        assert not run.node.draining
        code, _, err = await seamflow("drain", "n9", cwd=tmp_path)
    assert (code, err) == (64, "seamflow: no node 'n9'\n")


async def test_drain_without_a_scheduler_exits_69(tmp_path: Path) -> None:
    """The error names the scheduler's address."""
    code, _, err = await seamflow("drain", "n0", cwd=tmp_path, SEAMFLOW_SCHEDULER=NOBODY)
    assert code == 69
    assert f"scheduler at {NOBODY} does not answer" in err


async def test_tail_prints_each_token_once_and_marks_new_weights(tmp_path: Path) -> None:
    """Over a broken stream, with a version change in the middle of a turn."""
    run = Run()
    first = turn("t1", [1, 2, 3], environment(0, 2), policy(2, 1, 5))
    grown = turn("t1", [1, 2, 3, 4, 5], environment(0, 2), policy(2, 2, 5), policy(4, 1, 6))
    whole = turn(
        "t1", [1, 2, 3, 4, 5], environment(0, 2), policy(2, 2, 5), policy(4, 1, 6), ended=True
    )
    run.snapshots = [
        [trajectory(first)],
        [trajectory(first), trajectory(grown), trajectory(whole, reward=0.5)],
    ]
    async with running(tmp_path, run):
        code, out, err = await seamflow("tail", "r1", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines() if line] == [
        "── turn t1, 0 tokens shared",
        "[environment] 1 2",
        "[environment → v5 s0] 3 4",
        "[v5 s0 → v6 s0] 5",
        "── stop",
        "finished: reward 0.5",
    ]


async def test_wrong_usage_ends_with_64(tmp_path: Path) -> None:
    """Its message is on stderr."""
    code, out, err = await seamflow("trian", cwd=tmp_path)
    assert (code, out) == (64, "")
    assert "there is no command 'trian'; did you mean train?" in err


@pytest.mark.parametrize(
    "verb", mostly_long(["train", "serve", "evaluate", "export-model"], "train", short=__file__)
)
async def test_verbs_of_other_modules_have_the_same_form_of_help(tmp_path: Path, verb: str) -> None:
    """Exit code 0, and a usage line with the command that was typed."""
    code, out, _ = await seamflow(verb, "--help", cwd=tmp_path)
    assert code == 0
    assert out.startswith(f"usage: seamflow {verb} ")


async def test_tail_without_a_rollout_lists_them(tmp_path: Path) -> None:
    """Those that the trajectory manager keeps."""
    run = Run()
    async with running(tmp_path, run):
        code, out, err = await seamflow("tail", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] in ("follow one with `seamflow tail ID`", "no rollouts yet")


async def test_train_runs_from_any_folder(tmp_path: Path) -> None:
    """The checkout is the one that seamflow was installed from; paths are the caller's."""
    code, _, err = await seamflow("train", "--config", "my.toml", cwd=tmp_path)
    assert code == 78
    assert "--config my.toml: No such file" in err


def test_train_replaces_itself_by_the_launcher(tmp_path: Path) -> None:
    """Where no services are installed that of the checkout around the current folder, with the
    same arguments and the launcher's own exit code; without a checkout there is none: code 78."""
    package = Path(seamflow_package.__file__).parent
    shutil.copytree(package, tmp_path / "site" / "seamflow")
    (tmp_path / "site" / "seamflow-1.dist-info").mkdir()
    (tmp_path / "site" / "seamflow-1.dist-info" / "METADATA").write_text("Name: seamflow\n")
    launcher = tmp_path / "clone" / "services" / "launcher"
    launcher.mkdir(parents=True)
    (tmp_path / "clone" / "services" / "__init__.py").touch()
    (launcher / "__main__.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    (tmp_path / "clone" / "examples").mkdir()

    def train(folder: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "seamflow.cli.main", "train", "--config", "my.toml"],
            cwd=tmp_path / folder,
            env={"PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    assert train("clone/examples") == (3, "['--config', 'my.toml']\n", "")
    code, _, err = train("site")
    assert code == 78
    assert "this installation of seamflow has no services" in err
