"""A scheduler that gives a node five seconds to leave its old work, instead of two minutes."""

from __future__ import annotations

from scheduler import limits
from scheduler.cli import main

if __name__ == "__main__":
    vars(limits)["LEAVE_SECONDS"] = 5.0
    main()
