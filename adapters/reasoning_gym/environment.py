"""Tasks of reasoning-gym: one question, one answer, scored by the dataset."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.utils import extract_answer
from seamflow.environment import Step, Task

_PROMPT = "{question}\n\nWrite your final answer as <answer>your answer</answer>."
# Some generators seed the global random state of numpy.
_generating = threading.Lock()


class ReasoningGymEnvironment:
    """A dataset by name; its tasks are the indices of its entries.

    The payload of a task has "index", and may have "seed" for entries of another dataset seed, such
    as held-out ones. Rewards: "reward" is the dataset's score, 0 to 1; "has_answer" is 1 where the
    answer is marked.
    """

    max_episodes = 64
    is_seeded = True

    def __init__(
        self,
        dataset: str,
        *,
        size: int = 500,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        prompt: str = _PROMPT,
        system_prompt: str = "",
        needs_mark: bool = True,
    ) -> None:
        """Make the dataset.

        Args:
            dataset: Name, such as "chain_sum"; "composite" with config {"datasets": [{"name",
                "weight", "config"}]}.
            size: Number of tasks.
            seed: Of the entries of tasks that name none.
            config: Settings of the dataset.
            prompt: Template with "{question}".
            system_prompt: System message; empty if there is none.
            needs_mark: Score what stands in <answer>…</answer>, and nothing without it; else an
                answer without the mark is scored as a whole.

        Raises:
            ValueError: there is no such dataset, or its settings or the prompt are wrong.
        """
        if "{question}" not in prompt:
            raise ValueError(f"prompt is {prompt!r}: it must contain {{question}}")
        self.name = f"reasoning-gym {dataset}"
        self.tasks = [{"index": index} for index in range(size)]
        self._dataset = dataset
        self._size = size
        self._seed = seed
        self._config = dict(config or {})
        self._prompt = prompt
        self._system_prompt = system_prompt
        self._needs_mark = needs_mark
        self._entries = self._made(seed)

    def reset(self, task: Task, seed: int) -> Sequence[Mapping[str, str]]:
        """The question. The seed of the episode plays no part."""
        index = task.payload.get("index")
        if not isinstance(index, int) or not 0 <= index < self._size:
            raise ValueError(f"index of the task is {index!r}: must be 0 to {self._size - 1}")
        of_task = task.payload.get("seed", self._seed)
        with _generating:
            if of_task != self._seed:
                self._entries = self._made(of_task)
            self._entry = self._entries[index]
        question = self._prompt.replace("{question}", self._entry["question"])
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return [*system, {"role": "user", "content": question}]

    def step(self, message: Mapping[str, Any]) -> Step:
        text = message["content"]
        marked = extract_answer(text)
        answer = marked if marked is not None or self._needs_mark else text.strip()
        score = 0.0 if answer is None else self._score(answer)
        rewards = {"reward": score, "has_answer": float(marked is not None)}
        info = {"expected": str(self._entry["answer"]), "answer": answer}
        return Step(rewards=rewards, done=True, info=info)

    def _score(self, answer: str) -> float:
        """What the data set gives; 0 for an answer that it cannot read, as it can its own one."""
        try:
            return float(self._entries.score_answer(answer, self._entry))
        except Exception:
            self._entries.score_answer(str(self._entry["answer"]), self._entry)
            return 0.0

    def _made(self, seed: int) -> Any:
        config = dict(self._config)
        try:
            if self._dataset == "composite":
                config["datasets"] = [DatasetSpec(**each) for each in config.get("datasets", ())]
            return create_dataset(self._dataset, size=self._size, seed=seed, **config)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(
                f"dataset is {self._dataset!r} with config {self._config}: {error}"
            ) from error
