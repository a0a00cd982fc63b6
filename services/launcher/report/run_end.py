"""How a run ended: `end.json` in its folder, for `seamflow runs` and the other commands."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.chassis.errors import StartupError

FILE = "end.json"


@contextmanager
def recorded_end(folder: Path) -> Iterator[None]:
    """Within it the run goes on; then the file says finished, stopped (by Ctrl-C) or failed."""
    file = folder / FILE
    file.unlink(missing_ok=True)
    try:
        yield
    except StartupError as error:
        _write(file, "failed", str(error))
        raise
    except KeyboardInterrupt:
        _write(file, "stopped", "")
        raise
    _write(file, "finished", "")


def _write(file: Path, state: str, reason: str) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):  # the folder may be what failed
        file.write_text(json.dumps({"state": state, "reason": reason, "time": when}) + "\n")
