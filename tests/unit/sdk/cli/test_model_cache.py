"""The cache of models that `seamflow init --model NAME` makes."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from seamflow.cli.init_project import language_model
from seamflow.cli.init_project.language_model import cache_folder, cached, model_folder
from seamflow.inspect.endpoints import UsageError


def make(work: Path) -> Path:
    """A model of one file, beside what it was made from."""
    assert list(work.iterdir()) == []
    (work / "package").mkdir()
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text("{}")
    return work / "model"


def names(folder: Path) -> list[str]:
    """What a folder holds, but for the lock."""
    return sorted(each.name for each in folder.iterdir() if each.suffix != ".lock")


def test_a_model_is_made_once_and_only_it_stays(tmp_path: Path) -> None:
    made = [cached("m", make, 0, tmp_path) for _ in range(2)]
    assert made == [tmp_path / "m"] * 2
    assert names(tmp_path) == ["m"]
    assert names(made[0]) == ["config.json"]


def test_a_failure_leaves_nothing_and_the_next_attempt_succeeds(tmp_path: Path) -> None:
    def fail(work: Path) -> Path:
        make(work)
        raise UsageError("no index")

    with pytest.raises(UsageError, match="no index"):
        cached("m", fail, 0, tmp_path)
    assert names(tmp_path) == []
    assert cached("m", make, 0, tmp_path).is_dir()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """`make` asserts that it begins with an empty folder."""
    (tmp_path / "m.part" / "model").mkdir(parents=True)
    assert names(cached("m", make, 0, tmp_path)) == ["config.json"]
    assert names(tmp_path) == ["m"]


def test_a_full_disk_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: one byte more is enough."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(UsageError, match=r"1\.0 GB free, and m needs 1\.0 GB.*XDG_CACHE_HOME"):
        cached("m", make, 10**9 + 1, tmp_path)
    assert names(tmp_path) == []
    assert cached("m", make, 10**9, tmp_path).is_dir()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"kept in .*file/models.*XDG_CACHE_HOME"):
        cached("m", make, 0, tmp_path / "file" / "models")


def test_the_cache_lies_where_the_user_keeps_caches(tmp_path: Path) -> None:
    """A relative XDG_CACHE_HOME is ignored, as its specification says."""
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "seamflow" / "models"
    usual = Path.home() / ".cache" / "seamflow" / "models"
    assert cache_folder({}) == cache_folder({"XDG_CACHE_HOME": "here"}) == usual


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is made absolute, as the project lies elsewhere."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert model_folder("mine") == tmp_path / "mine"


@pytest.mark.parametrize("named", ["smollm", "Qwen/Qwen3-0.6B"])
def test_no_model_is_an_error_with_the_names_and_the_cure(named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"'{named}'.*smollm2.*hf download"):
        model_folder(named, tmp_path)


def test_missing_packages_are_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process would fail this test: its tier starts none."""
    monkeypatch.setattr(language_model, "missing_packages", lambda _: ["torch", "transformers"])
    with pytest.raises(UsageError, match=r"torch, transformers.*seamflow\[quickstart\]"):
        model_folder("smollm2", tmp_path)
    assert names(tmp_path) == []
