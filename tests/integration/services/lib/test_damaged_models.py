"""Each file of a model folder that is damaged is named, by the launcher and by the gateway."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.harness.byte_model import make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from services.chassis.errors import ConfigError
from services.lib.model_files.json_file import check_json_files
from services.lib.model_files.model_folder import check_chat_template
from services.lib.model_files.tokenizer_files import number_of_ids

FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.json", "model.safetensors.index.json"),
)
BYTES: dict[str, bytes] = {
    "brackets": b"[" * 2_000_000,
    "braces": b'{"a":' * 500_000,
    "cut off": b'{"model": {"vocab": {"a": 0, "b',
    "a list": b"[1, 2]",
    "null": b"null",
    "empty": b"",
    "no text": b"\xff\xfe\x00\x80",
}
VALUES: list[tuple[str, str, Any]] = [
    ("config.json", "vocab_size", "32000"),
    ("config.json", "vocab_size", True),
    ("config.json", "text_config", "llama"),
    ("config.json", "text_config", {"vocab_size": []}),
    ("config.json", "architectures", "LlamaForCausalLM"),
    ("config.json", "architectures", [1]),
    ("config.json", "model_type", 7),
    ("config.json", "eos_token_id", "2"),
    ("generation_config.json", "eos_token_id", {"a": 1}),
    ("generation_config.json", "eos_token_id", [1, "2"]),
    ("tokenizer.json", "model", []),
    ("tokenizer.json", "model", {"vocab": 3}),
    ("tokenizer.json", "model", {"vocab": {"a": "b"}}),
    ("tokenizer.json", "model", {"vocab": [1, 2]}),
    ("tokenizer.json", "added_tokens", "none"),
    ("tokenizer.json", "added_tokens", [{"id": 1}]),
    ("tokenizer.json", "added_tokens", [7]),
    ("tokenizer_config.json", "chat_template", 5),
    ("tokenizer_config.json", "eos_token", 5),
    ("model.safetensors.index.json", "weight_map", []),
    ("model.safetensors.index.json", "weight_map", {"a": 3}),
    ("chat_template.json", "chat_template", {}),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is well."""
    return make_byte_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "model")


@pytest.mark.parametrize("damage", BYTES)
@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_json_objects(folder: Path, name: str, damage: str) -> None:
    """One line with folder and file."""
    (folder / name).write_bytes(BYTES[damage])
    with pytest.raises(ValueError, match=rf"^model {folder}: {name} ") as caught:
        check_json_files(folder)
    assert "\n" not in str(caught.value)
    _check_gateway(folder, name)


@pytest.mark.parametrize(("name", "key", "value"), VALUES)
def test_values_of_the_wrong_kind(folder: Path, name: str, key: str, value: Any) -> None:
    """The file, and what is wrong there."""
    file = folder / name
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**found, key: value}))
    with pytest.raises(ValueError, match=rf"^model {folder}: {name}.* (has|cannot)"):
        _read(folder)
    _check_gateway(folder, name)


def test_a_template_that_is_no_text(folder: Path) -> None:
    """Its file is named."""
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template\.jinja cannot be read"):
        check_chat_template(folder)


def test_a_whole_folder_is_taken(folder: Path) -> None:
    """Control."""
    _read(folder)
    check_chat_template(folder)
    ChatTemplate(folder)


def _read(folder: Path) -> None:
    check_json_files(folder)
    number_of_ids(folder)


def _check_gateway(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{folder}.*"):
        ChatTemplate(folder)
    assert (folder / name).is_file()
