"""Install the dependencies of an image at build time: torch from its own index, then the extra.

Environment: EXTRA (extras of pyproject.toml, comma-separated) and TORCH_INDEX_URL; where
that is empty, pip's own index serves torch too, with its CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Run pip, with retries."""
    extra = os.environ["EXTRA"]
    for requirement in torch_of(extra, Path("pyproject.toml")):
        index = os.environ.get("TORCH_INDEX_URL")
        _pip(requirement, *(["--index-url", index] if index else []))
    _pip(f".[{extra}]")


def torch_of(extra: str, project: Path) -> list[str]:
    """The pinned torch of the extras, if any: the default index would install CUDA builds."""
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    required = {requirement for name in extra.split(",") for requirement in extras[name]}
    return [requirement for requirement in required if requirement.startswith("torch==")]


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=True)


if __name__ == "__main__":
    main()
