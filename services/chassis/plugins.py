"""Loads plug-ins by "package.module:Name", the only extension mechanism."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from seamflow.user_code.user_modules import import_user_module

from services.chassis.errors import ConfigError


def make(field: str, name: str, built_in: Mapping[str, str], /, *args: Any, **kwargs: Any) -> Any:
    """Call the object that setting `field` names by its value `name`, with `args` and `kwargs`.

    `built_in` holds paths, not objects: only the chosen one imports its libraries.

    Raises:
        ConfigError: `name` is neither built in nor a path that loads, or the object rejects its
            arguments with a ValueError or an ImportError.
    """
    path = built_in.get(name, name)
    if ":" not in path:
        near = difflib.get_close_matches(name, built_in, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(sorted(built_in))
        raise ConfigError(
            f'{field} is {name!r}: give one of {known}, or a plug-in "package.module:Name"{hint}'
        )
    # A built-in is ours, whatever the user's folder has of its name, such as a checkout.
    find = import_module if name in built_in else import_user_module
    try:
        return load(path, find)(*args, **kwargs)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{field} {name}: {error}") from error


def load(path: str, find: Callable[[str], ModuleType] = import_user_module) -> Any:
    """Import and return the object that `path` ("package.module:Name") names.

    Paths come from configuration only, never from the wire; `find` imports a module.

    Raises:
        ValueError: the path has another form, or the module holds no such name.
        ImportError: the module does not exist, or one of its own imports fails.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f'plug-in {path!r} must have the form "package.module:Name"')
    module = find(module_name)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"plug-in {path!r}: module {module_name!r} has no {name!r}{hint}")
    return getattr(module, name)
