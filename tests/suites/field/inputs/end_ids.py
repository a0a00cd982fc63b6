"""End ids of model folders whose files differ, and chat templates that end answers otherwise.

The right end ids are the union of what the files' JSON names.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from transformers import AutoTokenizer

from bench.harness.byte_model import make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.server.engines.sglang.model_shapes import ModelFolder
from rollout.server.engines.torch.transformers_model import load_model
from services.lib.model_files.end_ids import end_ids, warn_of_end
from tests.suites.field.kind import Kind
from tests.suites.field.tiny_models import make_config, make_model

TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>")
"""Added tokens of the folders; they get the ids from 261 on, after <|end|>."""
FIRST_ID = 261
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_UNSET = "unset"
Ids = int | list[int] | None | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Where a model folder names its end."""

    config: Ids = _UNSET
    text_config: Ids = _UNSET
    generation: Ids = _UNSET
    tokenizer: str | None = "<|endoftext|>"
    described: bool = False
    """The tokenizer's is an object, as older folders have it."""
    ends_with: str = "<|im_end|>\n"
    """What the template writes after an answer."""


@cache
def _small_model() -> Any:
    return make_model(make_config("llama", vocab_size=280))


@contextmanager
def _folder(given: Folder, *, weights: bool = False) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="seamflow-ends-") as name:
        folder = Path(name)
        make_byte_model(folder, _TEMPLATE.replace("END", given.ends_with))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
        tokenizer.save_pretrained(folder)
        if weights:
            _small_model().save_pretrained(folder)
            (folder / "generation_config.json").unlink()
        _edit(folder / "tokenizer_config.json", eos_token=_token(given))
        config: dict[str, Any] = {"text_config": {"eos_token_id": given.text_config}}
        if given.text_config == _UNSET:
            config = {}
        _edit(folder / "config.json", eos_token_id=given.config, **config)
        if given.generation != _UNSET:
            _edit(folder / "generation_config.json", eos_token_id=given.generation)
        yield folder


def _token(given: Folder) -> Any:
    if given.tokenizer is None or not given.described:
        return given.tokenizer
    return {"content": given.tokenizer, "special": True, "__type": "AddedToken"}


def _edit(file: Path, **changes: Any) -> None:
    found = json.loads(file.read_text()) if file.is_file() else {}
    for name, value in changes.items():
        found.pop(name, None)
        if value != _UNSET:
            found[name] = value
    file.write_text(json.dumps(found))


def _union(given: Folder) -> set[int]:
    found: set[int] = set()
    for ids in (given.config, given.text_config, given.generation):
        found |= set(ids) if isinstance(ids, list) else {ids} if isinstance(ids, int) else set()
    return found | ({FIRST_ID + TOKENS.index(given.tokenizer)} if given.tokenizer else set())


def _check_union(given: Folder) -> None:
    """One definition for the gateway and whatever else asks."""
    with _folder(given) as folder:
        for name, found in (
            ("end_ids", end_ids(folder)),
            ("the gateway", ChatTemplate(folder).stop_token_ids),
        ):
            if set(found) != _union(given):
                raise AssertionError(f"{name}: {sorted(found)}, not {sorted(_union(given))}")


def _check_engines(given: Folder) -> None:
    """The engines' too, of a whole folder."""
    with _folder(given, weights=True) as folder:
        for name, found in (
            ("torch engine", load_model(folder, 1).eos_token_ids),
            ("SGLang's", ModelFolder(folder).eos_token_ids),
        ):
            if set(found) != _union(given):
                raise AssertionError(f"{name}: {sorted(found)}, not {sorted(_union(given))}")


def _check_warning(given: Folder) -> None:
    """A warning just if the token after an answer is no end, and its cure makes it one."""
    token = next((each for each in TOKENS if given.ends_with.lstrip().startswith(each)), None)
    with _folder(given) as folder:
        warning = warn_of_end(folder)
        if token is None:
            if bool(given.ends_with.strip()) != (warning is not None):
                raise AssertionError(f"{warning}")
            return
        number = FIRST_ID + TOKENS.index(token)
        if (warning is None) != (number in _union(given)):
            raise AssertionError(f"{warning}, ends are {sorted(_union(given))}")
        if warning is None:
            return
        if not all(each in warning for each in (token, str(number), "generation_config.json")):
            raise AssertionError(warning)
        cure = json.loads(warning.rpartition(" to ")[2])
        _edit(folder / "generation_config.json", eos_token_id=cure)
        if warn_of_end(folder) is not None or number not in end_ids(folder):
            raise AssertionError(f"the cure {cure} is none")


_IDS = st.one_of(
    st.just(_UNSET),
    st.none(),
    st.integers(FIRST_ID, FIRST_ID + 3),
    st.lists(st.integers(FIRST_ID - 2, FIRST_ID + 3), min_size=1, max_size=3, unique=True),
)
_FOLDERS = st.builds(
    Folder,
    config=_IDS,
    text_config=st.one_of(st.just(_UNSET), _IDS),
    generation=_IDS,
    tokenizer=st.sampled_from((*TOKENS, None)),
    described=st.booleans(),
    ends_with=st.sampled_from(
        (*(f"{each}\n" for each in TOKENS), " <|endoftext|>", "<|im_end|>", "\n", "", "### end\n")
    ),
)
_WITHOUT_TEXT = _FOLDERS.map(
    lambda given: Folder(
        config=given.config,
        generation=given.generation,
        tokenizer=given.tokenizer,
        described=given.described,
        ends_with=given.ends_with,
    )
)
_EXAMPLES = (
    # Qwen2.5's base: all settings say <|endoftext|>, the template says <|im_end|>.
    Folder(config=FIRST_ID, generation=FIRST_ID),
    # Its instruct model, and one whose three settings differ.
    Folder(config=FIRST_ID, generation=[FIRST_ID + 2, FIRST_ID], tokenizer="<|im_end|>"),
    Folder(config=FIRST_ID, generation=[FIRST_ID + 3], tokenizer="<|im_end|>"),
    Folder(config=_UNSET, generation=_UNSET, tokenizer="<|im_end|>", described=True),
    Folder(config=None, generation=None, tokenizer=None),
    Folder(config=[FIRST_ID], generation=FIRST_ID, ends_with="<|endoftext|>"),
)

KINDS = (
    Kind(
        name="end ids of a folder",
        check=_check_union,
        examples=(*_EXAMPLES, Folder(text_config=[FIRST_ID + 3], tokenizer=None)),
        generated=_FOLDERS,
        long=500,
    ),
    Kind(
        name="end ids of engines",
        check=_check_engines,
        examples=_EXAMPLES,
        generated=_WITHOUT_TEXT,
        short=3,
        long=150,
    ),
    Kind(
        name="ends of chat templates",
        check=_check_warning,
        examples=_EXAMPLES,
        generated=_FOLDERS,
        long=500,
    ),
)
