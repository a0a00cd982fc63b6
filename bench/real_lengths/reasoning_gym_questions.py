"""Prints questions of reasoning-gym as a JSON list; runs in the venv of its adapter.

Its argument is JSON: {"prompts": number, "seed": n, "levels": {dataset: [settings, ...]}}.
"""

from __future__ import annotations

import json
import sys

from reasoning_gym import create_dataset


def main() -> None:
    """The same number of questions of each level, by turns."""
    given = json.loads(sys.argv[1])
    levels = [(name, level) for name, several in given["levels"].items() for level in several]
    size = -(-given["prompts"] // len(levels))
    datasets = [create_dataset(name, size=size, seed=given["seed"], **it) for name, it in levels]
    questions = [dataset[index]["question"] for index in range(size) for dataset in datasets]
    print(json.dumps(questions[: given["prompts"]]))


if __name__ == "__main__":
    main()
