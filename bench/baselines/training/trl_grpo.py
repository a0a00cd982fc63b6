"""TRL's `GRPOTrainer` on the tasks of `bench.train`, in an environment of its own.

Set up for a CPU: float32, the whole batch in one pass, no recomputed activations, no checkpoints,
no trackers. It writes a JSON line for each optimizer step, as our trainer does, and step 0 before
the first one.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.train import task as sums
from bench.train.conversation import Message, play
from examples.quickstart import task as lift

ON_CPU: Mapping[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Settings of `GRPOConfig` for float32 on a CPU, without checkpoints and trackers."""


class Steps(TrainerCallback):
    """Writes the line of each step: when it ended, and what its rollouts were."""

    def __init__(self, file: Path) -> None:
        """Lines are appended to `file`."""
        self._file = file
        self._num_tokens = 0
        self._results: Sequence[tuple[float, bool]] = ()

    def saw(self, num_tokens: int, results: Sequence[tuple[float, bool]]) -> list[float]:
        """The step's rollouts: tokens sampled in all, (reward, success) of each; the rewards."""
        self._num_tokens, self._results = num_tokens, results
        return [reward for reward, _ in results]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The clock starts."""
        self._write(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the optimizer step."""
        self._write(state.global_step)

    def _write(self, step: int) -> None:
        num_samples = len(self._results)
        line = {
            "step": step,
            "num_tokens": self._num_tokens,
            "num_samples": num_samples,
            "reward_mean": sum(reward for reward, _ in self._results) / max(num_samples, 1),
            "success": sum(success for _, success in self._results) / max(num_samples, 1),
            "torch_threads": torch.get_num_threads(),
            "time": time.time(),
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def sums_task(steps: Steps) -> dict[str, Any]:
    """What `GRPOTrainer` is given to train on `bench.train.task`."""

    def reward(
        completions: Sequence[Sequence[Message]],
        completion_ids: Sequence[Sequence[int]],
        payload: Sequence[str],
        **_: Any,
    ) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        pairs = zip(payload, texts, strict=True)
        results = [sums.score(json.loads(each), text) for each, text in pairs]
        return steps.saw(sum(map(len, completion_ids)), results)

    return {"reward_funcs": reward}


def lift_task(steps: Steps) -> dict[str, Any]:
    """What `GRPOTrainer` is given to train on the quickstart's task."""

    def reward(
        answers: Sequence[Sequence[str]],
        num_sampled: Sequence[int],
        payload: Sequence[str],
        **_: Any,
    ) -> list[float]:
        pairs = zip(payload, answers, strict=True)
        results = [lift.score(json.loads(each), given) for each, given in pairs]
        return steps.saw(sum(num_sampled), results)

    return {"reward_funcs": reward, "rollout_func": play}


def answers_task(steps: Steps) -> dict[str, Any]:
    """What `GRPOTrainer` is given to train on questions with a number as the answer.

    The last number of an answer counts, as in the project of `seamflow init --model`.
    """

    def reward(
        completions: Sequence[Sequence[Message]],
        completion_ids: Sequence[Sequence[int]],
        payload: Sequence[str],
        **_: Any,
    ) -> list[float]:
        last = [re.findall(r"\d+", each[0]["content"])[-1:] for each in completions]
        right = [[str(json.loads(each)["answer"])] for each in payload]
        results = [(float(a == b), a == b) for a, b in zip(last, right, strict=True)]
        return steps.saw(sum(map(len, completion_ids)), results)

    return {"reward_funcs": reward}


TASKS: dict[str, Callable[[Steps], dict[str, Any]]] = {
    "sums": sums_task,
    "lift": lift_task,
    "answers": answers_task,
}


def main() -> None:
    """Train."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(arguments.metrics)
        trainer: Any = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            args=_config(arguments, folder),
            train_dataset=Dataset.from_list(_rows(arguments)),
            callbacks=[steps],
            **TASKS[arguments.task](steps),
        )
        trainer.train()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "tasks", "metrics"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, required=True)
    for name in ("max-new-tokens", "steps", "threads", "group-size", "groups-per-step", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--schedule", choices=("constant", "linear"), required=True)
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--prompt", default="", help="of the task answers, with fields in braces")
    return parser.parse_args()


def _config(arguments: argparse.Namespace, folder: str) -> Any:
    return GRPOConfig(
        output_dir=folder,
        max_steps=arguments.steps,
        seed=arguments.seed,
        num_generations=arguments.group_size,
        per_device_train_batch_size=arguments.group_size * arguments.groups_per_step,
        gradient_accumulation_steps=1,
        max_completion_length=arguments.max_new_tokens,
        temperature=1.0,
        # As our trainer's default, DAPO: no reference, clip-higher, every token of the step alike.
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type=arguments.schedule,
        warmup_steps=arguments.warmup_steps,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        **ON_CPU,
    )


def _rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The data set: what the user says in each turn, and the payload that answers are scored by."""
    if arguments.task == "answers":
        payloads = list(map(json.loads, arguments.tasks.read_text(encoding="utf-8").splitlines()))
    else:
        payloads = list(sums.payloads(arguments.tasks))
    return [
        {
            "prompt": [{"role": "user", "content": text} for text in _said(arguments, payload)],
            "payload": json.dumps(payload),
        }
        for payload in payloads
    ]


def _said(arguments: argparse.Namespace, payload: Mapping[str, Any]) -> list[str]:
    if arguments.task == "answers":
        return [arguments.prompt.format(**payload)]
    if arguments.task == "sums":
        return [sums.user_message(payload)]
    return [lift.user_message(payload, turn) for turn in range(len(payload["calls"]))]


if __name__ == "__main__":
    main()
