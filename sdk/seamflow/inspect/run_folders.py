"""The run folders of this machine, and what is told of an ended run from its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seamflow.errors import NotFoundError
from seamflow.inspect.endpoints import UsageError
from seamflow.inspect.learning import not_learning
from seamflow.inspect.lives import lives, time_text
from seamflow.inspect.progress import read_progress
from seamflow.inspect.run_files import json_lines, json_object, read_steps
from seamflow.inspect.status_screen import life_lines, metric_lines
from seamflow.network.host_port import listens
from seamflow.token_text import Decode

_NEWEST = 20
_NOTE = "note.txt"

_COLUMNS = (
    *("run", "state", "steps", "last step's reward", "best held-out", "health"),
    *("first started", "lives", "note", "folder"),
)


def ended_status(folder: Path, ended: str) -> str:
    """Text of the screen: how it ended, its last step, its evaluations, its files."""
    steps = read_steps(folder / "metrics.jsonl")
    lines = [ended, *life_lines(lives(folder))]
    if steps:
        last = {k: v for k, v in steps[-1].items() if k not in ("step", "time")}
        numbers = {k: v for k, v in last.items() if isinstance(v, int | float)}
        step, reward = steps[-1].get("step"), _range(steps, "reward_mean")
        lines.append(f"trainer  step {step}; mean reward {reward}; of the last step:")
        lines += metric_lines(numbers)
    else:
        lines.append("trainer  no step was trained")
    lines += _evaluations(folder)
    names = ("summary.json", "reward_curve.png", "samples.jsonl", "received.jsonl", "checkpoints")
    files = [name for name in names if (folder / name).exists()]
    return "\n".join([*lines, f"files    {', '.join(files) or 'none'} in {folder}"])


def recorded_rollouts(folder: Path, ended: str) -> list[str]:
    """The newest rollouts whose answers an agent of the launcher has written down.

    Raises:
        NotFoundError: none has; says which command shows the others.
    """
    names = dict.fromkeys(each["rollout_id"] for each in _received(folder))
    if not names:
        raise NotFoundError(f"{folder / 'received.jsonl'} holds no answers; {ended}")
    return [*list(names)[-_NEWEST:], "show one with `seamflow tail ID`"]


def recorded_turns(folder: Path, rollout_id: str, decode: Decode, ended: str) -> Iterator[str]:
    """The answers of a rollout, as its agent received them.

    Raises:
        NotFoundError: the agent has written down none.
    """
    turns: dict[str, list[int]] = {}
    for each in _received(folder):
        if each["rollout_id"] == rollout_id:
            turns.setdefault(each["turn_id"], []).extend(each["token_ids"])
    if not turns:
        raise NotFoundError(
            f"{folder / 'received.jsonl'} holds no answers of rollout {rollout_id!r}: `seamflow "
            f"tail` lists those that it has; {ended}"
        )
    for turn_id, token_ids in turns.items():
        yield f"── turn {turn_id}\n{decode(token_ids)}\n"
    yield f"the answers alone, from {folder / 'received.jsonl'}; {ended}"


def _evaluations(folder: Path) -> Iterator[str]:
    lines = list(json_lines(folder / "evaluation.jsonl"))
    best_so_far = [line for line in lines if line.get("is_best")]
    for line in lines:
        if isinstance(line.get("mean"), int | float):
            best = "  (best)" if line in best_so_far[-1:] else ""
            metric = line.get("metric", "reward")
            yield f"held-out {metric}, step {line.get('step')}: {line['mean']:.3f}{best}"


def _range(steps: Sequence[Mapping[str, Any]], name: str) -> str:
    """The first value and, of several, the last, each with its step."""
    known = [step for step in steps if isinstance(step.get(name), int | float)]
    ends = known[:1] + known[1:][-1:]
    return " → ".join(f"{each[name]:.3f} (step {each['step']})" for each in ends) or "unknown"


def _received(folder: Path) -> Iterator[Mapping[str, Any]]:
    for each in json_lines(folder / "received.jsonl"):
        if {"rollout_id", "turn_id", "token_ids"} <= each.keys():
            yield each


def print_run_folders(parent: Path) -> int:
    """Print a line for each run below `parent`, the newest first."""
    rows = [tuple(row.values()) for row in run_folders(parent)]
    if not rows:
        print(f"no runs in {parent}: start one with `seamflow train`, or give --folder")
        return 0
    widths = [max(len(row[i]) for row in (_COLUMNS, *rows)) for i in range(len(_COLUMNS))]
    for row in (_COLUMNS, *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def run_folders(parent: Path) -> list[Mapping[str, str]]:
    """State, steps, last mean reward, best evaluation and health of each run, the newest first."""
    folders = [
        file.parent for file in parent.glob("*/addresses.json") if not file.parent.is_symlink()
    ]
    return [_row(folder) for folder in sorted(folders, key=started, reverse=True)]


def _row(folder: Path) -> Mapping[str, str]:
    progress, found = read_progress(folder), lives(folder)
    last = progress.steps[-1] if progress.steps else {}
    reward = last.get("reward_mean")
    best = json_object(folder / "checkpoints" / "best" / "best.json")
    return {
        "run": folder.name,
        "state": run_state(folder),
        "steps": str(last.get("step", 0)),
        "reward": "" if reward is None else f"{reward:.3f}",
        "best": f"{best['value']:.3f} at step {best['step']}" if best else "",
        "health": ", ".join(each.rule for each in not_learning(progress)) or "ok",
        "started": time_text(found[0].start if found else started(folder)),
        "lives": str(len(found) or 1),
        "note": note(folder),
        "folder": str(folder),
    }


def note(folder: Path) -> str:
    """What a person has noted of the run, in one line; words with "#" are its tags."""
    try:
        return " ".join((folder / _NOTE).read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return ""


def write_note(folder: Path, text: str) -> None:
    """Note something of the run; an empty text removes the note.

    Raises:
        UsageError: no run is there.
    """
    if not (folder / "addresses.json").is_file():
        raise UsageError(f"{folder} is no folder of a run: `seamflow runs` lists those that are")
    (folder / _NOTE).write_text(f"{text}\n", encoding="utf-8")


def run_state(folder: Path) -> str:
    """That of its last life: running, finished, stopped, failed, or killed.

    Of a folder without lives: running if its gateway's port answers.
    """
    if found := lives(folder):
        return found[-1].state
    address = str(json_object(folder / "addresses.json").get("rollout_gateway", ""))
    if listens(address):
        return "running"
    return "finished" if (folder / "summary.json").is_file() else "killed"


def started(folder: Path) -> float:
    """Unix time at which the launcher last started the run."""
    return (folder / "addresses.json").stat().st_mtime
