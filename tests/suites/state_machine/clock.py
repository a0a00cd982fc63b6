"""One clock for both stores, which the machine moves: leases expire by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trajectory_manager.store.redis.connect import SCRIPTS

_START_SECONDS = 1_000_000
_STEP_MICROSECONDS = 15_625  # 1/64 s: exact as a float, in seconds and in milliseconds
_KEY = "model:clock"
_TIME = "redis.call('TIME')"
_TIME_OF_THE_MODEL = f"redis.call('LRANGE', '{_KEY}', 0, 1)"


class Clock:
    """Unix seconds for the in-memory store, and the same as TIME for the scripts."""

    def __init__(self) -> None:
        self._microseconds = _START_SECONDS * 1_000_000

    def __call__(self) -> float:
        """Unix seconds."""
        return self._microseconds / 1_000_000

    def tick(self, seconds: int = 0) -> None:
        """Move on, by a little at least: no two operations happen at the same time."""
        self._microseconds += _STEP_MICROSECONDS + seconds * 1_000_000

    async def publish(self, redis: Any) -> None:
        """Let the scripts on this server read the time."""
        seconds, rest = divmod(self._microseconds, 1_000_000)
        async with redis.pipeline(transaction=True) as both:
            await both.delete(_KEY).rpush(_KEY, seconds, rest).execute()


def scripts_on_the_clock(folder: Path, broken: Mapping[str, tuple[str, str]] = {}) -> Path:
    """The scripts as they are but for where they read the time, copied into `folder`.

    `broken` takes a protection out of a script: its name -> (text, what stands there instead).

    Raises:
        AssertionError: a text that is to be replaced is not there.
    """
    sources = {path.name: path.read_text() for path in SCRIPTS.glob("*.lua")}
    assert any(_TIME in source for source in sources.values()), "no script reads the time"
    for name, (text, instead) in broken.items():
        source = sources[f"{name}.lua"]
        assert source.count(text) == 1, f"{name}.lua does not hold {text!r} once"
        sources[f"{name}.lua"] = source.replace(text, instead)
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (folder / name).write_text(source.replace(_TIME, _TIME_OF_THE_MODEL))
    return folder
