"""The command line of `seamflow evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.launcher.evaluate_checkpoint import main


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--checkpoint", "x"], 78, "no configuration file"),
        (["{toml}", "--checkpoint", "{folder}"], 78, "give --tasks"),
        (
            ["{toml}", "--checkpoint", "missing", "--tasks", "t.jsonl"],
            78,
            "'missing' is not a folder",
        ),
        (["{toml}", "--checkpoint", "{folder}", "--tasks", "t", "--sample", "2"], 64, "--sample"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    """It names the cure, and nothing is started."""
    toml = tmp_path / "run.toml"
    toml.write_text('[launcher]\nname = "a"\nmodel = "m"\ntasks = "t"\nagent = "a:B"\n')
    filled = [each.format(toml=toml, folder=tmp_path) for each in arguments]
    monkeypatch.setattr(sys, "argv", ["evaluate", *filled])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == code
    assert message in said
    assert len(said.splitlines()) == 1
