"""The ids that end an answer, by all settings of a model folder: the same for every process.

Folders name them in up to three places that often differ: the tokenizer, config.json and
generation_config.json. What one of them calls an end is one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.lib.model_files.json_file import read_object
from services.lib.model_files.tokenizer_files import TokenizerFiles
from services.lib.rendering.renderer import RenderError, RenderLimits, shared_renderer

_ANSWER = f"answer-{uuid.uuid4().hex}"
_CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _ANSWER}]


def end_ids(folder: Path) -> frozenset[int]:
    """The union of the end ids that tokenizer, configuration and generation configuration name.

    Raises:
        ValueError: a file cannot be read; names the folder.
    """
    end_id = TokenizerFiles.of(folder).end_id
    return frozenset(_configured(folder)) | ({end_id} if end_id is not None else set())


def _configured(folder: Path) -> Iterator[int]:
    config = read_object(folder, "config.json")
    generation = read_object(folder, "generation_config.json")
    for settings in (config, config.get("text_config") or {}, generation):
        given = settings.get("eos_token_id")
        yield from (each for each in _listed(given) if isinstance(each, int) and each >= 0)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def warn_of_end(folder: Path) -> str | None:
    """One line if the chat template ends answers with no end id, with the cure; None if it does.

    A policy that learned from that template then never ends its turn.

    Raises:
        ValueError: a file cannot be read; names the folder.
    """
    tail = _tail(folder).strip()
    tokenizer, ends = TokenizerFiles.of(folder), sorted(end_ids(folder))
    texts = {number: text for text, number in tokenizer.ids.items()} | dict(tokenizer.special)
    if not tail or any(tail.startswith(texts.get(end, "\0").strip()) for end in ends):
        return None
    shown = ", ".join(f"{end} {texts.get(end, 'of no token')!r}" for end in ends) or "none"
    problem = f"model {folder}: its chat template ends an answer with "
    cure = "so answers run on into invented turns; "
    begun = [(len(text), number) for number, text in tokenizer.special.items() if text]
    begun = [each for each in begun if tail.startswith(tokenizer.special[each[1]])]
    if not begun:
        return (
            f"{problem}{tail.split()[0]!r}, which is no end id ({shown}), {cure}let the template "
            "end answers with the tokenizer's eos_token"
        )
    _, number = max(begun)
    return (
        f"{problem}{texts[number]!r} (id {number}), which is no end id ({shown}), {cure}set "
        f"eos_token_id in generation_config.json of that folder to {[number, *ends]}"
    )


def _tail(folder: Path) -> str:
    """What the template writes after the last answer; empty if that cannot be told."""
    if not (source := chat_template(folder)):
        return ""
    named = template_variables(folder)
    try:
        text = shared_renderer(RenderLimits()).render(source, _CONVERSATION, variables=named)
    except RenderError:  # the gateway reports it where it renders
        return ""
    return text.rpartition(_ANSWER)[2] if _ANSWER in text else ""


def template_variables(folder: Path) -> dict[str, Any]:
    """The special tokens that a chat template of the folder may write, by name."""
    settings = read_object(folder, "tokenizer_config.json")
    return {name: _text(value) for name, value in settings.items() if name.endswith("_token")}


def chat_template(folder: Path) -> str:
    """The folder's chat template; empty: it has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found: Any = read_object(folder, "chat_template.json").get("chat_template")
    found = found or read_object(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token
