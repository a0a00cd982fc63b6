"""A kind of input that people send: examples with their right values, and a strategy for more.

Each module of `inputs` has a tuple `KINDS` for an area. `make test` tries every example
and a few generated inputs of each kind (test_field.py), `make test-field` many more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.suites.field.event_loop import run

Check = Callable[[Any], Coroutine[Any, Any, None] | None]


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of the inputs of a kind."""

    inputs: int
    """How many were tried."""
    failures: Sequence[str]
    """The failed ones, each with its error; a generated one is reduced to a small input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Inputs of one kind.

    Example: Kind(name="math answers", check=check, examples=[("\\\\sqrt{2}", "\\\\sqrt{2}", 1.0)])
    """

    name: str
    """Its name in figures."""
    check: Check
    """Raises for an input that is not answered right; may be a coroutine function."""
    examples: Sequence[Any]
    """Inputs that are always tried, with their right values."""
    generated: SearchStrategy[Any] | None = None
    """Further inputs, with their right values."""
    short: int = 10
    """Generated inputs in `make test`."""
    long: int = 1000
    """Generated inputs in `make test-field`."""

    def try_inputs(self, num_generated: int, with_seed: int = 0) -> Tried:
        """Try every example and `num_generated` more.

        Args:
            num_generated: fewer are tried if a strategy has fewer.
            with_seed: of the generated inputs.
        """
        failures = [text for example in self.examples if (text := self._failure(example))]
        inputs = len(self.examples)
        if self.generated is not None and num_generated > 0:
            counted, failure = self._try_generated(self.generated, num_generated, with_seed)
            inputs += counted
            failures += [failure] if failure else []
        return Tried(inputs, failures)

    def _try_generated(
        self, strategy: SearchStrategy[Any], limit: int, with_seed: int
    ) -> tuple[int, str]:
        inputs = 0

        @seed(with_seed)
        @settings(
            max_examples=limit,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
        )
        @given(strategy)
        def tried(value: Any) -> None:
            nonlocal inputs
            inputs += 1
            if failure := self._failure(value):
                raise AssertionError(failure)

        try:
            tried()
        except AssertionError as error:
            return inputs, str(error)
        return inputs, ""

    def _failure(self, value: Any) -> str:
        try:
            result = self.check(value)
            if inspect.iscoroutine(result):
                run(result)
        except Exception as error:
            return f"{value!r}: {type(error).__name__}: {error}"
        return ""
