"""The index of torch for images that are built where only this machine has the wheel.

It stands for download.pytorch.org, so that the wheel is in no image.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools.provenance import ROOT

# Part of TORCH_INDEX_URL, and so of what decides whether the engine builds the image anew.
_PORT = 18329


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Say nothing."""


@contextmanager
def served_torch(folder: Path, address: str) -> Iterator[str]:
    """Serve the pinned torch at `address`; yields the URL of the index.

    `folder` keeps the wheel, which pip downloads as it is configured on this machine.

    Raises:
        OSError: another process has the port.
    """
    torch = _torch()
    if not list((folder / "torch").glob(f"{torch.replace('==', '-')}*.whl")):
        _download(torch, folder / "torch")
    handler = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer((address, _PORT), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{address}:{_PORT}/"
        finally:
            server.shutdown()
            thread.join()


def _download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, requirement], check=True, stdout=subprocess.DEVNULL)


def _torch() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    trainer: list[str] = project["optional-dependencies"]["trainer"]
    return next(each for each in trainer if each.startswith("torch=="))
