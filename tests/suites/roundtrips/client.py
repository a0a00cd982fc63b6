"""An agent's client, which sends an answer back in another form with the same meaning."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from seamflow.rollout.v1 import rollout_service_pb2 as pb

from tests.suites.roundtrips.model_family import json_text


def said_by(role: str, text: str, **fields: Any) -> pb.Message:
    """A message of one text."""
    return pb.Message(role=role, content=[pb.ContentPart(type="text", text=text)], **fields)


def echoed(answer: pb.Message, rng: random.Random) -> list[pb.Message]:
    """The answer in one message or in parts, with the liberties that clients take."""
    given = pb.Message(name=rng.choice(["", "", "agent"]))
    given.MergeFrom(answer)
    if rng.random() < 0.5:
        given.reasoning = ""
    for call in given.tool_calls:
        call.id = rng.choice([call.id, f"call_{rng.randrange(10**6)}"])
        call.arguments_json = _arguments(call.arguments_json, rng)
    text = _space(rng) + "".join(part.text for part in given.content) + _space(rng)
    del given.content[:]
    if text.strip() or rng.random() < 0.5:  # else null instead of ""
        middle = rng.randint(0, len(text))
        for part in (text[:middle], text[middle:]):
            given.content.add(type="text", text=part)
    return list(_parts(given)) if rng.random() < 0.3 else [given]


def edited(message: pb.Message, text: str, rng: random.Random) -> pb.Message:
    """The message with another text in one of its parts."""
    given = pb.Message()
    given.CopyFrom(message)
    if given.reasoning and rng.random() < 0.5:
        given.reasoning = text
    elif given.tool_calls:
        given.tool_calls[-1].arguments_json = json.dumps({"edited": text})
    elif given.reasoning and not given.content:
        given.reasoning = text
    else:
        del given.content[:]
        given.content.add(type="text", text=text)
    return given


def _parts(message: pb.Message) -> Iterator[pb.Message]:
    """Reasoning, text and each tool call as messages of their own."""
    if message.reasoning:
        yield pb.Message(role="assistant", reasoning=message.reasoning)
    if any(part.text.strip() for part in message.content) or not message.tool_calls:
        yield pb.Message(role="assistant", content=message.content)
    for call in message.tool_calls:
        yield pb.Message(role="assistant", tool_calls=[call])


def _arguments(text: str, rng: random.Random) -> str:
    """The same arguments: other order and spaces, whole numbers, a string of JSON, null."""
    arguments = _whole(json.loads(text)) if rng.random() < 0.5 else json.loads(text)
    written = json_text(arguments, rng)
    if not arguments:
        return rng.choice(["", "null", "{}"])
    return json.dumps(written) if rng.random() < 0.2 else written


def _whole(value: Any) -> Any:
    """Numbers as JavaScript writes them."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _space(rng: random.Random) -> str:
    return rng.choice(["", "", "\n", " "])
