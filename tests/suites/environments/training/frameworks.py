"""What is trained on each framework: an environment, and words that a random policy may say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tests.lib.environments.contract.case import Case
from tests.lib.environments.contract.cases import (
    GYMNASIUM,
    MCP_TOOLS,
    NODE,
    OPENENV,
    REASONING_GYM,
    TEXTARENA,
    serving_backend,
)
from tests.lib.environments.self_driving.cases import VERIFIERS

_DIGITS = tuple("123456789")
_SAMPLING = {"temperature": 1.0, "max_tokens": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One training run."""

    case: Case
    """The environment, as the suite knows it."""
    words: Sequence[str]
    """What the model can say; actions and others, so that rewards differ."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Replace or add to those of the case."""
    packages: Sequence[str] = ()
    """Distributions of its venv whose versions matter."""
    has_tasks: bool = False
    """Whether the environment lists tasks of its own."""

    def backend(self) -> AbstractContextManager[Mapping[str, Any]]:
        """What must run beside it; yields further arguments, or the address of the environment."""
        if self.case.command:
            return serving_backend(self.case)
        return self.case.backend()


FRAMEWORKS = {
    framework.case.name: framework
    for framework in (
        Framework(case=GYMNASIUM, words=("0", "1", "hm", "well"), packages=("gymnasium",)),
        Framework(case=TEXTARENA, words=tuple(f"[{i}]" for i in range(9)), packages=("textarena",)),
        Framework(
            case=REASONING_GYM,
            words=tuple(str(i) for i in range(-8, 19)),
            arguments={
                "config": {"min_terms": 2, "max_terms": 2, "max_digits": 1},
                "size": 64,
                "needs_mark": False,
            },
            packages=("reasoning-gym",),
            has_tasks=True,
        ),
        Framework(case=OPENENV, words=_DIGITS, packages=("openenv", "websockets")),
        Framework(case=MCP_TOOLS, words=_DIGITS, packages=("mcp",)),
        Framework(
            case=VERIFIERS,
            words=("up", "down", "left", "right"),
            arguments={"num_tasks": 4, "sampling": _SAMPLING},
            packages=("verifiers",),
            has_tasks=True,
        ),
        Framework(case=NODE, words=_DIGITS),
    )
}
"""By the name of the case."""
