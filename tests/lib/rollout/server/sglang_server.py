"""A real SGLang server on this CPU, for the tests that are marked `sglang`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.sglang import process_guard
from rollout.server.engines.sglang.command_line import command_line
from tests.lib.redis_server import free_port

PYTHON = Path(__file__).parents[4] / ".venv-sglang/bin/python"
# What a host without a GPU needs, and less memory than SGLang would take.
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--grammar-backend", "none"),
    *("--max-total-tokens", "8192", "--sleep-on-idle"),
)
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def sglang_config(model: Path, **fields: Any) -> RolloutServerConfig:
    """A rollout server of run "run" that starts its own SGLang."""
    defaults: dict[str, Any] = {
        "engine": "sglang",
        "model": model,
        "run_id": "run",
        "server_id": "s1",
        "port": 0,
        "sglang_command": (str(PYTHON), "-m", "sglang.launch_server"),
        "sglang_flags": FLAGS,
    }
    return RolloutServerConfig(**(defaults | fields))


@contextmanager
def sglang_server(config: RolloutServerConfig) -> Iterator[str]:
    """Start SGLang as the engine would, but for several event loops; gives its URL."""
    port = free_port()
    address = ("--host", "127.0.0.1", "--port", str(port))
    command = [sys.executable, "-I", process_guard.__file__, *command_line(config), *address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=os.environ | ENVIRONMENT, start_new_session=True
    ) as started:
        try:
            while not _answers(f"http://127.0.0.1:{port}/ready"):
                assert started.poll() is None, "SGLang did not start"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
