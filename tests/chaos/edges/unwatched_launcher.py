"""A launcher without the rules about processes that stand still: the control of `frozen.py`."""

from __future__ import annotations

from seamflow.inspect import why_stuck

from services.launcher import cli

if __name__ == "__main__":
    why_stuck._PROCESSES = ()
    cli.main()
