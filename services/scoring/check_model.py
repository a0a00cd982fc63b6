"""`python -m services.scoring.check_model --config FILE`: whether a scorer takes its model.

No weights are read. `seamflow train --dry-run` runs it.
"""

from __future__ import annotations

import sys

from services.chassis.config.load import load_or_exit
from services.chassis.errors import ExitCode
from services.scoring.config import ScoringConfig


def main() -> None:
    """End with exit code 78 and what is wrong."""
    config = load_or_exit(ScoringConfig, "scoring")
    if config.scorer != "logprobs":
        return  # a reward model computes one row at a time where rows cannot be packed
    from transformers import AutoConfig

    from services.lib.transformer.can_pack import check_padded

    try:
        check_padded(AutoConfig.from_pretrained(config.model, local_files_only=True))
    except (OSError, ValueError) as error:
        print(f"scoring: model {config.model}: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.CONFIG) from error


if __name__ == "__main__":
    main()
