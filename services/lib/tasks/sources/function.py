"""Tasks from a user's generator function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from services.chassis import plugins
from services.chassis.errors import ConfigError
from services.lib.tasks.sources.base import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """Calls `function(seed, epoch)` once an epoch; the same arguments must give the same tasks.

    Example:
        >>> def sums(seed: int, epoch: int):
        ...     random = Random(f"{seed}:{epoch}")
        ...     for number in range(1000):
        ...         yield {"task_id": f"sum-{number}", "payload": {"a": random.randrange(100)}}
    """

    name: str
    """The configured "package.module:function"."""
    function: Callable[[int, int], Iterable[Mapping[str, Any]]]
    """The imported function."""
    seed: int
    """First argument of every call."""

    @classmethod
    def load(cls, name: str, *, seed: int) -> FunctionSource:
        """Import the function.

        Raises:
            ConfigError: there is none of that name.
        """
        try:
            function = plugins.load(name)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"tasks: {error}") from error
        if not callable(function):
            raise ConfigError(f"tasks: {name} is not a function")
        return cls(name=name, function=function, seed=seed)

    @property
    def fingerprint(self) -> str:
        """The name; the function must not change between restarts."""
        return f"function:{self.name}"

    @property
    def content(self) -> str:
        """Unknown: its tasks may have no end."""
        return ""

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """The rows of an epoch; those before `start` are generated and skipped."""
        for index, values in islice(enumerate(self._yielded(epoch)), start, None):
            where = f"task {index + 1} of {self.name}"
            if isinstance(values, Mapping):
                yield Row(index=index, values=values, where=where)
            else:
                problem = f"{where} is a {type(values).__name__}: yield dicts"
                yield Row(index=index, values={}, where=where, problem=problem)

    def _yielded(self, epoch: int) -> Iterator[Mapping[str, Any]]:
        try:
            yield from self.function(self.seed, epoch)
        except Exception as error:
            raise ConfigError(f"tasks: {self.name} raised {error!r} in epoch {epoch}") from error
