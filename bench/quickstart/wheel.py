"""`make bench-wheel`: from an empty environment to a trained agent, with the wheel alone.

The wheel is built from a clean clone, then installed by pip and by uv, each into an environment of
its own and without a cache, in a folder that has no checkout. Downloads depend on the network;
where pip finds local files (PIP_FIND_LINKS), uv gets them too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.quickstart.install import size
from bench.report import Report

_UV = Path(__file__).parents[2] / ".venv-uv" / "bin"
_VERSIONS = ("pip", "uv", "torch", "transformers")
_PRINT = """
import importlib.metadata as m, json, sys
print(json.dumps({d.name: d.version for d in m.distributions() if d.name in sys.argv[1:]}))
"""
INSTALLERS: Mapping[str, Sequence[str]] = {
    "pip": ("python3 -m venv ENV", "ENV/bin/pip install WHEEL[quickstart]"),
    "uv": ("uv venv ENV", "uv pip install --python ENV WHEEL[quickstart]"),
}
"""Commands that make an environment and install the wheel."""
TRAINING = (". ENV/bin/activate", "seamflow init p", "cd p", "seamflow train")
"""Commands to a trained agent, once it is installed."""


def main() -> None:
    """Build, install, train; publish."""
    with tempfile.TemporaryDirectory(prefix="seamflow-wheel-") as folder:
        root = Path(folder)
        wheel = build(root)
        figures = {"wheel_mib": wheel.stat().st_size / 2**20}
        peers = {}
        for installer in INSTALLERS:
            found, peers[installer] = measure(installer, wheel, root / installer)
            figures |= {f"{installer}.{name}": value for name, value in found.items()}
    Report(
        bench="wheel", figures=figures, seeds=[0], packages=("hatchling",), peers=peers
    ).publish()


def build(root: Path) -> Path:
    """The wheel of a clean clone of this repository."""
    clone = root / "clone"
    subprocess.run(["git", "clone", "--quiet", str(Path.cwd()), str(clone)], check=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(root / "dist")]
    subprocess.run(command, cwd=clone, check=True)
    (wheel,) = (root / "dist").glob("*.whl")
    return wheel


def measure(
    installer: str, wheel: Path, folder: Path
) -> tuple[dict[str, float], Mapping[str, str]]:
    """Seconds, commands and what there is in the end; versions of the environment."""
    folder.mkdir()
    start = time.monotonic()
    for command in INSTALLERS[installer]:
        words = command.replace("WHEEL", str(wheel)).replace("ENV", str(folder / "env")).split()
        subprocess.run(words, cwd=folder, env=variables(folder), check=True)
    installed = time.monotonic() - start
    subprocess.run(["seamflow", "init", "p"], cwd=folder, env=variables(folder), check=True)
    subprocess.run(["seamflow", "train"], cwd=folder / "p", env=variables(folder), check=True)
    trained = time.monotonic() - start
    commands = len(INSTALLERS[installer]) + len(TRAINING)
    times = {"minutes_to_installed": installed / 60, "minutes_to_trained": trained / 60}
    figures = {"commands": float(commands), **times, **outcome(folder)}
    return figures, versions(folder)


def outcome(folder: Path) -> dict[str, float]:
    """What was learned, and what the installation has put at the top of site-packages."""
    summary = json.loads((folder / "p/runs/latest/summary.json").read_text(encoding="utf-8"))
    (record,) = (folder / "env").glob("lib/python3*/site-packages/seamflow-*.dist-info/RECORD")
    files = [line.partition(",")[0] for line in record.read_text(encoding="utf-8").splitlines()]
    tops = {file.partition("/")[0] for file in files if not file.startswith("..")}
    print("at the top of site-packages:", ", ".join(sorted(tops)), flush=True)
    return {
        "success_before": summary["heldout_before"],
        "success_after": summary["heldout_after"],
        "top_level_names": float(sum(not each.endswith(".dist-info") for each in tops)),
        "environment_mib": size(folder / "env") / 2**20,
    }


def versions(folder: Path) -> Mapping[str, str]:
    """Those of the environment that say how it was installed and what computed."""
    command = [str(folder / "env/bin/python"), "-c", _PRINT, *_VERSIONS]
    found: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return found


def variables(folder: Path) -> dict[str, str]:
    """Of a shell with the environment activated, that knows nothing of this checkout."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SEAMFLOW_", "PYTHON", "VIRTUAL_ENV"))
    }
    links = os.environ.get("PIP_FIND_LINKS")
    return {
        **kept,
        **({"UV_FIND_LINKS": links} if links else {}),
        "PATH": os.pathsep.join((str(folder / "env/bin"), os.environ["PATH"], str(_UV))),
        "PIP_NO_CACHE_DIR": "1",
        "UV_NO_CACHE": "1",
    }


if __name__ == "__main__":
    main()
