"""A negative control: a trajectory manager whose samples do not carry their rollout's trace."""

from __future__ import annotations

from typing import Any

from trajectory_manager import cli
from trajectory_manager.api import conversion


def main() -> None:
    """Serve as `python -m trajectory_manager` does."""
    fill_sample = conversion.fill_sample

    def untraced(message: Any, sample: Any) -> None:
        fill_sample(message, sample)
        message.ClearField("traceparent")

    vars(conversion)["fill_sample"] = untraced
    cli.main()


if __name__ == "__main__":
    main()
