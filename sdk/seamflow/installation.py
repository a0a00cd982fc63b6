"""What is installed: the code of the services, and which packages of an extra are missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import seamflow

_OURS = "seamflow"
_REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+)\s*(\[(?P<extras>[^\]]*)\])?.*\bextra\s*==\s*["'](?P<extra>[^"']+)["']"""
)

_PACKAGE = Path(seamflow.__file__).parent


def missing_packages(extra: str) -> list[str]:
    """Names of its packages that are not installed, with those of the extras that it names.

    Versions are pip's affair. Empty where seamflow runs without being installed: nothing is known.
    """
    return sorted({name for name in _packages(extra) if not _is_installed(name)})


def how_to_install(what: str, missing: list[str], extra: str) -> str:
    """One line for people: what needs the packages, and the command that installs them."""
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return (
        f"{what} needs packages that are not installed ({shown}): pip install 'seamflow[{extra}]'"
    )


def _packages(extra: str) -> Iterator[str]:
    for requirement in _requirements():
        match = _REQUIREMENT.match(requirement)
        if match is None or match["extra"] != extra:
            continue
        if match["name"] != _OURS:
            yield match["name"]
        for other in (match["extras"] or "").split(",") if match["name"] == _OURS else ():
            yield from _packages(other.strip())


def _requirements() -> list[str]:
    try:
        return requires(_OURS) or []
    except PackageNotFoundError:
        return []


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def find_services(package: Path = _PACKAGE, here: Path | None = None) -> Path | None:
    """The folder that `services`, `trainer` and the others are imported from; None: there is none.

    That of the wheel, or the checkout that this very package lies in, so that SDK and services are
    of one release; only a package without services, as in the images, takes the checkout around
    the folder `here` (None: the current one).
    """
    here = Path.cwd() if here is None else here
    places = (package / "_services", package.parents[1], here, *here.parents)
    return next((place for place in places if (place / "services" / "launcher").is_dir()), None)
