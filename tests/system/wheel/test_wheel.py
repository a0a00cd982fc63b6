"""The wheel carries the services, in a folder of its own, and `seamflow` runs them from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.system.wheel.only_packages import link_packages, names_of, run_with

ROOT = Path(__file__).parents[3]
SERVICES = (
    "services",
    "trajectory_manager",
    "rollout",
    "scheduler",
    "trainer",
    "adapters",
    "tools/backup",
    "tools/plan",
)
COMMAND = "from seamflow.cli.main import main; main()"


def tops(names: Iterable[str]) -> set[str]:
    """What site-packages gets at its top, but for the record of the installation."""
    return {top for name in names if not (top := name.split("/")[0]).endswith(".dist-info")}


def test_site_packages_gets_one_name(wheel: Path) -> None:
    """`trainer` or `services` there would be taken for somebody else's; control: one such file."""
    names = ZipFile(wheel).namelist()
    assert tops(names) == {"seamflow"}
    assert tops([*names, "trainer/__init__.py"]) != {"seamflow"}


def test_it_carries_every_file_of_the_services(site: Path) -> None:
    """Scripts of the store and type information too; no tests, measurements or compiled files."""
    private = site / "seamflow" / "_services"
    for folder, copied in [*((f, private / f) for f in SERVICES), ("sdk/seamflow", private.parent)]:
        files = {file.relative_to(ROOT / folder) for file in (ROOT / folder).rglob("*.*")}
        files = {file for file in files if "__pycache__" not in file.parts}
        assert files
        assert [file for file in sorted(files) if not (copied / file).exists()] == []
    assert not list(site.rglob("*.pyc"))
    assert not [each for each in private.iterdir() if each.name in ("tests", "bench", "sim")]


def seamflow(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command of the unpacked wheel, with all packages of this environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEAMFLOW_")}
    return subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, *arguments],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def project(site: Path, tmp_path: Path) -> Path:
    """What `seamflow init` writes."""
    made = seamflow(site, "init", "p", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    return tmp_path / "p"


def test_train_runs_from_the_wheel_alone(site: Path, project: Path, tmp_path: Path) -> None:
    """Every process is found and checked, in a folder without a checkout; the code is the wheel's.

    Control: without the folder of the services nothing is.
    """
    done = seamflow(site, "train", "--dry-run", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "512 tasks, repeated, for 60 steps" in done.stdout
    assert not (project / "runs").exists()
    done = seamflow(site, "train", cwd=tmp_path)
    assert done.returncode == 78
    assert "there is no train.toml here: name the TOML file" in done.stderr
    shutil.copytree(site, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "seamflow" / "_services" / "services")
    done = seamflow(tmp_path / "bare", "train", "--dry-run", cwd=project)
    assert done.returncode == 78
    assert "this installation of seamflow has no services: install the wheel" in done.stderr


def test_the_code_of_the_wheel_runs_even_within_a_checkout(site: Path, tmp_path: Path) -> None:
    """Otherwise SDK and services of two releases would run together."""
    shutil.copytree(site, tmp_path / "site")
    launcher = tmp_path / "site" / "seamflow" / "_services" / "services" / "launcher"
    (launcher / "__main__.py").write_text("import sys; print(sys.path[0], sys.argv[1:])")
    done = seamflow(tmp_path / "site", "train", "--seed", "3", cwd=ROOT)
    assert done.stdout == f"{launcher.parents[1]} ['--seed', '3']\n", done.stderr


@pytest.mark.parametrize(
    ("command", "extra"),
    [("train", "quickstart"), ("evaluate", "quickstart"), ("export-model", "trainer")],
)
def test_without_its_extra_a_command_says_what_to_install(
    site: Path, tmp_path: Path, command: str, extra: str
) -> None:
    """One line, and exit code 78."""
    link_packages(tmp_path / "only", names_of(site))
    done = run_with((site, tmp_path / "only"), "-c", COMMAND, command, cwd=tmp_path)
    assert done.returncode == 78
    assert done.stderr.startswith(f"seamflow: seamflow {command} needs packages that are not inst")
    assert done.stderr.endswith(f"more): pip install 'seamflow[{extra}]'\n")


def test_a_process_without_its_extra_is_named_before_anything_starts(
    site: Path, project: Path, tmp_path: Path
) -> None:
    """Every such process, each with its own extra."""
    extras = ("launcher", "rollout-gateway", "dataloader")
    link_packages(tmp_path / "only", names_of(site, *extras))
    sites = (site, site / "seamflow" / "_services", tmp_path / "only")
    done = run_with(sites, "-m", "services.launcher", cwd=project)
    assert done.returncode == 78
    trainer, server = (
        f"{name} needs packages that are not installed (torch, xxhash, zstandard): "
        f"pip install 'seamflow[{extra}]'"
        for name, extra in (("trainer", "trainer"), ("rollout_server", "rollout-server"))
    )
    assert trainer in done.stderr
    assert server in done.stderr
    assert not list((project / "runs").iterdir())
