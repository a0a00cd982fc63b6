"""The environments that the suite is run against."""

from __future__ import annotations

from tests.environments.contract.case import Case

__all__ = ["CASES"]

PLAIN = Case(name="plain", environment="tests.environments.contract.plain:Plain")
GYMNASIUM = Case(
    name="gymnasium",
    environment="adapters.gymnasium.environment:GymnasiumEnvironment",
    arguments={"env_id": "CartPole-v1"},
    venv="gymnasium",
    answers=("I push 1", "0"),
)

CASES = (PLAIN, GYMNASIUM)
