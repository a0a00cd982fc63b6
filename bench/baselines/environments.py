"""Interpreter and module of each baseline, by the name of its file.

A baseline `<name>.py` with a file `<name>.txt` next to it runs in `.venv-peers/<name>`, made when
first needed; one without runs in the interpreter of the measurement. The packages of
`<name>.bare.txt` are installed without their own requirements, which would replace builds that are
already there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent
_ENVIRONMENTS = _FOLDER.parent.parent / ".venv-peers"


def module_of(name: str) -> str:
    """The module of a baseline, for `python -m`."""
    return f"bench.baselines.{_source(name).parent.name}.{name}"


def has_environment(name: str) -> bool:
    """Whether the baseline has requirements of its own."""
    return _requirements(name).exists()


def interpreter(name: str) -> Path:
    """The Python that runs a baseline; installs its requirements if they are new or have changed.

    Raises:
        subprocess.CalledProcessError: pip failed; its own words are on stderr.
    """
    requirements = _requirements(name)
    if not requirements.exists():
        return Path(sys.executable)
    environment = _ENVIRONMENTS / name
    python, made = environment / "bin" / "python", environment / "made.txt"
    if not made.exists() or made.read_text() != requirements.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        _install(python, requirements)
        made.write_text(requirements.read_text())
    return python


def installed(python: Path, *packages: str) -> dict[str, str]:
    """Versions of `packages` where `python` runs."""
    code = "import json, sys; from importlib.metadata import version"
    code += "; print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    answer = subprocess.run(
        [str(python), "-c", code, *packages], check=True, stdout=subprocess.PIPE, text=True
    )
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


def _install(python: Path, requirements: Path) -> None:
    # One by one, in the file's order: a package may bring another build of one it needs (torch
    # with CUDA) unless that is there already. The whole file constrains each step.
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = python.parents[1] / "constraints.txt"
    constraints.write_text(re.sub(r"\[.*?\]", "", requirements.read_text()))  # pip takes no extras
    for requirement in requirements.read_text().splitlines():
        subprocess.run([*pip, "--constraint", str(constraints), requirement], check=True)
    bare = requirements.with_suffix(".bare.txt")
    if bare.exists():
        subprocess.run([*pip, "--no-deps", "--requirement", str(bare)], check=True)


def _requirements(name: str) -> Path:
    return _source(name).with_suffix(".txt")


def _source(name: str) -> Path:
    (file,) = _FOLDER.glob(f"*/{name}.py")
    return file
