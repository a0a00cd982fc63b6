"""A run whose folder is moved, deleted or made read-only ends, and says what became of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.chassis.errors import DependencyUnavailable
from services.launcher.run import folder_problem, opened_folder, watch_folder
from services.launcher.supervisor import Supervisor, run_until_failure


def _moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _replaced(folder: Path) -> None:
    _moved(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_moved, "was moved to .*elsewhere: move it back, then --resume"),
        (_replaced, "was moved to .*elsewhere"),
        (shutil.rmtree, "was deleted: put a copy there"),
    ],
)
async def test_a_run_ends_with_its_folder(
    tmp_path: Path, change: Callable[[Path], object], named: str
) -> None:
    """Its processes would go on writing, half at the old place and half at the new one."""
    folder = tmp_path / "run"
    folder.mkdir()
    async with Supervisor(tmp_path) as processes:
        watching = watch_folder(folder, seconds=0.01)
        running = asyncio.create_task(run_until_failure(processes, asyncio.sleep(60), watching))
        await asyncio.sleep(0.05)
        assert not running.done()
        change(folder)
        with pytest.raises(DependencyUnavailable, match=named):
            await running


async def test_without_the_watch_the_run_goes_on(tmp_path: Path) -> None:
    """Negative control: nobody notices."""
    folder = tmp_path / "run"
    folder.mkdir()
    async with Supervisor(tmp_path) as processes:
        running = asyncio.create_task(run_until_failure(processes, asyncio.sleep(0.2, "went on")))
        shutil.rmtree(folder)
        assert await running == "went on"


@pytest.mark.parametrize(
    ("of_system", "named"),
    [
        (
            {"fstatvfs": lambda descriptor: type("Flags", (), {"f_flag": 1})},
            "became read-only: mount",
        ),
        (
            {"access": lambda folder, mode, dir_fd: False},
            "cannot be written any more: give this user",
        ),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_system: dict[str, Callable[..., object]],
    named: str,
) -> None:
    """As the system tells: a test may run as root, or without the right to mount."""
    with opened_folder(tmp_path) as descriptor:
        assert folder_problem(tmp_path, descriptor) == ""
        for name, answer in of_system.items():
            monkeypatch.setattr(f"os.{name}", answer)
        assert named in folder_problem(tmp_path, descriptor)
