"""`python -m services.evaluator.check_heldout`: read the held-out tasks, evaluate nothing.

Takes the evaluator's own settings and flags. Exit code 78: a row is no task, with file and line.
"""

from __future__ import annotations

import sys

from services.chassis.config.load import load_or_exit
from services.chassis.errors import StartupError
from services.evaluator.config import EvaluatorConfig
from services.evaluator.heldout_tasks import read_tasks


def main() -> None:
    """Check all rows; those of an environment are known once its server has started."""
    config = load_or_exit(EvaluatorConfig, "evaluator")
    if config.num_heldout:
        return
    try:
        read_tasks(config.tasks, config.row_fields, config.seed)
    except StartupError as error:
        sys.stderr.write(f"evaluator: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
