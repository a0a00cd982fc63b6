"""Tables within a table of the configuration, from TOML and from text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from services.chassis.config.load import ConfigError, ServerConfig, load
from services.chassis.config.values import describe, from_text, from_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A table with a key for each field."""

    name: str
    """Required."""
    words: tuple[str, ...] = ()
    """A list."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """A table with free keys."""
    seconds: float = 1.0
    """A number."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"seconds is {self.seconds}: it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedConfig(ServerConfig):
    """A process with tables in its table."""

    parts: tuple[Part, ...] = ()
    """A list of tables."""
    named: Mapping[str, Part] = field(default_factory=dict)
    """Tables by name."""


PART = Part(name="a", words=("x", "y"), settings={"k": "v"}, seconds=2.0)
TEXT = '{name = "a", words = ["x", "y"], settings = {k = "v"}, seconds = 2}'


def test_tables_are_read_from_toml_and_from_text() -> None:
    """Text is what would stand behind the equals sign of a TOML file."""
    told = {"name": "a", "words": ["x", "y"], "settings": {"k": "v"}, "seconds": 2}
    assert from_toml([told], tuple[Part, ...]) == (PART,)
    assert from_text(f"[{TEXT}]", tuple[Part, ...]) == (PART,)
    assert from_text(f"{{one = {TEXT}}}", Mapping[str, Part]) == {"one": PART}
    assert describe(tuple[Part, ...]) == "a list of tables"
    assert describe(Mapping[str, Part]) == "a table"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--named={a = {nam = 'a'}}", "--named: a: nam: unknown key; did you mean name"),
        ("--named={a = {}}", "--named: a: name is not set"),
        ("--named={a = {name = 'a', seconds = -1}}", "--named: a: seconds is -1.0: it must be"),
        ("--parts=[{name = 1}]", "--parts: name: 1 is not a string"),
        ("--parts=[{name = 'a', words = 'b'}]", "--parts: words: 'b' is not a list of strings"),
        ("--parts={}", "--parts: {} is not a list of tables"),
        ("--named=[]", r"--named: \[\] is not a table"),
        ("--named=", "--named: "),
    ],
)
def test_a_mistake_in_a_table_says_where(
    flag: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message leads to the key, through all tables."""
    for name in list(os.environ):
        if name.startswith("SEAMFLOW_"):
            monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=message):
        load(NestedConfig, "demo", [flag])


def test_print_config_shows_what_can_be_read_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are printed as TOML."""
    for name in list(os.environ):
        if name.startswith("SEAMFLOW_"):
            monkeypatch.delenv(name)
    with pytest.raises(SystemExit):
        load(NestedConfig, "demo", ["--help"])
    assert "Tables by name. (default {})" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        load(NestedConfig, "demo", [f"--parts=[{TEXT}]", "--print-config"])
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("parts")]
    value = line.removeprefix("parts = ").rpartition("  # ")[0]
    assert from_text(value, tuple[Part, ...]) == (PART,)
