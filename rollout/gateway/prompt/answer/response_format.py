"""Response formats: from the text of an answer to content, reasoning and tool calls.

A format is a response template of `transformers.utils.chat_parsing`. It comes from the setting
`response_format`, from the tokenizer, or is chosen by the markers in the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.gateway.prompt.answer.answer_parser import TEXTS, AnswerParser, Delta, Markers
from rollout.gateway.prompt.answer.model_families import BUILT_IN, MARKERS
from services.chassis import plugins
from services.chassis.errors import ConfigError

_MAX_DEPTH = 16
_TYPE_OF = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
_OF_OBJECTS = frozenset({"properties", "additionalProperties", "patternProperties", "required"})
_OF_ARRAYS = frozenset({"items", "prefixItems", "contains", "minItems", "maxItems"})


def typed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a function, with the types of its parameters in place of their schemas."""
    function = dict(tool.get("function", tool))
    parameters = function.get("parameters")
    root = parameters if isinstance(parameters, Mapping) else {}
    properties = root.get("properties")
    given = properties if isinstance(properties, Mapping) else {}
    types = {name: {"type": _types(schema, root, _MAX_DEPTH)} for name, schema in given.items()}
    function["parameters"] = {"type": "object", "properties": types}
    return {"type": "function", "function": function}


def _types(schema: object, root: Mapping[str, Any], depth: int) -> list[str]:
    """The JSON types that a schema allows; none if it does not tell."""
    if not isinstance(schema, Mapping) or depth == 0:
        return []
    found = _own_types(schema)
    parts = [_types(_referenced(schema.get("$ref"), root), root, depth - 1)]
    parts += [_types(each, root, depth - 1) for each in _list(schema.get("allOf"))]
    for name in ("anyOf", "oneOf"):
        choices = [_types(each, root, depth - 1) for each in _list(schema.get(name))]
        parts.append([kind for kinds in choices for kind in kinds])
    for kinds in filter(None, parts):
        found = [kind for kind in found if kind in kinds] or kinds if found else kinds
    nullable = ["null"] if schema.get("nullable") else []
    return [*dict.fromkeys([*found, *nullable])]


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    """By its `type`, its values, or keywords that only one type has."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, Sequence):
        return [each for each in declared if isinstance(each, str)]
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    if values:
        return [*dict.fromkeys(_TYPE_OF[type(value)] for value in values)]
    if schema.keys() & _OF_OBJECTS:
        return ["object"]
    return ["array"] if schema.keys() & _OF_ARRAYS else []


def _referenced(reference: object, root: Mapping[str, Any]) -> object:
    """What a reference into the same schema names; None for others."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for part in filter(None, reference.removeprefix("#").split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


_CONTENT = "answer-40f1"
_ANY_START = r"\A"
_REASONING = ("reasoning_content", "thinking")
_MALFORMED = (ValueError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Answer:
    message: Mapping[str, Any]
    """As chat templates take it: role, content, reasoning_content, tool_calls."""
    error: str = ""
    """Why its tool calls could not be parsed; their markup then is part of the content."""


class ResponseFormat:
    def __init__(
        self,
        template: Mapping[str, Any],
        special_tokens: Sequence[str] = (),
        stop_tokens: Sequence[str] = (),
        name: str = "",
        lead: str = "",
    ) -> None:
        """`special_tokens` are left out of texts, but for those that mark tool calls.

        `lead` is white space that the chat template writes before the content of an answer.

        Raises:
            ValueError: `template` is no response template, or has no content.
        """
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._lead = lead
        self.name = name
        """Built-in name, else the setting's value."""
        self._fields = fields = _joining(template)
        whole = {**template, "defaults": {}}
        texts = {n: f for n, f in fields.items() if _is_text(f)}
        unread = {n: f if n in texts else _unread(f) for n, f in fields.items()}
        self._whole = load_response_template({**whole, "fields": fields})
        self._texts_only = load_response_template({**whole, "fields": texts})
        self._unread = load_response_template({**whole, "fields": unread})
        calls = fields.get("tool_calls", {})
        self._special = Markers(
            token
            for token in special_tokens
            if token in stop_tokens or not _is_in_markers(token, calls)
        )
        self.parses_tool_calls = bool(calls)
        self.parses_reasoning = any(name in fields for name in _REASONING)
        self.has_single_calls = bool(calls) and not calls.get("transform_each")
        """Whether each tool call has markers of its own."""
        self._takes_header = template.get("start_anchor_pattern") != _ANY_START
        self._tag = calls.get("content_args", {}).get("tag_pattern")

    def parse(
        self,
        text: str,
        prompt_end: str,
        tools: Sequence[Mapping[str, Any]] = (),
        position: int = 0,
        *,
        has_calls: bool = True,
    ) -> Answer:
        """Parse an answer, special tokens included.

        `prompt_end` is what the template wrote after the last message: the header of the answer,
        and maybe the opening tag of its reasoning. Tool calls at another `position` of the
        conversation have other ids; without `has_calls` they are content.
        """
        seed = f"{position} {text}"
        if not has_calls:
            return Answer(_message(self._parser(self._texts_only, prompt_end), text, seed))
        try:
            return Answer(_message(self._parser(self._whole, prompt_end, tools), text, seed))
        except _MALFORMED as error:
            parser = self._parser(self._texts_only, prompt_end)
            return Answer(_message(parser, text, seed), " ".join(str(error).split())[:400])

    def stream(
        self, prompt_end: str, stops: Sequence[str] = (), *, has_calls: bool = True
    ) -> AnswerStream:
        """Increments of the answer that ends before the first of `stops`."""
        template = self._unread if has_calls else self._texts_only
        parser = self._parser(template, prompt_end, until_structure=True)
        return AnswerStream(parser, stops)

    def call_counter(self, prompt_end: str) -> CallCounter:
        """Counts the tool calls of a growing answer."""
        return CallCounter(self._parser(self._unread, prompt_end))

    def _parser(
        self,
        template: Any,
        prompt_end: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        until_structure: bool = False,
    ) -> AnswerParser:
        from transformers.utils.chat_parsing import ResponseParser

        prefix = self._prefix(prompt_end)
        return AnswerParser(
            ResponseParser(template, prefix=prefix, tools=[typed_tool(tool) for tool in tools]),
            self._special,
            tag=self._tag,
            lead=self._lead,
            until_structure=until_structure,
        )

    def opened_reasoning(self, prompt: str) -> str:
        """The tag with which a prompt ends that opens the reasoning of the answer; or empty."""
        return self.reasoning_tags(prompt)[0]

    def reasoning_tags(self, prompt: str) -> tuple[str, str]:
        """The tag with which a prompt ends that opens the reasoning, and the closing one."""
        fields = [self._fields[name] for name in _REASONING if name in self._fields]
        for field in fields:
            opens, closes = _tags(field.get("open")), _tags(field.get("close"))
            for index, tag in enumerate(opens):
                if closes and prompt.rstrip().endswith(tag):
                    return tag, closes[min(index, len(closes) - 1)]
        return "", ""

    def _prefix(self, prompt_end: str) -> str:
        """What the parser reads before the answer."""
        return prompt_end if self._takes_header else self.opened_reasoning(prompt_end)


class CallCounter:
    """Whether a growing answer has a complete tool call."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> bool:
        """Whether one is complete with more text; one that is malformed is, too."""
        try:
            self._parser.feed(text)
        except _MALFORMED:
            return True
        return self._parser.num_calls > 0


class AnswerStream:
    """Increments of an answer's content and reasoning; concatenated they begin its parsed texts.

    What a stream has returned depends on the text it has got, not on how that was cut. From the
    first tool call on everything waits for the end: a malformed one is content.
    """

    def __init__(self, parser: AnswerParser, stops: Sequence[str] = ()) -> None:
        self._parser = parser
        self._stops = Markers(stops)
        self._waiting = ""  # may be the start of a stop string
        self._has_stopped = False

    def open(self, text: str) -> Delta:
        """What is certain with the text that the prompt ends with; it has no stop string."""
        return self._parser.feed(text)

    def push(self, text: str, *, is_marker: bool = False) -> Delta:
        """What is certain with more text; that of special tokens has no stop string."""
        if self._has_stopped:
            return Delta()
        self._waiting += text
        found = None if is_marker else self._stops.search(self._waiting)
        self._has_stopped = found is not None
        decided = len(self._waiting) if is_marker else self._stops.decided(self._waiting)
        end = found.start() if found else decided
        certain, self._waiting = self._waiting[:end], self._waiting[end:]
        return self._parser.feed(certain)


def load_response_format(
    name: str,
    tokenizer: Any,
    special_tokens: Sequence[str] = (),
    stop_tokens: Sequence[str] = (),
) -> ResponseFormat:
    """The format of setting `response_format`.

    "auto", a built-in name, a JSON file, or a plug-in "package.module:NAME" that is a dict.

    Raises:
        ConfigError: an unknown name, or no response template.
    """
    template = getattr(tokenizer, "response_template", None) if name == "auto" else None
    if name == "auto" and template is None:
        name = _detected(tokenizer.chat_template, special_tokens)
    try:
        template = _template_of(name) if template is None else template
        lead = _content_lead(tokenizer)
        return ResponseFormat(template, special_tokens, stop_tokens, name, lead)
    except (OSError, ImportError, *_MALFORMED) as error:
        raise ConfigError(f"response_format is {name!r}: {error}: {_cure()}") from error


def _content_lead(tokenizer: Any) -> str:
    """White space that the chat template writes between its prompt and the content of an answer."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _CONTENT}]
    try:
        prompt, whole = (
            tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=asks)
            for given, asks in ((messages[:1], True), (messages, False))
        )
    except Exception:  # the template has other demands, or there is none
        return ""
    start = whole.find(_CONTENT)
    lead: str = whole[len(prompt) : start] if whole.startswith(prompt) and start > 0 else ""
    return lead if lead.isspace() else ""


def _detected(chat_template: str | None, special_tokens: Sequence[str]) -> str:
    """Name of the format that the chat template tells of; without one the special tokens tell."""
    source = chat_template or "".join(special_tokens)
    return next((name for marker, name in MARKERS if marker in source), "text")


def _template_of(name: str) -> Mapping[str, Any]:
    if name in BUILT_IN:
        return {"start_anchor_pattern": _ANY_START, "fields": BUILT_IN[name]}
    if name.endswith(".json"):
        return dict(json.loads(Path(name).read_text("utf-8-sig")))
    if ":" not in name:
        raise ValueError("it is none of the known names")
    found = plugins.load(name)
    if not isinstance(found, Mapping):
        raise TypeError(f"it is a {type(found).__name__}, not a dict")
    return found


def _cure() -> str:
    known = ", ".join(sorted(BUILT_IN))
    return (
        f"give auto, {known}, or a response template of transformers.utils.chat_parsing as a .json "
        'file or as a plug-in "package.module:NAME"'
    )


def _message(parser: AnswerParser, text: str, seed: str) -> dict[str, Any]:
    whole = parser.feed(text)
    whole.add(parser.finish())
    message: dict[str, Any] = {"role": "assistant", "content": whole.content}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if calls := parser.tool_calls(seed):
        message["tool_calls"] = calls
    return message


def _is_text(field: Mapping[str, Any]) -> bool:
    return field.get("content", "text") == "text" and "transform" not in field


def _joining(template: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields; texts that come in pieces lose none of them, and no field has to be there."""
    given = template.get("fields")
    if not (isinstance(given, Mapping) and all(isinstance(f, Mapping) for f in given.values())):
        raise ValueError('a response template needs "fields", an object of objects')
    fields = {name: dict(field) for name, field in given.items()}
    for name, field in fields.items():
        if name in TEXTS and not _is_text(field):
            raise ValueError(f"field {name!r} must be text, without a transform")
        field["optional"] = True
        if _is_text(field):
            field.update(repeats=True, join="\n")
    if "content" not in fields:
        raise ValueError('a response template needs a field "content"')
    return fields


def _unread(field: Mapping[str, Any]) -> dict[str, Any]:
    """The same region, whatever is in it."""
    anchors = {key: field[key] for key in field if key.startswith(("open", "close"))}
    return {**anchors, "transform": "", "repeats": True, "join": ""}


def _tags(given: object) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())  # type: ignore[call-overload]


def _is_in_markers(token: str, field: Mapping[str, Any]) -> bool:
    markers = [value for key, value in field.items() if key.startswith(("open", "close"))]
    return token in re.sub(r"\\(\W)", r"\1", "\n".join(map(str, markers)))
