"""A trajectory manager whose store checks no fence.

A negative control: it serves as `python -m trajectory_manager` does, on the scripts of the folder
that SCRIPTS_VARIABLE names, see `unfenced_scripts`.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from trajectory_manager import cli
from trajectory_manager.store.redis.connect import SCRIPTS, redis_store

SCRIPTS_VARIABLE = "CHAOS_SCRIPTS"
# "if <stale> then return {'error', 'STALE_TURN'", on one line or on two.
_FENCE = re.compile(r"\bif [^\n]* then(?=\s+return \{'error', 'STALE_TURN')")
_NO_FENCE = "if false then"
_MUST_CHANGE = "append_tokens"


def unfenced_scripts(folder: Path) -> Path:
    """A copy of the store's scripts in `folder` in which no writer of a turn is stale.

    Raises:
        RuntimeError: the scripts fence in another way now, and this control would prove nothing.
    """
    folder.mkdir()
    changed = []
    for script in sorted(SCRIPTS.glob("*.lua")):
        source, count = _FENCE.subn(_NO_FENCE, script.read_text())
        if count:
            changed.append(script.stem)
        (folder / script.name).write_text(source)
    if _MUST_CHANGE not in changed:
        raise RuntimeError(
            f"{_MUST_CHANGE}.lua has no line like {_FENCE.pattern!r}: "
            "teach tests/chaos/store/processes/unfenced_manager.py how the store fences now"
        )
    return folder


def main() -> None:
    """Serve on the scripts without a fence."""
    scripts = Path(os.environ[SCRIPTS_VARIABLE])
    # The process has no setting for this on purpose.
    vars(cli)["redis_store"] = partial(redis_store, scripts=scripts)
    cli.main()


if __name__ == "__main__":
    main()
