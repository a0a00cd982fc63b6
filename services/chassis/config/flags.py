"""The command line of a process: one flag a config field, made from the config class itself."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from services.chassis.config.values import describe
from services.chassis.errors import UsageError
from services.chassis.version import version

__all__ = ["Flags", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """A parsed command line."""

    config: Path | None
    """TOML file."""
    print_config: bool
    """Print the effective configuration and exit."""
    check_config: bool
    """Check the configuration and exit."""
    values: Mapping[str, str]
    """Raw text by field name, in the form `values.from_text` reads."""
    passed_on: Mapping[str, list[str]]
    """Flags meant for another program, by the name of the field that takes them."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def parse(config_class: type[Any], table: str, argv: Sequence[str]) -> Flags:
    """Parse `argv` for `config_class`.

    Raises:
        UsageError: an unknown flag, with its nearest neighbour, or one without its value.
        SystemExit: code 0 after --help or --version.
    """
    parser = _parser(config_class, table)
    options = [option for action in parser._actions for option in action.option_strings]
    own, passed_on = _split(config_class, options, argv)
    known, unknown = parser.parse_known_args(own)
    if unknown:
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "; see --help"
        raise UsageError(f"unknown argument {unknown[0]}{hint}")
    found = vars(known)
    return Flags(
        config=found.pop("config"),
        print_config=found.pop("print_config"),
        check_config=found.pop("check_config"),
        values=found,
        passed_on=passed_on,
    )


def _split(
    config_class: type[Any], options: Sequence[str], argv: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Take out every --PREFIX-FLAG, and what follows up to the next flag, for the fields that have
    `metadata={"flags": PREFIX}`; they get it as --FLAG.
    """
    prefixes = {
        f"--{entry.metadata['flags']}-": entry.name
        for entry in fields(config_class)
        if "flags" in entry.metadata
    }
    own: list[str] = []
    passed_on: dict[str, list[str]] = {}
    taken = own
    for argument in argv:
        prefix = ""
        if argument.startswith("--"):
            foreign = argument.partition("=")[0] not in options
            prefix = next((p for p in prefixes if foreign and argument.startswith(p)), "")
            taken = passed_on.setdefault(prefixes[prefix], []) if prefix else own
        taken.append(f"--{argument.removeprefix(prefix)}" if prefix else argument)
    return own, passed_on


def _parser(config_class: type[Any], table: str) -> argparse.ArgumentParser:
    description = (inspect.getdoc(config_class) or "").partition("\n")[0]
    parser = _Parser(prog=table, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{table} {version()}")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"TOML file, table [{table}]")
    parser.add_argument("--print-config", action="store_true", help="print it, redacted, and exit")
    parser.add_argument("--check-config", action="store_true", help="check it and exit")
    documentation = _documentation(config_class)
    wanted = typing.get_type_hints(config_class)
    for entry in fields(config_class):
        _add(parser, entry, wanted[entry.name], documentation.get(entry.name, ""))
    return parser


def _add(parser: argparse.ArgumentParser, entry: Field[Any], wanted: Any, text: str) -> None:
    option = f"--{entry.name.replace('_', '-')}"
    default = "required"
    if entry.default_factory is not MISSING:
        default = f"default {entry.default_factory()!r}"
    elif entry.default is not MISSING:
        default = f"default {entry.default!r}"
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": entry.name}
    help_text = f"{text} ({default})".replace("%", "%%")
    if wanted is bool:
        parser.add_argument(
            option, nargs="?", const="true", metavar="BOOL", help=help_text, **common
        )
        negation = f"--no-{option[2:]}"
        parser.add_argument(
            negation, action="store_const", const="false", help=argparse.SUPPRESS, **common
        )
        return
    metavar = describe(wanted).split()[-1].upper() if not _choices(wanted) else None
    parser.add_argument(option, metavar=metavar or "CHOICE", help=help_text, **common)
    if entry.metadata.get("secret"):
        common["dest"] = f"{entry.name}_file"
        parser.add_argument(
            f"{option}-file", metavar="FILE", help="file that holds it, unseen by `ps`", **common
        )


def _choices(wanted: Any) -> bool:
    return describe(wanted).startswith("one of ")


def _documentation(config_class: type[Any]) -> dict[str, str]:
    """The docstring under each field, which only the source still knows."""
    documentation: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if is_dataclass(base):
            documentation |= _field_docstrings(base)
    return documentation


def _field_docstrings(config_class: type[Any]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        entry.target.id: " ".join(inspect.cleandoc(text.value.value).split())
        for entry, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }
