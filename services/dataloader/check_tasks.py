"""`python -m services.dataloader.check_tasks`: read the tasks as the dataloader will, submit none.

Takes the dataloader's own settings and flags. Ends with a JSON line {"tasks": 64, "epochs": 0,
"broken": 0}, which counts the rows that are skipped too; "tasks" is null where they are not
counted. Exit code 78: rows are no tasks, each with file and line.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import islice

from services.chassis.config.load import exiting, load_or_exit
from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.dataloader.config import DataloaderConfig
from services.dataloader.loader import stored_position
from services.lib.tasks.checked_tasks import CheckedTasks
from services.lib.tasks.sources import Source, is_function, open_source

_MOST_ROWS = 1_000_000
_FIRST_ROWS = 8
"""Of a function, which may be slow, or without end."""


def main() -> None:
    config = load_or_exit(DataloaderConfig, "dataloader")
    number, broken = None, 0
    with exiting("dataloader"):
        if not config.tasks.startswith("environment://"):  # whose server has not started
            source = open_source(config.tasks, shuffle=False, seed=config.seed)
            stored_position(config, source)
            number, found = check_tasks(config, source)
            broken = len(found)
    print(json.dumps({"tasks": number, "epochs": config.num_epochs, "broken": broken}))


def check_tasks(config: DataloaderConfig, source: Source) -> tuple[int | None, Collection[int]]:
    """The number of tasks, None if it is not counted, and the indexes of rows that are none.

    Raises:
        ConfigError: rows cannot be used, and broken_rows does not skip them, or no row is a task;
            all rows are read, up to a million, but of a function.
    """
    most = _FIRST_ROWS if is_function(config.tasks) else _MOST_ROWS
    checked = CheckedTasks(config.row_fields)
    number = sum(1 for _ in checked.tasks(islice(source.rows(0, 0), most)))
    checked.finish()
    if checked.broken:
        if not number:
            raise ConfigError(f"tasks: no row is a task: {checked.summary}")
        get_logger().warning("rows_skipped", rows=len(checked.broken), summary=checked.summary)
    return number if number + len(checked.broken) < most else None, checked.broken


if __name__ == "__main__":
    main()
