import os
import sys

# A gateway computes no tensors, and asks transformers for tokenizers only. transformers looks once
# whether torch is there, and would import it, for two seconds and 180 MiB. A plug-in still may.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
sys.modules["torch"] = None  # type: ignore[assignment]
import transformers  # noqa: E402, F401

del sys.modules["torch"]

from rollout.gateway.cli import main  # noqa: E402

main()
