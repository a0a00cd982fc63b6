"""Version of the running software."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Version of the installed `seamflow` distribution; "0+source" where it is not installed."""
    try:
        return metadata.version("seamflow")
    except metadata.PackageNotFoundError:
        return "0+source"
