"""A log of the tokens that agents received, for an audit of the store.

One JSON line per received chunk:
    {"rollout_id", "turn_id", "offset", "token_ids", "logprobs", "spans": [[start, num_tokens,
    weight_version, server_id], …]}   spans count from the chunk's first token
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from seamflow.rollout.v1 import rollout_service_pb2 as pb


class TokenLog:
    """A file that any number of processes may append to concurrently. Close it, or use `with`."""

    def __init__(self, path: Path) -> None:
        """Open for appending; raises `OSError` where the file cannot be written."""
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, rollout_id: str, turn_id: str, chunk: pb.TokenChunk) -> None:
        """Append one chunk; an observer for `Client`."""
        line = json.dumps(
            {
                "rollout_id": rollout_id,
                "turn_id": turn_id,
                "offset": chunk.offset,
                "token_ids": list(chunk.tokens.token_ids),
                "logprobs": list(chunk.tokens.logprobs),
                "spans": [
                    [span.start, span.num_tokens, span.weight_version, span.server_id]
                    for span in chunk.tokens.spans
                ],
            }
        ).encode()
        # A single write: lines of several runners never mix.
        if os.write(self._file, line + b"\n") != len(line) + 1:
            raise OSError(f"{self._path}: the disk took only part of a line")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
