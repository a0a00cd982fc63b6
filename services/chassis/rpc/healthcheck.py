"""Readiness check of a local process, for containers without a shell or curl.

    python -m services.chassis.rpc.healthcheck 127.0.0.1:9100

Exit code 0: /readyz answers 200; 1: anything else. Cheap: it imports the standard library only.
"""

from __future__ import annotations

import http.client
import sys
from collections.abc import Sequence

_SECONDS = 3.0


def ready(address: str) -> bool:
    """Whether /readyz of the admin port at `address` ("host:port") answers 200."""
    connection = http.client.HTTPConnection(address, timeout=_SECONDS)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main(argv: Sequence[str]) -> int:
    """Exit code for the address in `argv`; 64 if there is none."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m services.chassis.rpc.healthcheck HOST:ADMIN_PORT\n")
        return 64
    return 0 if ready(argv[0]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
