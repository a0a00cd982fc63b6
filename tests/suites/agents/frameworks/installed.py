"""Where the frameworks are installed, each in an environment of its own, and how agents start."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tools.provenance import ROOT

HERE = Path(__file__).parent
AGENTS = ("smolagents", "pydantic_ai", "langchain", "openai_agents", "litellm", "ai_sdk")
"""One agent of each framework."""
_SECONDS = 300.0


def run_agent(name: str, base_url: str, api_key: str) -> dict[str, Any]:
    """What an agent has found: {"answer", "report"}. Raises `RuntimeError`: it has failed."""
    command = [*_command(name), base_url, api_key]
    # No framework reports home, and none reads the caller's keys.
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", ""),
        "OPENAI_API_KEY": api_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "AI_SDK_LOG_WARNINGS": "false",
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def versions_of(name: str) -> dict[str, str]:
    """The pinned version of each package of a framework."""
    if name == "ai_sdk":
        package = json.loads((HERE / "node" / "package.json").read_text("utf-8"))
        return dict(package["dependencies"])
    lines = (HERE / "requirements" / f"{name}.txt").read_text("utf-8").splitlines()
    return {package: version for package, _, version in (line.partition("==") for line in lines)}


def _command(name: str) -> list[str]:
    if name == "ai_sdk":
        return ["node", str(HERE / "node" / "ai_sdk.mjs")]
    python = ROOT / ".venv-frameworks" / name / "bin" / "python"
    return [str(python), str(HERE / "agents" / f"{name}_agent.py")]
