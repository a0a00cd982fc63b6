"""The command line of `seamflow train`: `--set TABLE.SETTING=VALUE`, and the file that is read."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from services.chassis.config.load import TABLES
from services.chassis.config.sources import nearest

DEFAULT_FILE = "train.toml"
"""Read from the current folder where no configuration file is named."""
_PACKED, _SPECIAL = "packed:", ',"\\'


def flags_by_table(given: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Command-line flags of each table: "trainer.optimizer.learning_rate=1e-5" becomes
    {"trainer": ("--optimizer.learning-rate=1e-5",)}.

    Raises:
        ValueError: it names no setting of a process; the message names the cure.
    """
    flags = defaultdict[str, tuple[str, ...]](tuple)
    for text in given:
        path, equals, value = text.partition("=")
        table, _, name = path.strip().partition(".")
        if not equals or not name:
            raise ValueError(f"set is {text!r}: write it as TABLE.SETTING=VALUE")
        flag = "--" + name.replace("_", "-")
        if table not in TABLES:
            raise ValueError(
                f"set is {text!r}: there is no table {table!r}{nearest(table, TABLES)}"
            )
        flags[table] += (f"{flag}={value}",)
    return dict(flags)


def own_settings(arguments: Sequence[str]) -> list[str]:
    """The command line with `--set launcher.NAME=VALUE` as the flag that it stands for, --NAME."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--set", action="append", default=[])
    try:
        given, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError:  # `load` says what is missing
        return list(arguments)
    own = [text for text in given.set if text.strip().startswith("launcher.")]
    others = [_packed(text) for text in given.set if text not in own]
    return [*rest, *others, *flags_by_table(own).get("launcher", ())]


def _packed(text: str) -> str:
    """As the flag of one text: pydantic-settings would cut it at commas and undo its quotes."""
    return f"--set={_PACKED}{text.encode().hex()}" if set(text) & set(_SPECIAL) else f"--set={text}"


def unpacked(text: object) -> object:
    """A text of --set as it was given."""
    if isinstance(text, str) and text.startswith(_PACKED):
        return bytes.fromhex(text.removeprefix(_PACKED)).decode()
    return text


def with_file(arguments: Sequence[str]) -> list[str]:
    """The command line with --config of `DEFAULT_FILE`, if it names no file and that one exists."""
    given = any(each == "--config" or each.startswith("--config=") for each in arguments)
    default = [] if given or not Path(DEFAULT_FILE).is_file() else ["--config", DEFAULT_FILE]
    return [*default, *arguments]
