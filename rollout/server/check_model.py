"""`python -m rollout.server.check_model --config FILE`: whether the torch engine computes a model.

No weights are read. `seamflow train --dry-run` runs it.
"""

from __future__ import annotations

import sys

from rollout.server.config import RolloutServerConfig
from services.chassis.config.load import load_or_exit
from services.chassis.errors import ExitCode


def main() -> None:
    """End with exit code 78 and what is wrong; other engines say it themselves."""
    config = load_or_exit(RolloutServerConfig, "rollout_server")
    if config.engine != "torch" or config.model is None:
        return
    from rollout.server.engines.torch.transformers_model import check_rows

    try:
        check_rows(config.model, config.max_context)
    except ValueError as error:
        print(f"rollout_server: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.CONFIG) from error


if __name__ == "__main__":
    main()
