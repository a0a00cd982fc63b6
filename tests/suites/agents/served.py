"""`seamflow serve` as a process, for agents of tests."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tools.provenance import ROOT


@contextmanager
def served(
    config_file: Path, runs: Path, name: str, prepared: Path, seed: int
) -> Iterator[Mapping[str, str]]:
    """Serve the run `name` in the folder `runs`; its addresses, once its HTTP gateway listens.

    Raises:
        RuntimeError: it ended with an error.
    """
    arguments = ["--serve", "--resume", "--config", str(config_file), "--runs-folder", str(runs)]
    arguments += ["--name", name, "--seed", str(seed), "--no-live"]
    shutil.copytree(prepared, runs / name / "prepared")
    command = [sys.executable, "-m", "services.launcher", *arguments]
    addresses = runs / name / "addresses.json"
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr) as process:
        try:
            while not addresses.exists() and process.poll() is None:
                time.sleep(0.1)
            found: dict[str, str] = json.loads(addresses.read_text())
            while not _is_open(found["http_gateway"]) and process.poll() is None:
                time.sleep(0.1)
            yield found
        finally:
            process.send_signal(signal.SIGINT)
    if process.returncode:
        raise RuntimeError(f"seamflow serve ended with code {process.returncode}")


def _is_open(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as connection:
        return connection.connect_ex((address.hostname or "", address.port or 80)) == 0
