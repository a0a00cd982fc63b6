"""Recipes are right, and the smallest fits its devices, on models without bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.size.model_shapes import MODELS
from tests.lib.end_to_end.support import ROOT, child_environment
from tests.lib.sparse_model import make_sparse_model

RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))
_IN_SHORT = "qwen3_30b_a3b_agents_64k"
"""The quickest."""
_LONG = pytest.mark.long(short="tests/system/tools/test_recipes.py")
_MODEL_OF = {"qwen3_4b": "qwen3-4b", "qwen3_32b": "qwen3-32b", "qwen3_30b": "qwen3-30b-a3b"}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem == _IN_SHORT else _LONG)
        for path in RECIPES
    ],
)
def test_a_recipe_passes_the_dry_run(recipe: Path, tmp_path: Path) -> None:
    """That of Qwen3-4B passes the forecast too, which takes long for the others."""
    name = next(model for start, model in _MODEL_OF.items() if recipe.stem.startswith(start))
    model = make_sparse_model(tmp_path / "model", MODELS[name])
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1", "answer": "2"}\n')
    is_forecast = name == "qwen3-4b"
    said = _dry_run(recipe, model, tasks, *(["--forecast", "h100-80"] if is_forecast else []))
    assert "nothing was started" in said
    assert said.count("  fits: ") == 2 * is_forecast, said
    assert recipe.read_text().startswith("# Has not run on a GPU")


def _dry_run(recipe: Path, model: Path, tasks: Path, *arguments: str) -> str:
    changed, text = [f"launcher.model={model}"], recipe.read_text()
    if "\nhosts = " in text:
        changed.append("launcher.hosts=127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4")
    if "\ntasks = " in text:
        changed += [f"launcher.tasks={tasks}", f"evaluation.tasks={tasks}"]
    flags = [flag for each in changed for flag in ("--set", each)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "seamflow.cli.main", "train", "--config", str(recipe)),
            *("--dry-run", *arguments, *flags),
        ],
        cwd=ROOT,
        env=child_environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
