"""The lives of a run, one for each start of its launcher, as the run's folder records them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from seamflow.inspect.run_files import json_lines, json_object, read_steps
from seamflow.processes import procfs

FILE = "lives.jsonl"
STARTED, STOPPING = "started", "stopping"
LEARNING, LEARNED, RESTARTED = "learning", "learned", "restarted"
"""What a life notes while it goes on."""
_OF_BEFORE = "end.json"
"""Release 0.2 wrote how the last life had ended, and nothing else."""
_SILENT_SECONDS = 30.0
"""A launcher whose process cannot be seen from here, and that gave no sign of life for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A process that ended by itself and was started again."""

    name: str
    reason: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """From a start of the launcher to its end; times are Unix times."""

    start: float
    end: float | None = None
    """None: it goes on. Of a life that was killed the last sign of life."""
    state: str = "running"
    """running, finished, stopped (Ctrl-C or SIGTERM), failed or killed."""
    reason: str = ""
    """The signal that stopped it, or the error that it failed with."""
    stopping: float | None = None
    """When it was asked to stop."""
    learning: float | None = None
    """When training began; None: it did not get so far."""
    learned: float | None = None
    """When training was over."""
    restarts: tuple[Restart, ...] = ()

    def seconds(self, now: float) -> float:
        """How long it lasted until `now`."""
        return max((now if self.end is None else self.end) - self.start, 0.0)

    def learning_seconds(self, now: float) -> float:
        """How long it trained, waiting included."""
        if self.learning is None:
            return 0.0
        ends = (self.learned, self.stopping, self.end, now)
        return max(next(end for end in ends if end is not None) - self.learning, 0.0)


def lives(folder: Path) -> list[Life]:
    """All lives of the run in `folder`, the oldest first; of a life that was killed none is open.

    A folder of release 0.2 has one life, its last.
    """
    found: list[Life] = []
    process: Mapping[str, Any] = {}
    for line in json_lines(folder / FILE):
        state, when = line.get("state"), line.get("time")
        if not isinstance(state, str) or not isinstance(when, int | float):
            continue
        if state == STARTED:
            found[-1:] = [_closed(each, float(when)) for each in found[-1:]]
            found.append(Life(start=float(when)))
            process = line.get("process") or {}
        elif found:
            found[-1] = _with(found[-1], state, float(when), line)
    if not found:
        return _of_before(folder)
    if found[-1].end is None and not _is_alive(process, folder):
        found[-1] = _closed(found[-1], _last_sign(folder))
    return found


def _with(life: Life, state: str, when: float, line: Mapping[str, Any]) -> Life:
    reason = str(line.get("reason") or "")
    if state == STOPPING:
        return replace(life, stopping=when, reason=reason)
    if state == LEARNING:
        return replace(life, learning=when)
    if state == LEARNED:
        return replace(life, learned=when)
    if state == RESTARTED:
        restart = Restart(name=str(line.get("name")), reason=reason, time=when)
        return replace(life, restarts=(*life.restarts, restart))
    return replace(life, end=when, state=state, reason=reason or life.reason)


Period = tuple[float, float]
"""Begin and end, as Unix times."""


def stops(found: Sequence[Life]) -> list[Period]:
    """The periods in which the run was stopped: from when a life was asked to stop, or ended, to
    the start of the next one; after the last life without end."""
    periods = []
    for i, life in enumerate(found):
        begin = life.end if life.stopping is None else life.stopping
        if begin is not None:
            periods.append((begin, found[i + 1].start if i + 1 < len(found) else float("inf")))
    return periods


def time_text(when: float) -> str:
    """A Unix time as text, such as "2026-11-28 10:20 UTC"."""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M UTC")


@contextmanager
def recorded_life(folder: Path) -> Iterator[None]:
    """A life of the run from here to the end of the block, which says how it ended.

    One that was killed, or that could not write, has left no end: the next one records it.
    """
    for each in lives(folder)[-1:]:
        if each.state == "killed" and (folder / FILE).is_file():
            note(folder, each.state, each.reason, each.end)
    note(folder, STARTED, process=_this_process())
    try:
        yield
    except KeyboardInterrupt as error:
        note(folder, "stopped", str(error) or "Ctrl-C")
        raise
    except BaseException as error:
        note(folder, "failed", str(error) or type(error).__name__)
        raise
    note(folder, "finished")


def give_sign(folder: Path) -> None:
    """A sign of life: the file's time says when a launcher that is killed still ran."""
    with suppress(OSError):
        os.utime(folder / FILE)


def note(
    folder: Path, state: str, reason: str = "", when: float | None = None, **more: Any
) -> None:
    """Append a line, in one write; nothing if the disk refuses it."""
    line = {"state": state, "reason": reason, "time": time.time() if when is None else when}
    text = json.dumps({**line, **more}).encode() + b"\n"
    with suppress(OSError), (folder / FILE).open("ab+", buffering=0) as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            text = b"\n" + text  # after a line that a full disk has cut
        file.write(text)


def note_learning(folder: Path) -> float:
    """Note that this life trains, and for how many seconds already.

    It began with its first step, which a resumed run may have made before its launcher looked.
    """
    now = time.time()
    start = max((life.start for life in lives(folder)), default=now)  # none: the disk refused it
    begins = [
        step["time"] - sum(step.get("seconds", {}).values())
        for step in read_steps(folder / "metrics.jsonl")
        if step["time"] > start
    ]
    begin = min(max(min(begins, default=now), start), now)
    note(folder, LEARNING, when=begin)
    return now - begin


def _closed(life: Life, when: float) -> Life:
    """A life that wrote no end, which was there until `when` at most."""
    if life.end is not None:
        return life
    state = "killed" if life.stopping is None else "stopped"
    return replace(life, end=max(when, life.start), state=state)


def _of_before(folder: Path) -> list[Life]:
    end, file = json_object(folder / _OF_BEFORE), folder / "addresses.json"
    if not end or not file.is_file():
        return []
    start, state = file.stat().st_mtime, str(end.get("state", "killed"))
    ended = max(start, (folder / _OF_BEFORE).stat().st_mtime)
    return [Life(start=start, end=ended, state=state, reason=str(end.get("reason", "")))]


def _last_sign(folder: Path) -> float:
    return (folder / FILE).stat().st_mtime


def _is_alive(process: Mapping[str, Any], folder: Path) -> bool:
    """Whether the launcher runs: by its process, or else, from another host, by its last sign."""
    if procfs.read(os.getpid()) is not None and process.get("host") == socket.gethostname():
        pid, started = process.get("pid"), str(process.get("started"))
        return isinstance(pid, int) and procfs.is_alive(procfs.Identity(pid, started))
    return time.time() - _last_sign(folder) < _SILENT_SECONDS


def _this_process() -> dict[str, Any]:
    """What tells it from all others; nothing where there is no /proc."""
    own = procfs.read(os.getpid())
    return {} if own is None else {"host": socket.gethostname(), **own.identity._asdict()}
