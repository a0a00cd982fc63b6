"""`python -m services.dataloader.check_tasks`: read the tasks as the dataloader will, submit none.

Takes the dataloader's own settings and flags. Ends with a JSON line {"tasks": 64, "epochs": 0};
"tasks" is null where they are not counted. Exit code 78: a row is no task, with file and line.
"""

from __future__ import annotations

import json
import sys
from itertools import islice

from services.chassis.config.load import load_or_exit
from services.chassis.errors import StartupError
from services.dataloader.config import DataloaderConfig
from services.dataloader.sources import open_source
from services.dataloader.tasks import make_task

__all__ = ["check_tasks", "main"]

_MOST_ROWS = 100_000
_FIRST_ROWS = 8
"""Of a dataset or a function, which may be slow, or without end."""


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
        ConfigError: the source or one of its rows cannot be used; of a file all are read.
    """
    if config.tasks.startswith("environment://"):
        return None  # its server has not started
    source = open_source(config.tasks, shuffle=False, seed=config.seed)
    is_file = config.tasks.endswith((".jsonl", ".parquet"))
    most = _MOST_ROWS if is_file else _FIRST_ROWS
    tasks = (make_task(row, 0, config) for row in islice(source.rows(0, 0), most))
    number = sum(1 for _ in tasks)
    return number if is_file and number < most else None


if __name__ == "__main__":
    main()
