"""A rollout server that links files of a shared folder unread: the negative control."""

from __future__ import annotations

from rollout.server.cli import main
from rollout.server.weights.transports.shared_folder import SharedFolder

if __name__ == "__main__":
    SharedFolder._check = lambda *_: None  # type: ignore[method-assign]
    main()
