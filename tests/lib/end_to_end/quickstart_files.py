"""Model, tokenizer and tasks of the quickstart without its warm start; for a run's `prepare`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.quickstart import task
from examples.quickstart.prepare import build_model, build_tokenizer

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


def main() -> None:
    """Make them in the folder of --out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int)
    folder = parser.parse_args().out
    folder.mkdir(exist_ok=True)
    make_quickstart(folder)


if __name__ == "__main__":
    main()
