import os
import sys

# A gateway computes no tensors. transformers imports torch wherever it finds it, for two seconds
# and 180 MiB, and only tokenizers are asked of it here.
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from rollout.gateway.cli import main  # noqa: E402

main()
