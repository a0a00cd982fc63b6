"""The generated pages are current, and they leave nothing out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from services.chassis.config.load import TABLES as FILE_TABLES
from tools.provenance import ROOT, benchmarks
from tools.reference import configuration
from tools.reference.benchmarks import is_of_this_release
from tools.reference.pages import PAGES

CONFIGURATIONS = [*(ROOT / "examples").rglob("*.toml"), *(ROOT / "deploy").rglob("*.toml")]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    """After a change of settings or results: `make docs`."""
    assert (ROOT / name).read_text(encoding="utf-8") == PAGES[name](), f"{name}: run make docs"


def tables(settings: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A settings class and its nested tables."""
    yield settings
    for field in settings.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from tables(field.annotation)


def test_every_setting_has_a_meaning() -> None:
    """The docstring under a field is its documentation everywhere."""
    missing = [
        f"{table}.{name}"
        for table, settings in configuration.settings_of().items()
        for each in tables(settings)
        for name, field in each.model_fields.items()
        if not field.description
    ]
    assert missing == []


def test_every_table_of_a_file_is_documented() -> None:
    """The agent runner belongs to the SDK, which has no settings library."""
    assert set(FILE_TABLES) - {"agent_runner"} <= configuration.TABLES.keys()


def known(schema: dict[str, object], values: dict[str, object], at: str) -> Iterator[str]:
    """Keys of `values` that the schema lacks."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    for key in values:
        if key not in properties:
            yield f"{at}.{key}"


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_the_json_schema_knows_the_keys_of_our_own_files(path: Path) -> None:
    """An editor that uses it marks none of them."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    schema = json.loads(configuration.json_schema())["properties"]
    for table in document.keys() & schema.keys():
        assert list(known(schema[table], document[table], table)) == []


def test_every_result_is_on_the_page() -> None:
    """A new benchmark gets an entry in bench/benchmarks.toml."""
    results = {file.stem for file in (ROOT / "bench" / "results").glob("*.json")}
    assert results <= benchmarks().keys()


def test_every_result_names_its_commit_and_its_machine() -> None:
    """A figure without them cannot be judged."""
    for file in (ROOT / "bench" / "results").glob("*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert {"commit", "date", "machine", "runs"} <= result.keys(), file.name


@pytest.mark.parametrize(
    ("versions", "shown"),
    [({"seamflow": "0.3.0.dev0"}, True), ({"seamflow": "0.2.0"}, False), ({}, False)],
)
def test_figures_of_earlier_releases_are_not_shown(versions: dict[str, str], shown: bool) -> None:
    """Nor those of an unknown one: the code that they speak of has changed."""
    assert is_of_this_release({"versions": versions}, "0.3") == shown
