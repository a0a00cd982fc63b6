"""`seamflow plan` as a process, and next to what real ranks allocate."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from bench.size.forecast import memory_error
from bench.size.small_models import KINDS, make_model
from tools.plan.plan_command import main

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


LONG = pytest.mark.long(short="tests/system/tools/plan/test_plan.py")


def write_run(folder: Path) -> None:
    """The page's file, and the model's config.json alone."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "train.toml").write_text(block("toml"))


def forecast(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Of the page's file."""
    write_run(folder)
    return subprocess.run(
        [sys.executable, "-m", "tools.plan", *flags],
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


@LONG
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_real_ranks_allocate_what_is_forecast(kind: str) -> None:
    """By torch's own allocator, on two ranks that train."""
    assert memory_error(kind) < 0.1


@LONG
@pytest.mark.timeout(400)
def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    """All of it: what does not fit, and the cure, which was counted."""
    command, _, shown = block("console").partition("\n")
    done = forecast(tmp_path, *command.removeprefix("$ seamflow plan ").split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == shown.strip()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device", "h100"), "argument --device: 'h100': give one of h100-80, "),
        (("--device", "h100-80", "--mean-tokens", "90000"), "each must be above the one before"),
        (
            ("--device", "h100-80", "--set", "trainer.backend=pipeline"),
            "a forecast counts the fsdp",
        ),
        (("--device", "h100-80", "--model", "nowhere"), "has no config.json"),
        (("--device", "h100-80", "--split-nodes", "0"), "--split-nodes: '0': give a number"),
        (("--device", "h100-80", "--price", "-1"), "--price is -1.0: give dollars an hour"),
        (
            ("--device", "h100-80", "--train-device", "h800-80", "--nodes", "a: rollout train"),
            "--train-device: nodes of the run do both",
        ),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    flags: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It names the setting and the cure."""
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
        main(flags)
    assert ended.value.code in (64, 78)
    found = capsys.readouterr().err
    assert said in found
    assert len(found.splitlines()) == 1


def dry_run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Of a small model whose agents come from outside."""
    settings = f'name = "run"\nmodel = "{make_model(folder / "small", "tied")}"\nraw_tokens = true'
    (folder / "run.toml").write_text(f"[launcher]\n{settings}\n")
    return subprocess.run(
        [sys.executable, "-m", "services.launcher", "--config", "run.toml", *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'sdk'}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long(short="tests/system/tools/plan/test_plan.py")
@pytest.mark.timeout(400)
def test_a_dry_run_ends_with_a_forecast_where_a_device_is_given(tmp_path: Path) -> None:
    """Control: without the setting there is none."""
    done = dry_run(tmp_path, "--dry-run", "--forecast", "l40s-48")
    assert done.returncode == 0, done.stderr
    _, _, forecast_lines = done.stdout.partition("nothing was started\n")
    assert "l40s-48; ranks: 1" in forecast_lines.splitlines()[0]
    assert any(line.startswith("1000 steps: ") for line in forecast_lines.splitlines())
    assert dry_run(tmp_path, "--dry-run").stdout.endswith("nothing was started\n")


def test_a_forecast_alone_is_another_command(tmp_path: Path) -> None:
    """The setting belongs to a dry run."""
    done = dry_run(tmp_path, "--forecast", "l40s-48")
    assert done.returncode == 78
    assert "seamflow plan --device l40s-48" in done.stderr
