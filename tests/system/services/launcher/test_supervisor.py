"""Children are started, restarted after a crash, and all ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.chassis.errors import ExitCode
from services.launcher.child_process import ProcessPlan
from services.launcher.supervisor import ChildFailed, Supervisor

SLEEPER = """
import os, signal
with open({file!r}, "a") as file:
    print(os.getpid(), file=file)
signal.pause()
"""


def sleeper(file: Path, *, optional: bool = False) -> ProcessPlan:
    """A child that writes its pid and waits."""
    command = (sys.executable, "-c", SLEEPER.format(file=str(file)))
    return ProcessPlan(name="sleeper", command=command, optional=optional)


async def lines(file: Path, count: int) -> list[int]:
    """Wait for `count` pids in a file."""
    while not file.exists() or len(file.read_text().splitlines()) < count:
        await asyncio.sleep(0.02)
    return [int(line) for line in file.read_text().splitlines()]


def is_alive(pid: int) -> bool:
    """Whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_leaving_the_context_ends_every_child(tmp_path: Path) -> None:
    """No process stays behind."""
    async with Supervisor(tmp_path) as processes:
        await processes.start(sleeper(tmp_path / "pids"))
        (pid,) = await lines(tmp_path / "pids", 1)
        assert is_alive(pid)
    assert not is_alive(pid)


async def test_a_killed_child_is_restarted(tmp_path: Path) -> None:
    """A crash is followed by a restart."""
    async with Supervisor(tmp_path) as processes:
        await processes.start(sleeper(tmp_path / "pids"))
        os.kill((await lines(tmp_path / "pids", 1))[0], signal.SIGKILL)
        assert len(await lines(tmp_path / "pids", 2)) == 2
        assert processes.num_restarts == 1


async def test_a_named_child_is_killed_alone(tmp_path: Path) -> None:
    """As by a crash: it is restarted, and the others run on."""
    async with Supervisor(tmp_path) as processes:
        for name in ("victim", "other"):
            await processes.start(replace(sleeper(tmp_path / name), name=name))
        first, other = [(await lines(tmp_path / name, 1))[0] for name in ("victim", "other")]
        processes.kill("victim")
        assert (await lines(tmp_path / "victim", 2))[1] != first
        assert is_alive(other)
        assert processes.num_restarts == 1


async def test_crashes_far_apart_are_always_restarted(tmp_path: Path) -> None:
    """A child that has recovered from a crash resets the count."""
    async with Supervisor(tmp_path, stable_seconds=0.0, restart_seconds=0.0) as processes:
        await processes.start(sleeper(tmp_path / "pids"))
        for crash in range(7):
            os.kill((await lines(tmp_path / "pids", crash + 1))[crash], signal.SIGKILL)
        assert len(await lines(tmp_path / "pids", 8)) == 8


async def test_a_child_that_keeps_crashing_fails_the_run(tmp_path: Path) -> None:
    """Five restarts; the crash after them fails the run."""
    async with Supervisor(tmp_path, stable_seconds=3600.0, restart_seconds=0.0) as processes:
        await processes.start(sleeper(tmp_path / "pids"))
        for crash in range(6):
            os.kill((await lines(tmp_path / "pids", crash + 1))[crash], signal.SIGKILL)
        with pytest.raises(ChildFailed, match="exited with code -9"):
            await processes.failure()
        assert (processes.num_restarts, len(await lines(tmp_path / "pids", 6))) == (5, 6)


async def test_a_run_continues_without_an_optional_child(tmp_path: Path) -> None:
    """It is restarted like others, then given up by name; no other process ends."""
    async with Supervisor(tmp_path, stable_seconds=3600.0, restart_seconds=0.0) as processes:
        await processes.start(sleeper(tmp_path / "pids", optional=True))
        for crash in range(6):
            os.kill((await lines(tmp_path / "pids", crash + 1))[crash], signal.SIGKILL)
        await processes.finished("sleeper")
        assert (processes.num_restarts, processes.given_up) == (5, ["sleeper"])
        assert not processes._failed.done()


async def test_warnings_are_those_of_this_start(tmp_path: Path) -> None:
    """About variables that name no setting; a log may go back to an earlier start."""
    (tmp_path / "child.log").write_text("child: warning: SEAMFLOW_OLD names no setting\n")
    warning = "child: warning: SEAMFLOW_NEW names no setting"
    code = f"print('serving'); print({warning!r}); print({warning!r})"
    async with Supervisor(tmp_path) as processes:
        await processes.start(ProcessPlan(name="child", command=(sys.executable, "-c", code)))
        await processes.finished("child")
        assert processes.warnings() == [warning]


async def test_a_child_that_ends_by_itself_is_named_and_not_restarted(tmp_path: Path) -> None:
    """An agent's program ends when the run has ended."""
    plan = ProcessPlan(name="child", command=(sys.executable, "-c", "print('done')"))
    async with Supervisor(tmp_path) as processes:
        await processes.start(plan)
        await processes.finished("child")
        assert (processes.ended, processes.num_restarts) == (["child"], 0)


@pytest.mark.parametrize(("patience", "last_line"), [(60.0, "done\n"), (0.0, "")])
async def test_stop_may_wait_for_a_child_to_end_by_itself(
    tmp_path: Path, patience: float, last_line: str
) -> None:
    """Within its patience; without any, the child is ended in the middle of its work."""
    started, go = tmp_path / "started", tmp_path / "go"
    code = f"""
import pathlib, time
pathlib.Path({str(started)!r}).touch()
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.02)
print("done")
"""
    async with Supervisor(tmp_path) as processes:
        await processes.start(ProcessPlan(name="child", command=(sys.executable, "-c", code)))
        while not started.exists():
            await asyncio.sleep(0.02)
        stopping = asyncio.create_task(processes.stop("child", patience))
        await asyncio.sleep(0.1 if patience else 0)
        if patience:
            go.touch()
        await stopping
    assert (tmp_path / "child.log").read_text() == last_line


async def test_a_configuration_error_is_not_retried(tmp_path: Path) -> None:
    """Exit code 78 fails the run immediately, with the end of the child's log."""
    code = "import sys; print('port is wrong'); sys.exit(78)"
    plan = ProcessPlan(name="child", command=(sys.executable, "-c", code))
    async with Supervisor(tmp_path) as processes:
        await processes.start(plan)
        with pytest.raises(ChildFailed, match="port is wrong") as failed:
            await processes.failure()
        assert failed.value.exit_code == ExitCode.CONFIG
        assert processes.num_restarts == 0


async def test_a_code_that_is_fatal_for_one_process_is_not_retried(tmp_path: Path) -> None:
    """As 69 of the evaluator, whose agents do not come; control: any other code is retried."""
    code = "import pathlib, sys; {file}.exists() and sys.exit(69); {file}.touch(); sys.exit(70)"
    text = code.format(file=f"pathlib.Path({str(tmp_path / 'was')!r})")
    command = (sys.executable, "-c", text)
    plan = ProcessPlan(name="child", command=command, fatal=(ExitCode.UNAVAILABLE,))
    async with Supervisor(tmp_path, restart_seconds=0.0) as processes:
        await processes.start(plan)
        with pytest.raises(ChildFailed) as failed:
            await processes.failure()
        assert failed.value.exit_code == ExitCode.UNAVAILABLE
        assert processes.num_restarts == 1


async def test_a_killed_launcher_leaves_no_child(tmp_path: Path) -> None:
    """SIGKILL leaves no time to clean up: the kernel does it."""
    code = f"""
import asyncio
from pathlib import Path
from services.launcher.supervisor import Supervisor
from tests.system.services.launcher.test_supervisor import sleeper

async def main():
    async with Supervisor(Path({str(tmp_path)!r})) as processes:
        await processes.start(sleeper(Path({str(tmp_path / "pids")!r})))
        await asyncio.Event().wait()

asyncio.run(main())
"""
    launcher = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    (pid,) = await lines(tmp_path / "pids", 1)
    launcher.kill()
    await launcher.wait()
    while is_alive(pid) and not is_zombie(pid):
        await asyncio.sleep(0.02)


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and is not reaped yet."""
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.parametrize(
    ("said", "is_full"),
    [
        ("OSError: [Errno 28] No space left on device", True),
        ("Error writing to the AOF file: No space left on device", True),
        ("OSError: [Errno 122] Disk quota exceeded", True),
        ("OSError: [Errno 2] No such file or directory", False),
    ],
)
async def test_a_full_disk_is_named(tmp_path: Path, said: str, *, is_full: bool) -> None:
    """With what to free; control: another error is not taken for it."""
    command = (sys.executable, "-c", f"import sys; sys.exit({said!r})")
    plan = ProcessPlan(name="store", command=command)
    async with Supervisor(tmp_path, restart_seconds=0.0, full_disk_seconds=0.01) as processes:
        await processes.start(plan)
        with pytest.raises(ChildFailed, match="exited with code 1") as raised:
            await processes.failure()
        assert ("the disk is full" in str(raised.value)) == is_full
        assert (str(tmp_path) in str(raised.value).partition("exited")[0]) == is_full


@pytest.mark.parametrize("said", ["No space left on device", "another error"])
async def test_a_restart_waits_for_space_on_the_disk(tmp_path: Path, said: str) -> None:
    """It is still waited for while a child that failed otherwise has been given up."""
    command = (sys.executable, "-c", f"import sys; sys.exit({said!r})")
    async with Supervisor(tmp_path, restart_seconds=0.0, full_disk_seconds=3600.0) as processes:
        await processes.start(ProcessPlan(name="full", command=command))
        failure = asyncio.create_task(processes.failure())
        if said == "another error":
            with pytest.raises(ChildFailed):
                await failure
            return
        while not processes.num_restarts:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        assert processes.num_restarts == 1
        (told,) = processes.waits
        assert told.startswith("full waits for space: the disk is full")
        assert not failure.done()
        failure.cancel()


async def test_the_full_disk_is_that_of_the_file_that_could_not_be_written(tmp_path: Path) -> None:
    """Checkpoints and weights may have a disk of their own, and freeing space elsewhere is in vain.

    Control: a line without a file names the folder of the logs.
    """
    checkpoints, logs = tmp_path / "checkpoints", tmp_path / "logs"
    for folder in (checkpoints, logs):
        folder.mkdir()
    said = f"storage: {checkpoints}/.partial_3/rank.partial: No space left on device (os error 28)"
    for line, named in ((said, checkpoints), ("No space left on device", logs)):
        plan = ProcessPlan(name="trainer", command=(sys.executable, "-c", f"exit({line!r})"))
        async with Supervisor(logs, restart_seconds=0.0, full_disk_seconds=0.01) as processes:
            await processes.start(plan)
            with pytest.raises(ChildFailed, match=f"free where {named} is") as raised:
                await processes.failure()
            assert "--resume" in str(raised.value)
