"""What `seamflow tail` writes for each snapshot of a rollout."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from seamflow.cli.tail import TailPrinter
from seamflow.common.v1 import tokens_pb2
from seamflow.token_text import load_decoder, token_numbers
from seamflow.trajectory.v1 import trajectory_pb2

from tests.lib.sdk.run_services import policy, trajectory, turn


def test_an_unchanged_snapshot_writes_nothing() -> None:
    """Snapshots repeat what was there; the screen does not."""
    printer = TailPrinter(token_numbers)
    seen = trajectory(turn("t", [1, 2], policy(0, 2, 3)))
    assert printer.update(seen).endswith("[v3 s0] 1 2 ")
    assert printer.update(seen) == ""


def test_interleaved_turns_are_separated() -> None:
    """Parallel sub-agents: a heading wherever the turn changes."""
    printer = TailPrinter(token_numbers)
    printer.update(trajectory(turn("a", [1], policy(0, 1, 3)), turn("b", [5], policy(0, 1, 3))))
    text = printer.update(
        trajectory(turn("a", [1, 2], policy(0, 2, 3)), turn("b", [5], policy(0, 1, 3)))
    )
    assert text == "\n── turn a, 0 tokens shared\n2 "


def test_incomplete_characters_are_buffered() -> None:
    """Bytes of one character may arrive in different chunks."""
    printer = TailPrinter(lambda ids: bytes(ids).decode(errors="replace"))
    first, second = "é".encode()
    assert printer.update(trajectory(turn("t", [first], policy(0, 1, 3)))).endswith("[v3 s0] ")
    assert printer.update(trajectory(turn("t", [first, second], policy(0, 2, 3)))) == "é"


def test_a_failure_is_shown_with_its_class() -> None:
    """Whose fault it was, and the message."""
    printer = TailPrinter(token_numbers)
    failed = trajectory_pb2.Trajectory(
        state=trajectory_pb2.ROLLOUT_STATE_FAILED,
        failure=tokens_pb2.Failure(
            failure_class=tokens_pb2.FAILURE_CLASS_TIMEOUT, message="took over 5 s"
        ),
    )
    assert printer.update(failed) == "\nfailed, timeout: took over 5 s\n"
    assert printer.closed


def test_a_folder_without_tokenizer_is_wrong_usage(tmp_path: Path) -> None:
    """It names the folder."""
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="holds no usable tokenizer"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("package", ["tokenizers", "transformers"])
def test_text_without_its_package_names_that(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents have neither; which one it takes depends on the files."""

    def missing(name: str) -> ModuleType:
        raise ImportError(name)

    if package == "tokenizers":
        (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        load_decoder(tmp_path)


def test_text_shows_special_tokens_as_transformers_does(tmp_path: Path) -> None:
    """A tokenizer.json is read without transformers."""
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    words = tokenizers.models.WordLevel({"two": 0, "three": 1}, unk_token="two")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.add_special_tokens(["<end>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert load_decoder(tmp_path)([0, 1, 2]) == read.decode([0, 1, 2]) == "two three <end>"


def test_a_damaged_tokenizer_is_wrong_usage(tmp_path: Path) -> None:
    """It names the folder."""
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="holds no usable tokenizer"):
        load_decoder(tmp_path)
