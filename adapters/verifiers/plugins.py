"""Ids of tasksets and harnesses that are modules within packages."""

from __future__ import annotations

import importlib
import sys


def plugin_id(name: str) -> str:
    """An id that verifiers finds: it knows top-level modules only.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    if "." not in name:
        return name
    flat = name.replace(".", "_").lower()
    sys.modules.setdefault(flat, importlib.import_module(name))
    return flat
