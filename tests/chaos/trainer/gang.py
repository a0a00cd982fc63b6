"""One life of a real trainer: a process, or torchrun and its ranks, killed as a whole."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from bench.harness import processes
from bench.harness.processes import Child

_START_SECONDS = 120.0
_RUN_SECONDS = 300.0
_GONE_SECONDS = 30.0
_LOOK_SECONDS = 0.002
_TAIL = 3000


def command(module: str, world_size: int, flags: Sequence[str]) -> list[str]:
    """The command that runs a trainer on `world_size` ranks."""
    if world_size == 1:
        return processes.python(module, *flags)
    ranks = ("--standalone", "--nproc-per-node", str(world_size), "-m", module)
    return processes.python("torch.distributed.run", *ranks, *flags)


class Gang(Child):
    """STOPPED -> RUNNING -> SERVING -> STOPPED, by its own end or by `crash`."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """Prepare `command`; its output is added to `folder/trainer.log`."""
        self._port_file = folder / "port.json"
        # torchrun leaves its temporary folders behind when it is killed.
        extra = {"SEAMFLOW_PORT_FILE": str(self._port_file), "TMPDIR": str(folder)}
        super().__init__("trainer", command, folder, processes.environment(extra))
        self.start_time = 0.0
        """When it was started, seconds since 1970."""

    @property
    def serving(self) -> bool:
        """Whether its model is loaded and its training has begun."""
        return self._port_file.exists()

    @property
    def serving_time(self) -> float:
        """When that was, seconds since 1970."""
        return self._port_file.stat().st_mtime

    def start(self) -> None:
        """Start it."""
        self._port_file.unlink(missing_ok=True)
        self.start_time = time.time()
        super().start()

    def wait(self) -> None:
        """Return when it serves.

        Raises:
            RuntimeError: it ended, or did not serve in time.
        """
        limit = time.monotonic() + _START_SECONDS
        while not self.serving:
            if not self.running or time.monotonic() > limit:
                raise RuntimeError(f"{self.log} does not serve:\n{self._tail()}")
            time.sleep(_LOOK_SECONDS)

    def crash(self) -> bool:
        """SIGKILL for all its processes at once; whether it was still at work."""
        process = self._process
        assert process is not None, "it does not run"
        family = _family(process.pid) if process.poll() is None else []
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        code = process.wait(_GONE_SECONDS)
        self._process = None
        _await_end(family[1:])
        return code == -signal.SIGKILL

    def finish(self) -> None:
        """Return when it has trained its last step.

        Raises:
            RuntimeError: it failed, or did not end in time.
        """
        assert self._process is not None, "it does not run"
        try:
            code = self._process.wait(_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.log} does not end:\n{self._tail()}") from None
        self._process = None
        if code:
            raise RuntimeError(f"{self.log} ended with {code}:\n{self._tail()}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self.crash()

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-_TAIL:]


def _family(pid: int) -> list[psutil.Process]:
    """The process and what it started, to the last generation; no further one begins meanwhile.

    Ranks have separate sessions, so a signal to torchrun's group would not reach them.
    """
    first = psutil.Process(pid)
    first.suspend()
    while first.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        time.sleep(_LOOK_SECONDS)
    return [first, *first.children(recursive=True)]


def _await_end(members: Sequence[psutil.Process]) -> None:
    limit = time.monotonic() + _GONE_SECONDS
    while not all(_ended(member) for member in members):
        if time.monotonic() > limit:
            raise RuntimeError(f"ranks outlived SIGKILL: {members}")
        time.sleep(_LOOK_SECONDS)


def _ended(member: psutil.Process) -> bool:
    """Whether it runs no more; who reaps it is not ours to say."""
    try:
        return bool(member.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
