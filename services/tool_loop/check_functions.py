"""`python -m services.tool_loop.check_functions`: load the user's tools and rewards, and end.

Takes the tool loop's own settings and flags; connects to nothing. Exit code 78: one cannot be used.
"""

from __future__ import annotations

import sys

from services.chassis.config.load import load_or_exit
from services.chassis.errors import ExitCode
from services.tool_loop.config import ToolLoopConfig
from services.tool_loop.tool_loop import ToolLoop


def main() -> None:
    """Load them; what is wrong is a message on stderr."""
    config = load_or_exit(ToolLoopConfig, "tool_loop")
    try:
        ToolLoop(config)
    except ValueError as error:
        sys.stderr.write(f"tool_loop: {error}\n")
        sys.exit(ExitCode.CONFIG)


if __name__ == "__main__":
    main()
