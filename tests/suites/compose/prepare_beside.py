"""`prepare` in its container beside the same module outside, at the same time on the same cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from seamflow.release import __version__

from tools.provenance import ROOT

_Process = subprocess.Popen[str]
_MODULE = "examples.quickstart.prepare"
# As the container runs it, and what it took: seconds of the module, and of the processor for all.
_MEASURED = f"""
import resource, runpy, sys
sys.argv = ["prepare", "--out", sys.argv[1]]
try:
    runpy.run_module({_MODULE!r}, run_name="__main__")
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime)
"""
_CONTAINER = ("--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL")
_IMAGE = f"seamflow/local:{__version__}"


def prepare_beside() -> dict[str, float]:
    """Figures of both sides, the threads as the image sets them, and the container's ratio."""
    docker = ("docker", "run", "--rm", "--no-healthcheck", *_CONTAINER, "--entrypoint", "python")
    with tempfile.TemporaryDirectory() as folder:
        inside = _start((*docker, _IMAGE, "-c", _MEASURED, "/tmp/prepared"))
        outside = _start((sys.executable, "-c", _MEASURED, folder), {"OMP_NUM_THREADS": "1"})
        in_container, beside = _taken(inside), _taken(outside)
    return {
        **{f"prepare.container_{name}": value for name, value in in_container.items()},
        **{f"prepare.outside_{name}": value for name, value in beside.items()},
        **{f"prepare.ratio_of_{name}": in_container[name] / beside[name] for name in beside},
    }


def _start(command: Sequence[str], variables: Mapping[str, str] | None = None) -> _Process:
    environment = {**os.environ, **(variables or {})}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def _taken(process: _Process) -> dict[str, float]:
    text, _ = process.communicate()
    assert process.returncode == 0, text
    *_, summary, cpu_seconds = text.splitlines()
    return {"seconds": float(json.loads(summary)["seconds"]), "cpu_seconds": float(cpu_seconds)}
