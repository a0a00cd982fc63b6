"""`make bench-install`: seconds and bytes from a fresh clone to the first optimizer step.

Runs on the standard library alone: at its start nothing is installed.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results"
_POLL_SECONDS = 0.2


def main() -> None:
    """Clone, `make quickstart`, stop at the first step; the durations."""
    with tempfile.TemporaryDirectory(prefix="seamflow-install-") as folder:
        figures = measure(Path(folder) / "seamflow")
    versions = {"python": platform.python_version()}
    result = {"bench": "install", "figures": figures, "raw": {}, "seeds": [0], "versions": versions}
    line = json.dumps(result | provenance({}))
    for name, value in figures.items():
        print(f"{name:32} {value:12,.1f}")
    (RESULTS / "install.json").write_text(line + "\n")
    print(line)


def measure(clone: Path) -> dict[str, float]:
    """Seconds to the clone, to the installation and to the first step; MiB of the environment."""
    start = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(Path.cwd()), str(clone)], check=True)
    quickstart = subprocess.Popen(
        ["make", "quickstart", "NAME=install"], cwd=clone, start_new_session=True
    )
    try:
        installed = wait_for(clone / "runs" / "install" / "logs", quickstart) - start
        stepped = wait_for(clone / "runs" / "install" / "metrics.jsonl", quickstart) - start
    finally:
        os.killpg(quickstart.pid, signal.SIGINT)
        quickstart.wait(60)
    return {
        "seconds_to_installed": round(installed, 1),
        "seconds_to_first_step": round(stepped, 1),
        "environment_mib": round(size(clone / ".venv") / 2**20, 1),
    }


def wait_for(file: Path, process: subprocess.Popen[bytes]) -> float:
    """When the file was there with something in it; ends the program if the process fails."""
    while not file.exists() or (file.is_file() and file.stat().st_size == 0):
        if process.poll() is not None:
            sys.exit(f"make quickstart ended with code {process.returncode}")
        time.sleep(_POLL_SECONDS)
    return time.monotonic()


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(f.lstat().st_size for f in folder.rglob("*") if f.is_file() or f.is_symlink())


if __name__ == "__main__":
    main()
