"""`python -m deploy.docker.smoke`: what an image has: versions, devices and programs, one a line.

    docker run --rm --gpus all seamflow/node:0.3.0.dev0-gpu deploy.docker.smoke

Exit code 1 if a part that is there does not work, such as a torch that cannot be imported.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

from deploy.docker.install import SGLANG_FOLDER

__all__ = ["main"]

_TORCH = """
import torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(torch.__version__, f"built for CUDA {torch.version.cuda}", f"GPUs: {names or 'none'}")
"""
_SGLANG = "import sglang.launch_server, sglang; print(sglang.__version__)"
_PROGRAMS = ("setpriv", "nvidia-smi")
_MODULES = ("trainer.cli", "rollout.server.cli", "services.node_agent.cli")


def main() -> int:
    """Print a line for each part; returns the exit code."""
    parts: dict[str, Callable[[], str]] = {
        "torch": lambda: _python(sys.executable, _TORCH),
        "sglang": _sglang,
        **{name: partial(_module, name) for name in _MODULES},
        **{name: partial(_program, name) for name in _PROGRAMS},
    }
    works = [works for name, part in parts.items() for works in _shown(name, part)]
    return 0 if all(works) else 1


def _shown(name: str, part: Callable[[], str]) -> Iterator[bool]:
    try:
        print(f"{name:26}{part()}", flush=True)
    except subprocess.CalledProcessError as error:
        print(f"{name:26}FAILS: {error.stderr.strip().splitlines()[-1]}", flush=True)
        yield False
    else:
        yield True


def _sglang() -> str:
    python = SGLANG_FOLDER / "bin/python"
    return _python(str(python), _SGLANG) if python.exists() else "none"


def _module(name: str) -> str:
    _python(sys.executable, f"import {name}")
    return "can be imported"


def _program(name: str) -> str:
    return shutil.which(name) or "none"


def _python(python: str, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
