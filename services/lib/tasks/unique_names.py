"""Task ids that two rows have."""

from __future__ import annotations

from services.chassis.errors import ConfigError

__all__ = ["UniqueNames"]


class UniqueNames:
    """The names of tasks so far, each with its row."""

    def __init__(self) -> None:
        self._rows: dict[str, str] = {}

    def add(self, name: str, where: str) -> None:
        """Note a name; `where` names its row. Raises `ConfigError` if another row has it."""
        other = self._rows.setdefault(name, where)
        if other != where:
            raise ConfigError(
                f"{where} has the task id {name!r}, and so has {other}: give each task an id of "
                'its own (7 and "7" are one), or set task_id_field to "" to name them by position'
            )
