"""The parser of the `seamflow` command, which names the nearest word to a wrong one."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from seamflow import __version__
from seamflow.inspect.endpoints import Command, add_flags, resolve

Local = Callable[[argparse.Namespace], int]
"""What runs a verb that calls no service; returns its exit code."""

_USAGE = 64  # sysexits.h


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
    return asyncio.run(_called(run, given))


async def _called(run: Command, given: argparse.Namespace) -> int:
    endpoints = resolve(given)
    try:
        return await run(given, endpoints)
    finally:
        await endpoints.close()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(_USAGE, f"{self.prog}: {message}\n")

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """As its base class, but what is unknown names the nearest that is known."""
        verbs = self._verbs()
        if verbs and args and not args[0].startswith("-") and args[0] not in verbs:
            self.error(f"there is no command {args[0]!r}{_nearest(args[0], verbs)}")
        given, unknown = self.parse_known_args(args)
        if unknown:
            options = self._options(args)
            self.error(f"unknown argument {unknown[0]}{_nearest(unknown[0], options)}")
        return given

    def _verbs(self) -> Mapping[str, argparse.ArgumentParser]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices
        return {}

    def _options(self, args: Sequence[str]) -> Iterable[str]:
        verb = next((each for each in args if each in self._verbs()), None)
        parser = self if verb is None else self._verbs()[verb]
        return [option for action in parser._actions for option in action.option_strings]


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; see --help"


def make_parser(registering: Iterable[Callable[[Verbs], None]]) -> argparse.ArgumentParser:
    """The parser, which puts what runs the given verb into the namespace, as `command`.

    Args:
        registering: adds verbs, in the order of the help.
    """
    parser = _Parser(
        prog="seamflow",
        description="Train agents, look at a run, operate it.",
        epilog="seamflow COMMAND --help lists the arguments of a command.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=20, width=100),
    )
    parser.add_argument("--version", action="version", version=f"seamflow {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=_Parser)
    verbs = Verbs(commands.add_parser)
    for register in registering:
        register(verbs)
    return parser
