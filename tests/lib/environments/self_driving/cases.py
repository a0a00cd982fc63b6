"""The self-driving environments that are tested."""

from __future__ import annotations

from tests.lib.environments.contract.case import Case

__all__ = ["VERIFIERS", "VERIFIERS_CLASSIC"]

_HERE = "tests.lib.environments.self_driving"

VERIFIERS = Case(
    name="verifiers",
    environment="adapters.verifiers.environment:VerifiersEnvironment",
    arguments={"taskset": f"{_HERE}.word_taskset"},
    venv="verifiers",
)
VERIFIERS_CLASSIC = Case(
    name="verifiers_classic",
    environment="adapters.verifiers_classic.environment:VerifiersClassicEnvironment",
    arguments={"env_id": f"{_HERE}.word_environment", "max_retries": 0},
    venv="verifiers_classic",
)
