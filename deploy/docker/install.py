"""Install what an image needs, at build time: torch from its own index, then the extra's packages.

    python install.py [EXTRA]

Seamflow itself is installed afterwards, so that a change of it downloads nothing again.

Environment: EXTRA (extras of pyproject.toml, comma-separated), where no argument names them;
TORCH_INDEX_URL: serves torch alone, and where it is empty, pip's own index serves torch too, with
its CUDA; SGLANG: "cpu" or "cuda" adds SGLang, for machines without a GPU or with one, in an
environment of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SGLANG_FOLDER = Path("/opt/seamflow/sglang")
_SGLANG_FILES = Path("sglang_cpu")
_OWN = "seamflow["


def main() -> None:
    """Run pip, with retries."""
    extra = sys.argv[1] if len(sys.argv) > 1 else os.environ["EXTRA"]
    requirements = requirements_of(extra, Path("pyproject.toml"))
    _install(sys.executable, requirements)
    _compile(Path(sys.prefix))
    match os.environ.get("SGLANG", ""):
        case "cpu":
            _install_sglang()
        case "cuda":
            _install_sglang_cuda()
        case "":
            pass
        case other:
            sys.exit(f"SGLANG is {other!r}: give cpu or cuda, or leave it empty")


def requirements_of(extra: str, project: Path) -> list[str]:
    """What seamflow with these extras requires of others."""
    table = tomllib.loads(project.read_text())["project"]
    extras: Mapping[str, Sequence[str]] = table["optional-dependencies"]
    found = {*table["dependencies"], *_expanded(extra.split(","), extras)}
    return sorted(found)


def torch_of(requirements: Sequence[str]) -> list[str]:
    """The pinned torch, if any: the default index would install CUDA builds."""
    return [each for each in requirements if each.startswith("torch==")]


def _expanded(names: Sequence[str], extras: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for requirement in (each for name in names for each in extras[name]):
        if requirement.startswith(_OWN):
            yield from _expanded(requirement.removeprefix(_OWN).rstrip("]").split(","), extras)
        else:
            yield requirement


def _install(python: str | Path, requirements: Sequence[str]) -> None:
    if index := os.environ.get("TORCH_INDEX_URL"):
        for torch in torch_of(requirements):
            # What torch itself needs comes with the rest.
            _pip(python, "--no-deps", "--index-url", index, torch)
    _pip(python, *requirements)


def _install_sglang() -> None:
    """As `make .venv-sglang` does."""
    _run(sys.executable, "-m", "venv", SGLANG_FOLDER)
    python = SGLANG_FOLDER / "bin/python"
    lines = (_SGLANG_FILES / "requirements.txt").read_text().splitlines()
    _install(python, [line for line in lines if not line.startswith("#")])
    _pip(python, "--no-deps", "-r", str(_SGLANG_FILES / "sglang.txt"))
    (packages,) = SGLANG_FOLDER.glob("lib/python3.*/site-packages")
    for file in _SGLANG_FILES.glob("sglang_cpu_names.*"):
        shutil.copy(file, packages)
    _compile(SGLANG_FOLDER)


def _install_sglang_cuda() -> None:
    """The same version with all that it names, which brings its own torch and kernels."""
    _run(sys.executable, "-m", "venv", SGLANG_FOLDER)
    _pip(SGLANG_FOLDER / "bin/python", "-r", str(_SGLANG_FILES / "sglang.txt"))
    _compile(SGLANG_FOLDER)


def _compile(folder: Path) -> None:
    """All packages at once, which pip compiles one after another; what is compiled stays."""
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", str(folder / "lib")]
    # Not checked: some packages carry files for other versions of Python.
    subprocess.run(command, check=False)


def _pip(python: str | Path, *arguments: str) -> None:
    _run(python, "-m", "pip", "install", "--no-compile", *arguments)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
