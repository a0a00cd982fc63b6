"""Model, tokenizer and tasks of the quickstart, without its warm start."""

from __future__ import annotations

import json
from pathlib import Path

from examples.quickstart import task
from examples.quickstart.prepare import build_model, build_tokenizer

__all__ = ["make_quickstart"]

_TASKS = 64


def make_quickstart(folder: Path) -> None:
    """Make `folder/model` and `folder/tasks.jsonl`."""
    tokenizer = build_tokenizer()
    build_model(len(tokenizer), seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [
        json.dumps({"task_id": f"{number}-{task.task_name(payload)}", "payload": payload})
        for number, payload in enumerate(task.tasks(1, _TASKS, "train"))
    ]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
