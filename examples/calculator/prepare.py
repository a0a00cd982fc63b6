"""Give a language model a chat template that shows it a call of the tool, and write the tasks.

SmolLM2's own template has no tools, and the model has not been trained to call any. The new one
has an example of a call before each conversation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from seamflow.cli.init_project.language_model import model_folder
from transformers import AutoTokenizer

__all__ = ["main"]

_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_MODEL_VARIABLE = "SEAMFLOW_EXAMPLE_MODEL"
"""Another model than SmolLM2-135M-Instruct: a Hugging Face folder."""
_TASKS = {"tasks.jsonl": 400, "heldout.jsonl": 48}


def main(argv: Sequence[str] | None = None) -> None:
    """Write model/, tasks.jsonl and heldout.jsonl into the folder given."""
    parser = argparse.ArgumentParser(description="Prepare the calculator example.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    model = model_folder(os.environ.get(_MODEL_VARIABLE, "smollm2"))
    _with_template(model, given.out / "model")
    sums = _sums(random.Random(given.seed))
    for name, number in _TASKS.items():
        lines = [json.dumps(next(sums)) + "\n" for _ in range(number)]
        (given.out / name).write_text("".join(lines), encoding="utf-8")


def _with_template(model: Path, folder: Path) -> None:
    """A folder with links to the model's files, and the tokenizer with our template."""
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        (folder / file.name).unlink(missing_ok=True)
        (folder / file.name).symlink_to(file)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = _TEMPLATE.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    for name in ("tokenizer.json", "special_tokens_map.json", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def _sums(rng: random.Random) -> Iterator[dict[str, object]]:
    """Sums of two numbers of three digits, each once."""
    seen: set[tuple[int, int]] = set()
    while True:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if (a, b) not in seen:
            seen.add((a, b))
            yield {"question": f"{a} + {b}", "answer": a + b}


if __name__ == "__main__":
    main()
