"""Make the mount points of volumes, at build time: a new volume inherits their owner.

An image that generates secrets, which needs `cryptography`, has one for each service besides.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

OWNER = 10001
"""User and group of every container."""


def mount_points() -> list[str]:
    """Folders of this image that volumes are mounted to."""
    shared = ["/data", "/weights", "/cache"]
    if find_spec("cryptography") is None:
        return shared
    from deploy.generate_secrets import SERVICES

    return [*shared, "/authority", "/secrets", *(f"/secrets/{name}" for name in SERVICES)]


def main() -> None:
    """Make them, as root."""
    for folder in mount_points():
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.chown(folder, OWNER, OWNER)


if __name__ == "__main__":
    main()
