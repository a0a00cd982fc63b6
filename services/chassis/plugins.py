"""Load a plug-in by its "package.module:Name": the only extension mechanism there is."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

__all__ = ["load"]


def load(path: str) -> Any:
    """Import and return the object that `path` ("package.module:Name") names.

    Paths come from configuration only, never from the wire.

    Raises:
        ValueError: the path has another form, or the module holds no such name.
        ImportError: the module does not exist, or one of its own imports fails.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f'plug-in {path!r} must have the form "package.module:Name"')
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"plug-in {path!r}: module {module_name!r} has no {name!r}{hint}")
    return getattr(module, name)
