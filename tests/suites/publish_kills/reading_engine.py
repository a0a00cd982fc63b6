"""An engine that notes the content of the weights it is given."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from rollout.server.engines.fake import FakeEngine

LOADED = "PUBLISH_KILLS_LOADED"
"""Variable of the environment with the file that it notes into."""


class ReadingEngine(FakeEngine):
    """Appends a line for each version: its number, SHA-256 of each file, monotonic time."""

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        """Take `weight_version`, whatever the folder holds."""
        loaded = time.monotonic()
        await super().update_weights(folder, weight_version)
        digests = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.glob("*.safetensors")
        }
        note = {"version": weight_version, "files": digests, "time": loaded}
        with Path(os.environ[LOADED]).open("a") as log:
            log.write(json.dumps(note) + "\n")
