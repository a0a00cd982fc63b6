"""Where the deployment's files are, and the secrets they refer to."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deploy.generate_secrets import generate

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "docker-compose.yml"
IMAGES = ROOT / "deploy" / "compose.images.yml"
CONFIG = ROOT / "deploy" / "config"
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))


def compose(file: Path = COMPOSE) -> dict[str, Any]:
    """A compose file, anchors and merges resolved, without any variable set."""
    text = re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", file.read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def secrets(folder: Path) -> Path:
    """A fresh set of secrets; returns the folder of those that each service sees as /secrets."""
    generate(folder / "authority", folder / "secrets")
    return folder / "secrets"


def content(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, by its relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@contextmanager
def running(
    command: list[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The process, ended by SIGTERM."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def announced(process: subprocess.Popen[bytes], port_file: Path) -> dict[str, int]:
    """The ports, once it serves."""
    while not port_file.exists():
        assert process.poll() is None
        time.sleep(0.01)
    ports: dict[str, int] = json.loads(port_file.read_text())
    return ports
