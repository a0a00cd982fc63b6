"""The self-driving environments that are tested."""

from __future__ import annotations

from tests.lib.environments.contract.case import Case

_HERE = "tests.lib.environments.self_driving"

VERIFIERS = Case(
    name="verifiers",
    environment="adapters.verifiers.environment:VerifiersEnvironment",
    arguments={"taskset": f"{_HERE}.word_taskset"},
    venv="verifiers",
)
