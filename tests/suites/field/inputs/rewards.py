"""Rewards and info as numpy, torch and others have them; what is no finite number is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies
from seamflow.client.plain_values import named_rewards
from seamflow.environment import Step
from seamflow.errors import PreconditionError

from tests.suites.field.kind import Kind
from tests.suites.field.servers.environment_server import episode_of


@dataclass(frozen=True, slots=True)
class Returned:
    """A reward and its right value; None: it is refused, by name."""

    value: Any
    right: float | None


async def check_reward(returned: Returned) -> None:
    """As the environment's reward, alone and named, and as an agent's."""
    try:
        found = [
            (await episode_of(lambda: Step(rewards=returned.value, done=True))).rewards,
            (await episode_of(lambda: Step(rewards={"reward": returned.value}, done=True))).rewards,
            named_rewards("Agent.run", returned.value),
        ]
    except (PreconditionError, ValueError) as error:
        if returned.right is None and "reward 'reward': return a finite float" in str(error):
            return
        raise
    if found != [{"reward": returned.right}] * 3:
        raise AssertionError(f"found {found}")


async def check_info(given: tuple[Any, Any]) -> None:
    """An info with the value arrives as its plain form."""
    value, right = given
    found = (await episode_of(lambda: Step(done=True, info={"x": value}))).info
    if found != {"x": right}:
        raise AssertionError(f"found {found}")


async def check_step(given: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Other fields of a step, in forms that libraries give."""
    fields, right = given
    step = await episode_of(lambda: Step(**fields))
    for name, value in right.items():
        if getattr(step, name) != value:
            raise AssertionError(f"{name} is {getattr(step, name)!r}")


FORMS = (
    float,
    Fraction,
    Decimal,
    np.float64,
    np.float32,
    np.float16,
    np.array,
    lambda x: np.array([x], dtype=np.float32),
    lambda x: torch.tensor(x, dtype=torch.float64),
    lambda x: torch.tensor([x], requires_grad=True),
    lambda x: torch.tensor(x, dtype=torch.bfloat16),
    np.longdouble,
)
INTEGERS = (int, np.int64, np.int8, np.uint32, torch.tensor, np.array)
EXACT = strategies.integers(-128, 127).map(lambda n: n / 64)
"""Numbers that are the same in each of these forms."""
NUMBERS = strategies.one_of(
    strategies.tuples(strategies.sampled_from(FORMS), EXACT).map(
        lambda given: Returned(given[0](given[1]), given[1])
    ),
    strategies.tuples(strategies.sampled_from(INTEGERS), strategies.integers(0, 127)).map(
        lambda given: Returned(given[0](given[1]), float(given[1]))
    ),
    strategies.sampled_from((np.bool_, bool, torch.tensor)).flatmap(
        lambda form: strategies.booleans().map(lambda is_so: Returned(form(is_so), float(is_so)))
    ),
)
WRONG = [
    math.nan,
    math.inf,
    -np.inf,
    np.float32("nan"),
    np.array(np.nan),
    torch.tensor(float("inf")),
    Decimal("NaN"),
    Decimal("-Infinity"),
    10**400,
    "1",
    np.str_("1"),
    b"1",
    None,
    1j,
    np.complex64(1),
    [1.0],
    np.array([1.0, 2.0]),
    np.array([]),
    torch.tensor([1.0, 2.0]),
    np.datetime64("2020-01-01"),
    object(),
]
REWARDS = [
    Returned(np.float32(1), 1.0),
    Returned(np.int64(2), 2.0),
    Returned(np.bool_(True), 1.0),
    Returned(np.array(0.5), 0.5),
    Returned(torch.tensor(0.5), 0.5),
    Returned(Fraction(1, 4), 0.25),
    Returned(Decimal("0.25"), 0.25),
    *(Returned(value, None) for value in WRONG),
]
INFOS = [
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(False), False),
    (np.arange(3), [0, 1, 2]),
    (np.zeros((1, 2)), [[0.0, 0.0]]),
    (torch.ones(2), [1.0, 1.0]),
    ({"deep": [np.int8(1), (np.float64(2.0),)]}, {"deep": [1, [2.0]]}),
    ({np.int64(1): "one"}, {"1": "one"}),
    (Fraction(1, 2), 0.5),
    (np.str_("text"), "text"),
    (math.nan, "NaN"),
    (np.array([np.inf, -np.inf]), ["Infinity", "-Infinity"]),
]
STEPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"done": True, "policy_failure": None}, {"policy_failure": "", "done": True}),
    ({"done": np.bool_(True)}, {"done": True, "truncated": False}),
    ({"truncated": np.array(True)}, {"done": False, "truncated": True}),
    ({"done": torch.tensor(True), "info": None}, {"done": True, "info": {}}),
    ({"done": 1, "truncated": None}, {"done": True, "truncated": False}),
]

KINDS = (
    Kind(name="rewards", check=check_reward, examples=REWARDS, generated=NUMBERS, short=30),
    Kind(name="info", check=check_info, examples=INFOS),
    Kind(name="steps", check=check_step, examples=STEPS),
)
