"""`seamflow forecast` as a process, and next to what real ranks allocate."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.size.forecast import memory_error
from bench.size.small_models import KINDS

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "forecast.md"
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""Qwen3-4B."""


def forecast(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Of the page's file, in a folder with the model's config.json alone."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "train.toml").write_text(block("toml"))
    return subprocess.run(
        [sys.executable, "-m", "tools.forecast", *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'sdk'}"},
        capture_output=True,
        text=True,
        check=False,
    )


def block(language: str) -> str:
    """The page's first block of code in a language."""
    found = re.search(f"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_real_ranks_allocate_what_is_forecast(kind: str) -> None:
    """By torch's own allocator, on two ranks that train."""
    assert memory_error(kind) < 0.1


@pytest.mark.timeout(400)
def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    """All of it: what does not fit, and the cure, which was counted."""
    command, _, shown = block("console").partition("\n")
    done = forecast(tmp_path, *command.removeprefix("$ seamflow forecast ").split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == shown.strip()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device", "h100"), "--device is 'h100': give one of h100-80, h200-141"),
        (("--device", "h100-80", "--mean-tokens", "9000"), "each must be above the one before"),
        (
            ("--device", "h100-80", "--set", "trainer.backend=pipeline"),
            "a forecast counts the fsdp",
        ),
        (("--device", "h100-80", "--model", "nowhere"), "has no config.json"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    """It names the setting and the cure."""
    done = forecast(tmp_path, *flags)
    assert done.returncode in (64, 78)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
