"""`python -m tools.release prepare 0.3.0`, then commit, tag v0.3.0, and `check --tag v0.3.0`.

`prepare` writes the version and the changelog's heading and renews protos/released.binpb, against
which the next changes of the contract are compared. `check` exits with 1 where something disagrees.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from services.chassis.errors import StartupError
from tools.release.versions import check, write

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Returns the exit code."""
    given = _arguments()
    try:
        return _prepare(given.version) if given.what == "prepare" else _check(given.tag)
    except StartupError as error:
        print(f"release: {error}", file=sys.stderr)
        return error.exit_code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    prepare = commands.add_parser("prepare", help="make this tree the release")
    prepare.add_argument("version", help="such as 0.3.0, or 0.4.0.dev0 after it")
    comparing = commands.add_parser("check", help="compare the tree with a tag")
    comparing.add_argument("--tag", required=True, help="such as v0.3.0")
    return parser.parse_args()


def _prepare(version: str) -> int:
    write(ROOT, version, datetime.now(UTC).date())
    if ".dev" not in version:
        subprocess.run(["/usr/bin/env", "make", "descriptors"], cwd=ROOT, check=True)
    print(f"now: make check test, git commit -am 'Release {version}', git tag v{version}")
    return 0


def _check(tag: str) -> int:
    wrong = check(ROOT, tag.removeprefix("v"))
    print("\n".join(wrong) or f"{tag}: every place agrees")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
