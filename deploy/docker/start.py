"""Make the quickstart's model and tasks at build time, in an image that asks for it: START=yes.

They stand in /start, from where the job `prepare` copies them, so that no start of the containers
waits for the warm start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = "/start"
_MODULE = "examples.quickstart.prepare"


def main() -> None:
    """Run `prepare`, or do nothing."""
    if os.environ.get("START") == "yes":
        subprocess.run([sys.executable, "-m", _MODULE, "--out", FOLDER], check=True)
        make_readable(Path(FOLDER))


def make_readable(folder: Path) -> None:
    """For the user of the containers: weights are written for their owner alone, here root."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


if __name__ == "__main__":
    main()
