"""Make the quickstart's model and tasks at build time, in an image that asks for it: START=yes.

They stand in /start, from where the job `prepare` copies them, so that no start of the containers
waits for the warm start.
"""

from __future__ import annotations

import os
import subprocess
import sys

FOLDER = "/start"
_MODULE = "examples.quickstart.prepare"


def main() -> None:
    """Run `prepare`, or do nothing."""
    if os.environ.get("START") == "yes":
        subprocess.run([sys.executable, "-m", _MODULE, "--out", FOLDER], check=True)


if __name__ == "__main__":
    main()
