"""Each process of a run is frozen, its store and its disk are full, its store is emptied: how long
until the terminal names it, and whether it names another process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.lib.launcher.launched import Launched

LIMIT_SECONDS = 10.0
_WATCHED_SECONDS = 30.0
_START_SECONDS = 180.0
_WAITING = re.compile(r"waiting \((\w+)\): (.*)")
_STILL = ("process_stopped", "process_silent")
_UNWATCHED = ("-m", "tests.chaos.edges.unwatched_launcher")
_LAST_STEPS = 4


def run(seed: int) -> dict[str, float]:
    """All faults and the controls."""
    told = Told()
    with tempfile.TemporaryDirectory(prefix="frozen-") as made:
        folder = Path(made)
        settings = ("--seed", str(seed))
        with Launched.start(folder / "middle", *settings) as launched:
            freeze_each_at_its_start(launched, told)
            launched.until(lambda: launched.step > 1, _START_SECONDS)
            freeze_each(launched, told)
            fill_store(launched, told)
            empty_store(launched, told)
        freeze_each_at_the_end(folder, settings, told)
        fill_disk(folder, settings, told)
        figures = told.figures()
        figures |= {"frozen.summaries_missing": close_output(folder, settings)}
        failed = unwatched(folder, settings) + freeze_a_stranger(folder, settings)
    return {**figures, "negative_controls": 2.0, "negative_controls_failed": float(failed)}


class Told:
    """What was done, and what the terminal said of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float | None] = {}
        """How long until it was named; None: it was not."""
        self.wrong: list[str] = []
        """Lines that name another process."""

    def figures(self) -> dict[str, float]:
        times = [each for each in self.seconds.values() if each is not None]
        late = [name for name, each in self.seconds.items() if each is None or each > LIMIT_SECONDS]
        for name in late:
            print(f"frozen: {name}: {self.seconds[name]}")
        for line in self.wrong:
            print(f"frozen: wrong: {line}")
        return {
            "frozen.faults": float(len(self.seconds)),
            "frozen.unnamed": float(len(late)),
            "frozen.misnamed": float(len(self.wrong)),
            "frozen.slowest_seconds": max(times, default=0.0),
        }


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that runs nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def freeze(launched: Launched, name: str, pid: int, told: Told, when: str) -> None:
    """Freeze a process until it is named, or the run has ended without it."""
    first = len(launched.lines)

    def lines() -> list[re.Match[str]]:
        return [found for line in launched.lines[first:] if (found := _WAITING.search(line))]

    def is_named() -> bool:
        return any(found[1] in _STILL and found[2].startswith(f"{name} ") for found in lines())

    with suppress(ProcessLookupError), frozen(pid):
        seconds = launched.until(is_named, _WATCHED_SECONDS)
        has_ended = launched.launcher.poll() == 0
        told.seconds[f"{when}.{name}"] = 0.0 if has_ended and seconds is None else seconds
        told.wrong += [
            f"{when}.{name}: {found[0]}"
            for found in lines()
            if found[1] in _STILL and not found[2].startswith(f"{name} ")
        ]
        if when == "middle" and not (found := _first_finding(launched)).startswith(f"{name} "):
            told.wrong.append(f"{when}.{name}: why-stuck: {found}")
    launched.until(launched.shows(f"no longer: {name} ", first), _WATCHED_SECONDS)


def freeze_each(launched: Launched, told: Told) -> None:
    """While it trains."""
    for name, pid in launched.processes.items():
        freeze(launched, name, pid, told, "middle")


def freeze_each_at_its_start(launched: Launched, told: Told) -> None:
    """As soon as each is there."""
    seen = set[str]()

    def new() -> dict[str, int]:
        return {name: pid for name, pid in launched.processes.items() if name not in seen}

    def is_due() -> bool:
        return bool(new() or launched.step)

    while launched.until(is_due, _START_SECONDS) is not None and new():
        name, pid = next(iter(new().items()))
        seen.add(name)
        freeze(launched, name, pid, told, "start")


def freeze_each_at_the_end(folder: Path, settings: tuple[str, ...], told: Told) -> None:
    """After the last step, while the last evaluation is made and the run ends."""
    flags = (*settings, "--set", f"trainer.num_steps={_LAST_STEPS}")
    names = ["trainer"]
    for name in names:
        with Launched.start(folder / f"end-{name}", *flags) as launched:
            launched.until(lambda: launched.step == _LAST_STEPS, _START_SECONDS)
            names += [each for each in launched.processes if each not in names]
            if (pid := launched.processes.get(name)) is not None:
                freeze(launched, name, pid, told, "end")
            launched.until(lambda: False, _START_SECONDS)


def fill_store(launched: Launched, told: Told) -> None:
    """Redis at its limit of memory."""
    full = re.compile("the store is full")
    _named(launched, told, "store.full", full, lambda: _limit(launched, "1mb"))
    _limit(launched, "0")
    launched.until(lambda: False, 1.0)


def empty_store(launched: Launched, told: Told) -> None:
    """FLUSHALL; then the run is resumed on what is left, with the flag and without."""
    lost = re.compile("the store (is without its data|has lost it)")
    _named(launched, told, "store.emptied", lost, lambda: launched.store.flushall())
    launched.stop()
    resumed = (*launched.flags, "--resume")
    with Launched.start(launched.folder, *resumed) as again:
        again.launcher.wait(_START_SECONDS)
        is_refused = again.launcher.returncode == 78 and again.shows("step ledger are lost")()
        told.seconds["resume.refused"] = 0.0 if is_refused else None
    accepted = ("--set", "trainer.accept_lost_samples=true")
    with Launched.start(launched.folder, *resumed, *accepted) as again:
        step = again.step
        seconds = again.until(lambda: again.step > step, _START_SECONDS)
        told.seconds["resume.accepted"] = None if seconds is None else 0.0


def fill_disk(folder: Path, settings: tuple[str, ...], told: Told) -> None:
    """A small file system of its own; left out where none can be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ("mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(disk)),
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        print("frozen: no file system can be mounted: the full disk is left out")
        return
    try:
        with Launched.start(folder / "full", *settings, runs=disk / "runs") as launched:
            launched.until(lambda: launched.step > 1, _START_SECONDS)
            _named(
                launched,
                told,
                "disk.full",
                re.compile("disk_full|the disk is full"),
                lambda: _fill(disk / "rest"),
            )
            (disk / "rest").unlink()
            launched.until(launched.shows("no longer: The disk"), _WATCHED_SECONDS)
    finally:
        subprocess.run(("umount", "--lazy", str(disk)), check=True)


def close_output(folder: Path, settings: tuple[str, ...]) -> float:
    """Nobody reads what the launcher prints any longer; 1: it has written no summary."""
    flags = (*settings, "--set", f"trainer.num_steps={_LAST_STEPS}")
    with Launched.start(folder / "closed", *flags, is_closed=True) as launched:
        launched.launcher.wait(_START_SECONDS)
        is_whole = launched.launcher.returncode == 0 and (launched.run / "summary.json").exists()
    return float(not is_whole)


def unwatched(folder: Path, settings: tuple[str, ...]) -> bool:
    """Control: without the rules the terminal names nothing."""
    told = Told()
    with Launched.start(folder / "unwatched", *settings, program=_UNWATCHED) as launched:
        launched.until(lambda: launched.step > 1, _START_SECONDS)
        freeze(launched, "evaluator", launched.processes["evaluator"], told, "control")
    return told.seconds["control.evaluator"] is None


def freeze_a_stranger(folder: Path, settings: tuple[str, ...]) -> bool:
    """Control: a frozen process that is none of the run's is not named."""
    told = Told()
    with (
        Launched.start(folder / "stranger", *settings) as launched,
        subprocess.Popen(("sleep", "600")) as stranger,
    ):
        launched.until(lambda: launched.step > 1, _START_SECONDS)
        freeze(launched, "stranger", stranger.pid, told, "control")
        stranger.kill()
    return told.seconds["control.stranger"] is None


def _named(
    launched: Launched, told: Told, what: str, text: re.Pattern[str], fault: Callable[[], object]
) -> None:
    first = len(launched.lines)

    def is_named() -> bool:
        return any(text.search(line) for line in launched.lines[first:])

    fault()
    told.seconds[what] = launched.until(is_named, _WATCHED_SECONDS)


def _limit(launched: Launched, size: str) -> None:
    launched.store.config_set("maxmemory", size)


def _fill(file: Path) -> None:
    with suppress(OSError), file.open("wb", buffering=0) as opened:
        while opened.write(bytes(1 << 20)):
            pass


def _first_finding(launched: Launched) -> str:
    done = subprocess.run(
        (sys.executable, "-m", "seamflow.cli.main", "why-stuck"),
        cwd=launched.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip(" \n!·")
