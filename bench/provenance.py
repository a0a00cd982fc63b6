"""Where a result comes from: commit, date, machine, and a digest of the code it measures."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["benchmarks", "code_digest", "provenance"]

ROOT = Path(__file__).parents[1]
_GENERATED = {"__pycache__", "node_modules"}
_SUFFIXES = {".py", ".lua", ".proto", ".toml", ""}


def provenance(bench: str, raw: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """The fields that every result carries besides its figures."""
    code = benchmarks().get(bench, {}).get("code", ())
    return {
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "runs": max((len(samples) for samples in raw.values()), default=1),
        "code": code_digest(code) if code else "",
    }


def benchmarks() -> dict[str, dict[str, Any]]:
    """bench/benchmarks.toml: what each benchmark is called, how it is run, what it measures."""
    return tomllib.loads((ROOT / "bench" / "benchmarks.toml").read_text(encoding="utf-8"))


def code_digest(paths: Iterable[str]) -> str:
    """SHA-256 over the source files below `paths`, shortened to 16 digits."""
    digest = hashlib.sha256()
    for path in paths:
        for file in _sources(ROOT / path):
            digest.update(str(file.relative_to(ROOT)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _sources(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = (file for file in path.rglob("*") if file.is_file() and file.suffix in _SUFFIXES)
    return sorted(file for file in files if not _GENERATED & set(file.parts))


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
        return subprocess.check_output(command, cwd=ROOT, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
