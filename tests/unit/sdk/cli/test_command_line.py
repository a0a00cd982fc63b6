"""What the `seamflow` command says of its command line, before it calls anything."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from seamflow.cli.main import main
from seamflow.inspect.endpoints import add_flags, resolve

from tests.lib.sdk.run_services import write_addresses


def seamflow(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Exit code, output and errors of one command, in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("flags", "variables", "found"),
    [
        (("--trainer", "flag:1", "--run-folder", "named"), {"SEAMFLOW_TRAINER": "env:1"}, "flag:1"),
        (("--run-folder", "named"), {"SEAMFLOW_TRAINER": "env:1"}, "named:1"),
        ((), {"SEAMFLOW_TRAINER": "env:1"}, "env:1"),
        ((), {}, "latest:1"),
    ],
)
def test_the_nearest_source_of_an_address_wins(
    flags: tuple[str, ...],
    variables: dict[str, str],
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flag, then a run folder that was asked for, then environment, then runs/latest."""
    write_addresses(tmp_path / "runs" / "latest", "latest:1")
    write_addresses(tmp_path / "named", "named:1")
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert resolve(parser.parse_args(flags), variables).services["trainer"] == found


def test_a_wrong_run_folder_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error describes a valid folder."""
    monkeypatch.chdir(tmp_path)
    code, _, err = seamflow(capsys, "status", "--run-folder", "nowhere")
    assert code == 64
    assert "name a folder that `seamflow train` made" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["--verson"], "unknown argument --verson; did you mean --version?"),
        (["status", "--jsn"], "unknown argument --jsn; did you mean --json?"),
        (["zzz"], "there is no command 'zzz'; see --help"),
        (["init"], "the following arguments are required: FOLDER"),
    ],
)
def test_what_is_unknown_names_the_nearest(
    capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    """Exit code 64."""
    code, _, err = seamflow(capsys, *given)
    assert code == 64
    assert said in err


def test_without_a_verb_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each."""
    code, out, err = seamflow(capsys)
    assert (code, err) == (0, "")
    starts = [line.split()[0] for line in out.partition("commands:")[2].splitlines() if line]
    for verb in ("init", "train", "status", "why-stuck", "export-model", "save-checkpoint"):
        assert starts.count(verb) == 1


@pytest.mark.parametrize("verb", ["init", "tail", "status"])
def test_every_verb_has_the_same_form_of_help(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """Exit code 0, and a usage line with the command that was typed."""
    code, out, _ = seamflow(capsys, verb, "--help")
    assert code == 0
    assert out.startswith(f"usage: seamflow {verb} ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the package."""
    code, out, _ = seamflow(capsys, "--version")
    assert (code, out.split()[0]) == (0, "seamflow")


def test_where_no_run_is_named_and_none_goes_on_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With folder and cure; control: a service at its usual address, and one that is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("seamflow.inspect.endpoints.listens", lambda address: False)
    code, _, err = seamflow(capsys, "status")
    assert code == 69
    assert f"there is no run here: {tmp_path} has no runs/latest" in err
    assert "--run-folder" in err
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert not resolve(parser.parse_args(["--trainer", "a:1"]), {}).ended
    assert not resolve(parser.parse_args([]), {"SEAMFLOW_TRAINER": "a:1"}).ended
    assert resolve(parser.parse_args([]), {}).ended
    monkeypatch.setattr("seamflow.inspect.endpoints.listens", lambda address: ":50053" in address)
    assert not resolve(parser.parse_args([]), {}).ended
