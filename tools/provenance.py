"""Where a result comes from: commit, date and machine."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def provenance(raw: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """The fields that every result carries besides its figures."""
    return {
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "runs": max((len(samples) for samples in raw.values()), default=1),
    }


def benchmarks() -> dict[str, dict[str, Any]]:
    """bench/benchmarks.toml: what each benchmark is called, how it is run, what it measures."""
    return tomllib.loads((ROOT / "bench" / "benchmarks.toml").read_text(encoding="utf-8"))


def _commit() -> str:
    """The commit; "-dirty" if files differ from it, but for results that were written just now."""
    others = ("--", ".", ":(exclude)bench/results")
    try:
        commit = _git("rev-parse", "--short=8", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", *others)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    command = ("git", *arguments)
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
