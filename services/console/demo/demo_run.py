"""The recorded run that comes with a release: `tools/console_demo` has made it."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.console.sources.shown_run import ShownRun, folder_run

_ARCHIVE = Path(__file__).parent / "demo_run.tar.xz"


@contextmanager
def demo_run() -> Iterator[ShownRun]:
    """The run, unpacked into a temporary folder within the block."""
    with tempfile.TemporaryDirectory(prefix="seamflow-demo-") as folder:
        with tarfile.open(_ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        yield folder_run(next(Path(folder).iterdir()))
