"""`python -m services.dataloader.check_tasks`: read the tasks as the dataloader will, submit none.

Takes the dataloader's own settings and flags. Ends with a JSON line {"tasks": 64, "epochs": 0};
"tasks" is null where they are not counted. Exit code 78: a row is no task, with file and line.
"""

from __future__ import annotations

import json
import sys

from services.chassis.config.load import load_or_exit
from services.chassis.errors import StartupError
from services.dataloader.config import DataloaderConfig
from services.lib.tasks.checked_tasks import checked_tasks
from services.lib.tasks.sources import is_function, open_source

__all__ = ["check_tasks", "main"]

_MOST_ROWS = 1_000_000
_FIRST_ROWS = 8
"""Of a function, which may be slow, or without end."""


def main() -> None:
    """Check and count."""
    config = load_or_exit(DataloaderConfig, "dataloader")
    try:
        number = check_tasks(config)
    except StartupError as error:
        sys.stderr.write(f"dataloader: {error}\n")
        sys.exit(error.exit_code)
    print(json.dumps({"tasks": number, "epochs": config.num_epochs}))


def check_tasks(config: DataloaderConfig) -> int | None:
    """The number of tasks; None: it is not counted.

    Raises:
        ConfigError: the source or one of its rows cannot be used, or two rows have one name; all
            rows are read, up to a million, but of a function.
    """
    if config.tasks.startswith("environment://"):
        return None  # its server has not started
    source = open_source(config.tasks, shuffle=False, seed=config.seed)
    most = _FIRST_ROWS if is_function(config.tasks) else _MOST_ROWS
    number = sum(1 for _ in checked_tasks(source, config.row_fields, most))
    return number if number < most else None


if __name__ == "__main__":
    main()
