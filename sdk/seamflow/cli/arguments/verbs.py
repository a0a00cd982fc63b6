"""Where the module of a verb registers it: its name, its flags and what runs it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable

from seamflow.cli.endpoints import Command, add_flags, resolve

Local = Callable[[argparse.Namespace], int]
"""What runs a verb that calls no service; returns its exit code."""


class Verbs:
    """The verbs of a command line. Each module of verbs has `register(verbs)`, which adds its own.

    Args:
        add_parser: of argparse's sub-parsers.
    """

    def __init__(self, add_parser: Callable[..., argparse.ArgumentParser]) -> None:
        self._add_parser = add_parser

    def add(self, name: str, about: str, run: Command) -> argparse.ArgumentParser:
        """Add a verb that calls services; returns its parser, which has their flags."""
        added = self.add_local(name, about, lambda given: call_services(run, given))
        add_flags(added)
        return added

    def add_local(self, name: str, about: str, run: Local) -> argparse.ArgumentParser:
        """Add a verb that needs no addresses; returns its parser."""
        added = self._add_parser(name, help=about, description=about, allow_abbrev=False)
        added.set_defaults(command=run)
        return added

    def add_module(self, name: str, about: str) -> None:
        """Add a verb to the help whose arguments a module of the services reads."""
        self._add_parser(name, help=about, add_help=False)


def call_services(run: Command, given: argparse.Namespace) -> int:
    """Run a verb with the addresses that its arguments and the environment name."""
    return asyncio.run(_awaited(run(given, resolve(given))))


async def _awaited(code: Awaitable[int]) -> int:
    return await code
