"""`python -m tools.release prepare 0.3.0`, then commit, tag v0.3.0, and `check --tag v0.3.0`.

`prepare` writes the version and the changelog's heading and renews protos/released.binpb, against
which the next changes of the contract are compared. `check` exits with 1 where something disagrees.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path

from services.chassis.errors import ConfigError, StartupError

_VERSION = r"\d+\.\d+\.\d+(?:\.dev\d+)?"
_PLACES = {
    "pyproject.toml": rf'^version = "({_VERSION})"',
    "sdk/seamflow/release.py": rf'^__version__ = "({_VERSION})"',
    "deploy/helm/seamflow/Chart.yaml": rf"^appVersion: ({_VERSION})",
    "docker-compose.yml": rf"image: seamflow/[\w-]+:({_VERSION})",
    "deploy/compose.images.yml": rf"image: seamflow/[\w-]+:({_VERSION})",
    "deploy/compose.gpu.yml": rf"seamflow/[\w-]+:({_VERSION})",
    "deploy/docker/smoke.py": rf"seamflow/[\w-]+:({_VERSION})",
}
_UNRELEASED = "## Unreleased\n"
_HEADING = re.compile(rf"^## ({_VERSION}) \(\d{{4}}-\d\d-\d\d\)$", re.MULTILINE)

ROOT = Path(__file__).parents[1]


def check(root: Path, version: str) -> list[str]:
    """What does not say `version`, by place; empty if a release may be made of this tree."""
    wrong = [
        f"{place} says {', '.join(sorted(found))}, the tag {version}"
        for place, found in _found(root).items()
        if found != {version}
    ]
    newest = released(root)
    if newest != version:
        wrong.append(f"the newest release of CHANGELOG.md is {newest}, the tag says {version}")
    return wrong


def write(root: Path, version: str, day: date) -> None:
    """Make `version` the one of this tree; the unreleased lines of the changelog become its own.

    Raises:
        ConfigError: `version` has another form, or the changelog has nothing unreleased.
    """
    if not re.fullmatch(_VERSION, version):
        raise ConfigError(f"version is {version!r}: give one like 0.3.0 or 0.4.0.dev0")
    if ".dev" not in version:
        _release_changes(root / "CHANGELOG.md", version, day)
    for place, pattern in _PLACES.items():
        file = root / place
        text = re.sub(pattern, _with(version), file.read_text(), flags=re.MULTILINE)
        file.write_text(text)


def released(root: Path) -> str:
    """The newest release of the changelog.

    Raises:
        ConfigError: it names none.
    """
    heading = _HEADING.search((root / "CHANGELOG.md").read_text())
    if heading is None:
        raise ConfigError('CHANGELOG.md has no heading such as "## 0.2.0 (2026-11-23)"')
    return heading[1]


def _found(root: Path) -> Mapping[str, set[str]]:
    return {
        place: set(re.findall(pattern, (root / place).read_text(), re.MULTILINE))
        for place, pattern in _PLACES.items()
    }


def _with(version: str) -> Callable[[re.Match[str]], str]:
    return lambda match: match[0].replace(match[1], version)


def _release_changes(changelog: Path, version: str, day: date) -> None:
    text = changelog.read_text()
    before, mark, after = text.partition(_UNRELEASED)
    if not mark or not after.partition("\n## ")[0].strip():
        raise ConfigError(
            f'CHANGELOG.md has nothing under "{_UNRELEASED.strip()}": say what is new'
        )
    changelog.write_text(f"{before}{mark}\n## {version} ({day})\n{after}")


def main() -> int:
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
