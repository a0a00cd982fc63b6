"""One SGLang server on this machine's CPU, as `make bench-rollout` and its peers share it."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from bench.harness import processes
from bench.harness.redis_process import free_port
from tools.provenance import ROOT

PYTHON = ROOT / ".venv-sglang/bin/python"
MAX_RUNNING = 32
STREAM_INTERVAL = 8
_READY_SECONDS = 300.0
# Token ids in increments, which is what costs SGLang least: the same server answers both sides.
_FLAGS = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--max-running-requests", str(MAX_RUNNING), "--max-total-tokens", "16384"),
    *("--mem-fraction-static", "0.05", "--stream-interval", str(STREAM_INTERVAL)),
    *("--incremental-streaming-output", "--skip-tokenizer-init", "--log-level", "warning"),
)


@contextmanager
def sglang_server(model: Path, folder: Path) -> Iterator[str]:
    """Its URL; it runs until the context ends, with its log in `folder`.

    Raises:
        RuntimeError: it does not start; its own words are in the message.
    """
    if not PYTHON.exists():
        raise RuntimeError(f"{PYTHON} is missing: `make bench-rollout` makes it")
    port = free_port()
    address = ("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port))
    command = [str(PYTHON), "-m", "sglang.launch_server", *address, *_FLAGS]
    environment = processes.environment({"HF_HUB_OFFLINE": "1"})
    # Its packages are its own; ours must not stand in for them.
    del environment["PYTHONPATH"]
    url = f"http://127.0.0.1:{port}"
    with processes.Child("sglang", command, folder, environment) as server:
        _wait_until_ready(server, url)
        try:
            yield url
        finally:
            server.stop()


def _wait_until_ready(server: processes.Child, url: str) -> None:
    limit = time.monotonic() + _READY_SECONDS
    while not _is_ready(url):
        if not server.running or time.monotonic() > limit:
            tail = server.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"SGLang is not ready at {url}:\n{tail}")
        time.sleep(0.2)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:  # noqa: S310 -- loopback
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
