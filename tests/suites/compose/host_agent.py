"""The agent of docs/deployment.md on this machine, as the page has it, until it is trained on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from tools.provenance import ROOT

PAGE = ROOT / "docs" / "deployment.md"
_HEADING = "## An agent on this machine, over HTTP"
_SECONDS = 300.0


def program(page: Path = PAGE) -> str:
    """The Python of the page's section.

    Raises:
        ValueError: the section, or its program, is gone.
    """
    section = page.read_text().partition(f"{_HEADING}\n")[2].partition("\n## ")[0]
    found = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"{page.name}: {len(found)} programs under {_HEADING!r}, not one")
    return str(found[0])


def run_page() -> list[str]:
    """Run it from the repository's root, as the page says; returns the rollouts it finished."""
    done = subprocess.run(
        [sys.executable, "-"],
        input=program(),
        cwd=ROOT,
        text=True,
        check=True,
        stdout=subprocess.PIPE,
        timeout=_SECONDS,
    )
    return [line.split()[0] for line in done.stdout.splitlines()]


def is_trained(rollouts: Collection[str], trained: str) -> bool:
    """Whether a sample of one of the rollouts is among `trained`, the trainer's JSON lines."""
    lines = [json.loads(line) for line in trained.splitlines() if line]
    names = {name.rpartition("#")[0] for line in lines for name in line["sample_ids"]}
    return not names.isdisjoint(rollouts)
