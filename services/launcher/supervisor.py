"""Child processes: started, watched, started again after a crash, and ended, all of them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self, TypeVar

from seamflow.inspect.processes import Process, write_processes
from seamflow.user_code.user_modules import FOLDER_VARIABLE

from services.chassis.errors import DependencyUnavailable, ExitCode
from services.launcher.child_process import ProcessPlan
from services.lib.child_process import Child

T = TypeVar("T")

_CHECKOUT = Path(__file__).parents[2]
_MAX_RESTARTS = 5
_STABLE_SECONDS = 30.0
_RESTART_SECONDS = 0.2
_FULL_DISK_SECONDS = 15.0
"""Least pause before a restart while the disk is full: people need time to free some."""
_LEAST_FREE_BYTES = 1 << 20
_NO_SPACE = ("No space left on device", "Disk quota exceeded")
_TERM_SECONDS = 20.0
_TELL_SECONDS = 4.0
_HEAD_BYTES = 16_384
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOADING_MODELS = ("trainer", "rollout_server", "scoring")
"""While they load one they answer no signal, for minutes; what a kill of them loses is replaced."""


class ChildFailed(DependencyUnavailable):
    """A child process cannot run; carries the end of its log and, if it has one, its code."""

    def __init__(self, name: str, code: int, message: str) -> None:
        super().__init__(name, message)
        if code in (ExitCode.USAGE, ExitCode.CONFIG):
            self.exit_code = ExitCode(code)


class Supervisor:
    """Child processes, restarted when they crash; leaving the context ends them all."""

    def __init__(
        self,
        log_folder: Path,
        stable_seconds: float = _STABLE_SECONDS,
        restart_seconds: float = _RESTART_SECONDS,
        full_disk_seconds: float = _FULL_DISK_SECONDS,
    ) -> None:
        """Log to `log_folder`; a child that ran for `stable_seconds` has recovered from a crash.

        Restarts wait `restart_seconds`, doubled after each crash without recovery, and at least
        `full_disk_seconds` after one for lack of space on the disk.
        """
        self._full_disk_seconds = full_disk_seconds
        self._log_folder = log_folder
        self._stable_seconds, self._restart_seconds = stable_seconds, restart_seconds
        self._children: dict[str, Child] = {}
        self._addresses: dict[str, str] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._log_starts: dict[str, int] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_restarts = 0
        """Restarts after a crash."""
        self.restarts: list[tuple[str, str]] = []
        """Processes that were started again, and how they ended; taken by who shows it."""
        self.tell: Callable[[str], None] = lambda _: None
        """Shows people which processes have not ended yet when all are to end."""
        self.given_up: list[str] = []
        """Optional processes that crashed too often."""
        self.ended: list[str] = []
        """Processes that have ended by themselves, cleanly."""
        self.waits: list[str] = []
        """What processes that will be started again wait for, for people; taken by who shows it."""

    async def start(self, plan: ProcessPlan) -> None:
        """Start a process and keep it running in the background."""
        log = self._log(plan.name)
        self._log_starts[plan.name] = log.stat().st_size if log.exists() else 0
        await self._spawn(plan)
        self._watchers[plan.name] = asyncio.create_task(self._watch_safely(plan))

    def running(self) -> list[Process]:
        """The processes that were started and not stopped, with the ids of their last starts."""
        return [
            Process(name=name, address=self._addresses[name], pid=child.pid)
            for name, child in self._children.items()
        ]

    async def stop(self, name: str, patience: float = 0.0) -> None:
        """End one process; SIGKILL if it does not end in time.

        It may end by itself within `patience` seconds, and is not restarted.
        """
        self._watchers.pop(name).cancel()
        child = self._children.pop(name)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await child.wait()
        await child.end(_TERM_SECONDS)

    async def finished(self, name: str) -> None:
        await self._watchers[name]

    async def failure(self) -> None:
        """Wait for a child that cannot run; raises `ChildFailed`."""
        await asyncio.shield(self._failed)

    def warnings(self) -> list[str]:
        """What processes said, when they were started, of variables that name no setting."""
        found: dict[str, None] = {}
        for name, start in self._log_starts.items():
            with self._log(name).open("rb") as log:
                log.seek(start)
                head = log.read(_HEAD_BYTES).decode(errors="replace").splitlines()
            found |= dict.fromkeys(line for line in head if ": warning: SEAMFLOW_" in line)
        return list(found)

    def kill(self, *names: str) -> None:
        """Kill these processes immediately, as a crash would end them; none given: all."""
        for name in names or self._children:
            self._children[name].kill()

    async def _spawn(self, plan: ProcessPlan) -> None:
        environment = child_environment(plan.environment)
        log = self._log(plan.name)
        death = "KILL" if plan.table in _LOADING_MODELS else "TERM"
        self._addresses[plan.name] = plan.address
        self._children[plan.name] = await Child.start(
            plan.command, environment, log, umask=plan.umask, death_signal=death
        )
        write_processes(self._log_folder, self.running())

    async def _watch_safely(self, plan: ProcessPlan) -> None:
        try:
            await self._watch(plan)
        except OSError as error:  # its log cannot be written: it is not started again
            if not self._failed.done():
                reason = f"cannot be started again: {error}"
                self._failed.set_exception(ChildFailed(plan.name, ExitCode.UNAVAILABLE, reason))

    async def _watch(self, plan: ProcessPlan) -> None:
        attempt, loop = 0, asyncio.get_running_loop()
        while True:
            started = loop.time()
            code = await self._children[plan.name].wait()
            if code == ExitCode.CLEAN:
                self.ended.append(plan.name)
                return
            if loop.time() - started >= self._stable_seconds:
                attempt = 0
            if not plan.restarts or code in plan.fatal or attempt == _MAX_RESTARTS:
                break
            self.num_restarts += 1
            self.restarts.append((plan.name, _ending(code)))
            least = 0.0
            if self._is_full(plan.name):
                least = self._full_disk_seconds
                self.waits.append(f"{plan.name} waits for space: {self._full_disk(plan.name)}")
            await asyncio.sleep(max(self._restart_seconds * 2**attempt, least))
            await self._spawn(plan)
            attempt += 1
        if plan.optional and code not in plan.fatal:
            self.given_up.append(plan.name)
        elif not self._failed.done():
            reason = self._crash_report(plan.name, code)
            self._failed.set_exception(ChildFailed(plan.name, code, reason))

    def _crash_report(self, name: str, code: int) -> str:
        lines = self._end_of_log(name)
        text = f"exited with code {code}; the end of {self._log(name)}:\n  " + "\n  ".join(lines)
        if not self._is_full(name):
            return text
        cure = "then --resume, or use another disk with --runs-folder"
        return f"{self._full_disk(name)}, {cure}; {text}"

    def _full_disk(self, name: str) -> str:
        folder = full_folder(self._end_of_log(name)) or self._log_folder
        free = shutil.disk_usage(folder).free >> 10
        return (
            f"the disk is full ({free} KiB free where {folder} is): delete old runs or checkpoints "
            "there"
        )

    def _is_full(self, name: str) -> bool:
        """Whether a process has ended for lack of space, of which a full disk keeps no log."""
        if shutil.disk_usage(self._log_folder).free < _LEAST_FREE_BYTES:
            return True
        return any(map(_tells_no_space, self._end_of_log(name)))

    def _end_of_log(self, name: str) -> list[str]:
        return self._log(name).read_text(errors="replace").splitlines()[-5:]

    def _log(self, name: str) -> Path:
        return self._log_folder / f"{name}.log"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        # Newest first: agents end before the services they use.
        for name in reversed(self._children):
            self._watchers.pop(name).cancel()
        ending = {
            name: asyncio.create_task(child.end(_TERM_SECONDS))
            for name, child in reversed(self._children.items())
        }
        while any(not each.done() for each in ending.values()):
            await asyncio.wait(ending.values(), timeout=_TELL_SECONDS)
            if left := [name for name, each in ending.items() if not each.done()]:
                self.tell(f"waiting for {', '.join(left)} to end; Ctrl-C ends them at once")
        await asyncio.gather(*ending.values())
        if self._failed.done():
            self._failed.exception()  # mark as retrieved
        else:
            self._failed.cancel()


async def run_until_failure(
    processes: Supervisor,
    work: Awaitable[T],
    *watches: Awaitable[NoReturn],
    stopping: Callable[[str], None] = lambda _: None,
) -> T:
    """Run `work` until it ends, a child or a watch fails, or Ctrl-C; a second one kills all.

    The first Ctrl-C, or SIGTERM, is told to `stopping`, by its name.
    """
    loop = asyncio.get_running_loop()
    working = asyncio.ensure_future(work)
    failing = [asyncio.ensure_future(each) for each in (processes.failure(), *watches)]
    asked: list[int] = []

    def on_signal(number: int) -> None:
        asked.append(number)
        if len(asked) > 1:
            processes.kill()
            os._exit(128 + number)
        stopping(_signal_name(number))
        working.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    await asyncio.wait({working, *failing}, return_when=asyncio.FIRST_COMPLETED)
    failed = [each for each in reversed(failing) if each.done()]  # a watch knows the cause
    for each in set(failing) - set(failed):
        each.cancel()
    if failed:
        working.cancel()
        await asyncio.wait([working])
        with suppress(asyncio.CancelledError):
            working.exception()  # a consequence of the failure
        failed[0].result()
    try:
        return await working
    except asyncio.CancelledError:
        raise KeyboardInterrupt(*map(_signal_name, asked)) from None


def _signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _ending(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def full_folder(lines: Sequence[str]) -> Path | None:
    """The folder of the file that the last line on a full disk names; of several, the fullest.

    It need not be where the logs are: checkpoints and weights may have disks of their own.
    """
    line = next(filter(_tells_no_space, reversed(lines)), "")
    paths = [Path(text) for text in re.findall(r"/[^\s:'\"]+", line)]
    folders = [
        folder
        for path in paths
        if (folder := next(each for each in (path, *path.parents) if each.is_dir())) != Path("/")
    ]
    return min(folders, key=lambda folder: shutil.disk_usage(folder).free, default=None)


def _tells_no_space(line: str) -> bool:
    return any(text in line for text in _NO_SPACE)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The launcher's own environment, one thread per process, and `extra`.

    Processes import from the checkout and from what is installed, never from the current folder,
    which may have any file; see `seamflow.user_code.user_modules`.
    """
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys((str(_CHECKOUT), *others))),
        FOLDER_VARIABLE: os.environ.get(FOLDER_VARIABLE) or str(Path.cwd()),
    }
    return {
        **one_thread,
        **os.environ,
        **_proxy_exceptions(),
        **paths,
        **extra,
        "PYTHONUNBUFFERED": "1",
    }


def _proxy_exceptions() -> dict[str, str]:
    """Proxies of the environment are for other machines, never for the processes of this one."""
    found = {}
    for name in ("no_proxy", "NO_PROXY"):
        given = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
        found[name] = ",".join(dict.fromkeys((*given, *_LOOPBACK)))
    return found
