"""The changes of a mixed run, and the trees that they start processes from."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from services.launcher.child_process import ProcessPlan
from tests.suites.mixed.__main__ import broken_release, run_of
from tests.suites.mixed.changes import UPGRADE_ORDER, Change, changes
from tests.suites.mixed.mixed_run import ChangeError
from tests.suites.mixed.source_tree import ROOT, SourceTree, changed_requirements, export
from trainer import fsync_files

OLD, NEW = SourceTree(name="old", root=Path("/old")), SourceTree(name="present", root=ROOT)
NAMES = ("a", "b", "c", "d", "e", "f")


def test_every_process_goes_back_and_forward_alone_and_in_a_row() -> None:
    """Each change is one: the process came from the other tree before."""
    trees = dict.fromkeys(NAMES, NEW)
    mixes = set()
    for change in changes(NAMES, OLD, NEW, seed=3):
        assert trees[change.process] is not change.tree
        trees[change.process] = change.tree
        mixes.add(Counter(tree.name for tree in trees.values())["old"])
    assert set(trees.values()) == {NEW}
    assert mixes == set(range(len(NAMES) + 1))


def test_the_seed_draws_the_order_of_the_downgrade() -> None:
    """Any process first."""

    def downgrade(seed: int) -> tuple[str, ...]:
        made = changes(NAMES, OLD, NEW, seed)
        return tuple(c.process for c in made if c.phase == "rolling downgrade")

    assert sorted(downgrade(0)) == sorted(NAMES)
    assert downgrade(0) == downgrade(0)
    assert len({downgrade(seed) for seed in range(9)}) > 1


def test_a_process_runs_from_its_tree_and_keeps_its_settings() -> None:
    """Whatever the folder that it is started in."""
    plan = ProcessPlan(name="x", command=("python",), environment={"SEAMFLOW_X_PORT": "1"})
    started = NEW.started(plan, Path("/x.port"))
    assert started.environment["SEAMFLOW_X_PORT"] == "1"
    assert started.environment["PYTHONPATH"] == f"{ROOT}/sdk:{ROOT}"
    NEW.check()


def test_a_release_gets_no_settings_that_it_has_not_got() -> None:
    """It would refuse them; its operator would not set them."""
    given = ("SEAMFLOW_TRAINER_TRACKING__METRICS_FILE", "SEAMFLOW_TRAINER_TRACKING__LATER")
    plan = ProcessPlan(name="x", command=("python",), environment=dict.fromkeys(given, "1"))
    started = NEW.started(plan, Path("/x.port"))
    assert [name for name in given if name in started.environment] == [given[0]]


def test_a_tree_that_is_not_the_one_imported_is_noticed(tmp_path: Path) -> None:
    """Negative control: an empty folder, in front of whatever is installed."""
    with pytest.raises(RuntimeError, match="would not run from"):
        SourceTree(name="empty", root=tmp_path).check()


def test_a_release_is_exported_from_git(tmp_path: Path) -> None:
    """Its own tree; a release that is not there names the cure."""
    repository = tmp_path / "repository"
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    (repository / "pyproject.toml").write_text('[project]\ndependencies = ["grpcio>=2"]\n')
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "a"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)
    (repository / "pyproject.toml").write_text('[project]\ndependencies = ["grpcio>=3"]\n')
    tree = export("v1", tmp_path / "old", repository)
    assert changed_requirements(tree.root, repository) == ["- grpcio>=2", "+ grpcio>=3"]
    with pytest.raises(ValueError, match=r"'v9'.*git fetch --tags"):
        export("v9", tmp_path / "other", repository)


def test_the_broken_release_cannot_read_a_checkpoint(tmp_path: Path) -> None:
    """What the control starts is broken in the way that it should be."""
    tree = broken_release(tmp_path / "tree")
    tree.check()
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / fsync_files.COMPLETE).touch()
    reads = "from pathlib import Path; from trainer.checkpoint.checkpoint_files import read_state; "
    reads += f"read_state(Path({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", reads],
        env={**tree.environment(), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == "TypeError: Checkpoint got an unexpected field"


def test_all_processes_of_a_run_are_changed() -> None:
    """None that is added to the launcher is left out."""
    run = run_of(Path("/nowhere"), [])
    assert sorted(UPGRADE_ORDER) == sorted(set(run.plans) - {"redis"})


async def test_a_change_after_which_training_stands_still_is_named(tmp_path: Path) -> None:
    """Process, tree, phase, and what the process wrote last."""
    change = Change(phase="one at a time", process="trainer", tree=OLD)
    run = run_of(tmp_path, [change])
    run.current, run.bound_seconds = change, 0.01
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("TypeError: unexpected field\n")
    expected = "trainer from old .*did not go on within(.|\n)*TypeError: unexpected field"
    with pytest.raises(ChangeError, match=expected):
        await run._within_bound(str(change), asyncio.sleep(60))
