"""`seamflow evaluate my.toml --checkpoint FOLDER --tasks FILE`: evaluate without training.

The configuration file is that of `seamflow train`: it says which agent or environment solves the
tasks, on which nodes. FOLDER is a checkpoint of the trainer, or a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from seamflow.inspect.run_files import json_object

from services.chassis.config.load import exiting, load
from services.chassis.errors import ConfigError, ExitCode
from services.launcher import redis_server
from services.launcher.checks.prerequisites import check_evaluation, check_installed, check_program
from services.launcher.checks.run_settings import process_setting
from services.launcher.checks.user_code import (
    check_user_code,
    checked_settings,
    with_task_fields,
)
from services.launcher.child_process import ProcessPlan
from services.launcher.cli import make_layout
from services.launcher.config import DEFAULT_FILE, LauncherConfig, flags_by_table, own_settings
from services.launcher.layout import Layout
from services.launcher.process_plan import plan
from services.launcher.report.view import LiveView, View
from services.launcher.run import Run
from services.launcher.supervisor import child_environment
from services.lib.evaluation import EvaluationConfig, EvaluationLine, shown

_TRAIN_NODE = "no-trainer"
"""A run has a node that trains; here it is never started."""
_FLAGS = ("tasks", "samples", "metric", "goal", "success-above")


def main() -> NoReturn:
    """Evaluate; exits with a code of `ExitCode`, or with 130 after Ctrl-C."""
    given, others = _parser().parse_known_args()
    try:
        with exiting("evaluate"):
            sys.exit(_main(given, others))
    except KeyboardInterrupt:
        print("stopped; all processes have ended", file=sys.stderr)
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seamflow evaluate",
        description="Run tasks with a checkpoint, without training.",
        epilog="Other flags are settings of [launcher], such as --nodes or --set TABLE.NAME=VALUE.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", nargs="?", type=Path, help=f"configuration of the run ({DEFAULT_FILE})"
    )
    parser.add_argument("--config", type=Path, help="the same, as a flag")
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint or model folder")
    parser.add_argument("--out", type=Path, help="JSON file for the result, too")
    parser.add_argument("--tasks", help="held-out tasks: a file, hf://DATASET or module:function")
    parser.add_argument("--samples", help="rollouts of each task: k of pass@k")
    parser.add_argument("--metric", help="reward that is averaged")
    parser.add_argument("--goal", help="max or min")
    parser.add_argument("--success-above", help="rewards above this are solved, for pass@k")
    return parser


def _main(given: argparse.Namespace, others: list[str]) -> int:
    file = given.config or given.file or Path(DEFAULT_FILE)
    if file == Path(DEFAULT_FILE) and not file.is_file():
        raise ConfigError(
            f"no configuration file is named and there is no {DEFAULT_FILE} here: name the TOML "
            "file of the run"
        )
    config, settings = _settings(given, others, file)
    if not given.checkpoint.is_dir():
        raise ConfigError(f"--checkpoint {str(given.checkpoint)!r} is not a folder")
    layout = make_layout(config, file)
    check_evaluation(config, settings)
    config = config.replace(model=str(_model_folder(given.checkpoint, config, layout)))
    plans = _plans(config, settings, layout, _step(given.checkpoint))
    plans = with_task_fields(plans, checked_settings(config, plans))
    check_user_code(config, layout, {"evaluator": plans["evaluator"]})
    check_installed(plans.values(), process_setting(config, file, "rollout_server.engine"))
    check_program(plans)
    is_terminal = sys.stdout.isatty() and config.live
    view = LiveView(config.name, layout.folder / "metrics.jsonl") if is_terminal else View()
    with view:
        run = Run(config, layout, plans, view, evaluation=settings)
        line = asyncio.run(run.evaluate())
    _report(line, given.checkpoint, layout.folder / "evaluation.json", given.out)
    return ExitCode.CLEAN


def _settings(
    given: argparse.Namespace, others: list[str], file: Path
) -> tuple[LauncherConfig, EvaluationConfig]:
    """Those of a run of its own beside the file's, whose nodes never train."""
    config = load(LauncherConfig, "launcher", ["--config", str(file), *own_settings(others)])
    flags = [
        f"--{name}={value}"
        for name in _FLAGS
        if (value := getattr(given, name.replace("-", "_"))) is not None
    ]
    of_set = flags_by_table(config.set).get("evaluation", ())
    settings = load(EvaluationConfig, "evaluation", ["--config", str(file), *of_set, *flags])
    if not (settings.tasks or config.heldout_tasks or config.num_heldout):
        raise ConfigError("there are no held-out tasks: give --tasks")
    nodes = [n for n in config.node_plans() if "rollout" in n.tags and not n.host]
    if not nodes:
        raise ConfigError("no node of this host has the tag 'rollout': give --nodes")
    return config.replace(
        name=f"{config.name}-evaluation-{time.strftime('%Y%m%d-%H%M%S')}",
        nodes=(*(node.text("rollout") for node in nodes), f"{_TRAIN_NODE}: train"),
        hosts=(),
        trainer_ranks=0,
        reference=None,
        reward_model=None,
        required_columns=(),
        resume=False,
        serve=False,
        console=False,
    ), settings


def _plans(
    config: LauncherConfig, settings: EvaluationConfig, layout: Layout, step: int
) -> dict[str, ProcessPlan]:
    plans = plan(config, layout, settings, step)
    for name in ("trainer", "dataloader", f"node_agent-{_TRAIN_NODE}"):
        plans.pop(name, None)
    if "redis" in layout.ports:
        redis = redis_server.server_plan(config, layout.folder, layout.ports["redis"])
        plans = {"redis": redis, **plans}
    return plans


def _model_folder(checkpoint: Path, config: LauncherConfig, layout: Layout) -> Path:
    """The Hugging Face folder itself, or one written from the trainer's checkpoint."""
    if (checkpoint / "config.json").is_file():
        return checkpoint.resolve()
    out = layout.folder / "model"
    command = [sys.executable, "-m", "trainer.checkpoint.model_folder", str(checkpoint), str(out)]
    if not _state(checkpoint).get("model"):
        command += ["--model", layout.path(config.model)]
    done = subprocess.run(
        command, env=child_environment({}), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"--checkpoint {checkpoint}: {done.stderr.strip().splitlines()[-1]}")
    return out


def _state(checkpoint: Path) -> dict[str, Any]:
    """What a trainer's checkpoint says of itself; empty for a Hugging Face folder."""
    return json_object(checkpoint / "state.json")


def _step(checkpoint: Path) -> int:
    return int(_state(checkpoint).get("step", 0))


def _report(line: EvaluationLine, checkpoint: Path, *files: Path | None) -> None:
    facts = {**asdict(line), "checkpoint": str(checkpoint.resolve())}
    for file in files:
        if file is not None:
            file.write_text(json.dumps(facts, indent=2) + os.linesep)
    print(shown(line))
    if line.interval is not None:
        low, high = line.interval
        print(f"95 % interval {low:.3f} to {high:.3f}, {line.num_tasks} tasks", end=", ")
    print(f"{line.num_rollouts} rollouts; {files[0]}")


if __name__ == "__main__":
    main()
