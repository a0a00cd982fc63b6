"""Prompts of `workloads/prompts.toml`: plain requests of many kinds, and reasoning-gym."""

from __future__ import annotations

import json
import random
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_WORKLOAD = _ROOT / "bench" / "workloads" / "prompts.toml"
_GYM_PYTHON = _ROOT / ".venv-adapters" / "reasoning_gym" / "bin" / "python"
_QUESTIONS = Path(__file__).with_name("reasoning_gym_questions.py")


def load_workload(path: Path = _WORKLOAD) -> dict[str, Any]:
    """The file's tables."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def drawn_prompts(workload: Mapping[str, Any], seed: int) -> list[str]:
    """Different prompts in random order; the same seed draws the same."""
    prompts = [*_plain(workload["plain"], seed), *_reasoning(workload["reasoning_gym"], seed)]
    random.Random(seed).shuffle(prompts)
    return prompts


def _plain(settings: Mapping[str, Any], seed: int) -> list[str]:
    drawing = random.Random(seed)
    kinds = list(settings["kinds"].values())
    found: dict[str, None] = {}  # in order, each once
    while len(found) < settings["prompts"]:
        wording = drawing.choice(kinds[len(found) % len(kinds)])
        found[re.sub(r"{(\w+)}", lambda name: _one(settings[name[1]], drawing), wording)] = None
    return list(found)


def _one(values: list[Any], drawing: random.Random) -> str:
    return str(drawing.choice(values))


def _reasoning(settings: Mapping[str, Any], seed: int) -> list[str]:
    wanted = json.dumps({**settings, "seed": seed})
    answer = subprocess.run(
        [str(_GYM_PYTHON), str(_QUESTIONS), wanted], check=True, stdout=subprocess.PIPE, text=True
    )
    drawing = random.Random(seed)
    wordings = settings["wordings"]
    asked = [
        drawing.choice(wordings).format(question=text.strip()) for text in json.loads(answer.stdout)
    ]
    return list(dict.fromkeys(asked))
