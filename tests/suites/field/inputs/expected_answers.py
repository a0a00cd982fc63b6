"""Expected answers of tasks: a list means any of its items, a number each way to write it."""

from __future__ import annotations

import atexit
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies
from seamflow.client.turn import Task
from seamflow.environment import EnvironmentFailed

from services.tool_loop.config import ToolLoopConfig
from services.tool_loop.tool_loop import Rewards
from tests.suites.field import event_loop
from tests.suites.field.kind import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a payload has, what a policy said, and the reward; None: the task is broken."""

    value: Any
    answer: str
    reward: float | None
    how: str = "exact"


@cache
def _rewards(how: str) -> Rewards:
    rewards = Rewards(ToolLoopConfig(rewards={"reward": how}))
    atexit.register(lambda: event_loop.run(rewards.close()))
    return rewards


async def check(expected: Expected) -> None:
    """The reward is the right one."""
    task = Task(task_id="t", payload=json.loads(json.dumps({"answer": expected.value})))
    said: list[dict[str, Any]] = [{"role": "assistant", "content": expected.answer}]
    try:
        found = (await _rewards(expected.how).of(task, said))["reward"]
    except EnvironmentFailed as error:
        if expected.reward is None and "'answer'" in str(error) and "'t'" in str(error):
            return
        raise
    if found != expected.reward:
        raise AssertionError(f"reward {found}")


TARGET = ["Wilhelm Conrad Röntgen", "Röntgen"]
EXAMPLES = [
    Expected(value=TARGET, answer="Röntgen", reward=1.0),
    Expected(value=TARGET, answer=str(TARGET), reward=0.0),
    Expected(value=TARGET, answer=json.dumps(TARGET), reward=0.0),
    Expected(value=TARGET, answer="Curie", reward=0.0),
    Expected(value=4, answer="4", reward=1.0),
    Expected(value=4, answer="4.0", reward=1.0),
    Expected(value=4.0, answer="4", reward=1.0),
    Expected(value=1234.5, answer="1,234.50", reward=1.0),
    Expected(value=4, answer="four", reward=0.0),
    Expected(value=4, answer="40", reward=0.0),
    Expected(value=1e20, answer="100000000000000000000", reward=1.0),
    Expected(value=1e-7, answer="0.0000001", reward=1.0),
    Expected(value=True, answer="true", reward=1.0),
    Expected(value=True, answer="1", reward=0.0),
    Expected(value="4", answer="4.0", reward=0.0),
    *(
        Expected(value=value, answer=answer, reward=None, how=how)
        for value in (None, [], [None], {"target": ["a"]}, [["a"]])
        for answer in ("None", "null", "")
        for how in ("exact", "math")
    ),
    Expected(value=[1, 2.5], answer=r"\boxed{\frac{5}{2}}", reward=1.0, how="math"),
    Expected(value=1e20, answer=r"\boxed{10^{20}}", reward=1.0, how="math"),
    Expected(value=1e-7, answer=r"\boxed{10^{-7}}", reward=1.0, how="math"),
    Expected(value=1e-7, answer=r"\boxed{2 \cdot 10^{-7}}", reward=0.0, how="math"),
    Expected(value=-3, answer=r"\boxed{-3}", reward=1.0, how="math"),
]

TEXTS = strategies.text(min_size=1, max_size=12).map(str.strip).filter(bool)
NUMBERS = strategies.integers(-(10**9), 10**9) | strategies.decimals(
    -10_000, 10_000, places=3, allow_nan=False
).map(float)
FORMS = ("{}", "{:.4f}", "{:,}", "{:,.5f}", "{:+.4f}")
GENERATED = strategies.one_of(
    strategies.lists(TEXTS, min_size=1, max_size=4).flatmap(
        lambda texts: strategies.sampled_from(texts).map(
            lambda said: Expected(value=texts, answer=f" {said}\n", reward=1.0)
        )
    ),
    strategies.lists(TEXTS, min_size=2, max_size=4).map(
        lambda texts: Expected(value=texts, answer=repr(texts), reward=0.0)
    ),
    strategies.tuples(NUMBERS, strategies.sampled_from(FORMS)).map(
        lambda given: Expected(value=given[0], answer=given[1].format(given[0]), reward=1.0)
    ),
    strategies.tuples(NUMBERS, strategies.sampled_from(FORMS)).map(
        lambda given: Expected(value=given[0], answer=given[1].format(given[0] + 1), reward=0.0)
    ),
)

KINDS = (Kind(name="expected answers", check=check, examples=EXAMPLES, generated=GENERATED),)
