"""The output items of Responses, and their server-sent events in the order of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.http_gateway.api_error import ApiError
from rollout.http_gateway.dialects.dialect import (
    EventStream,
    Json,
    content_logprobs,
    event,
    rest,
)

if TYPE_CHECKING:
    from seamflow.client import Turn
    from seamflow.rollout.v1.rollout_service_pb2 import TokenChunk


def output_items(turn: Turn) -> list[Json]:
    """Reasoning, message and function calls of an answer."""
    items: list[Json] = []
    if turn.reasoning:
        items.append(_reasoning(turn.turn_id, turn.reasoning))
    if turn.text or not turn.tool_calls:
        items.append(_message(turn.turn_id, turn.text, _logprobs(turn)))
    return items + [_function_call(turn.turn_id, i, c) for i, c in enumerate(turn.tool_calls)]


class ResponseEvents(EventStream):
    """Events with a running sequence_number; reasoning, message and calls are items in turn."""

    def __init__(self, head: dict[str, Any], outcome: Callable[[Turn], Mapping[str, Any]]) -> None:
        """`head` is the response without its answer, `outcome` what the turn's end sets in it."""
        self._head = head
        self._outcome = outcome
        self._turn_id = str(head["id"]).removeprefix("resp_")
        self._number = -1
        self._output_index = -1
        self._open = ""  # kind of the item that is open
        self._sent = {"reasoning": "", "message": ""}
        self._logprobs: list[Json] = []

    def start(self) -> bytes:
        return self._event("response.created", response=self._head) + self.keep_alive()

    def keep_alive(self) -> bytes:
        # Data, since some harnesses ignore comments.
        return self._event("response.in_progress", response=self._head)

    def chunk(self, chunk: TokenChunk) -> bytes:
        return self._text("reasoning", chunk.reasoning_delta) + self._text(
            "message", chunk.content_delta
        )

    def end(self, turn: Turn) -> bytes:
        self._logprobs = _logprobs(turn)
        events = self._text("reasoning", rest(turn.reasoning, self._sent["reasoning"]))
        events += self._text("message", rest(turn.text, self._sent["message"]))
        if not turn.tool_calls and not self._sent["message"]:
            events += self._opened("message")
        events += self._closed()
        for index, call in enumerate(turn.tool_calls):
            events += self._function_call(_function_call(self._turn_id, index, call))
        response = {**self._head, **self._outcome(turn)}
        return events + self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _text(self, kind: str, delta: str) -> bytes:
        if not delta:
            return b""
        events = self._opened(kind)
        self._sent[kind] += delta
        extra: Json = {"logprobs": []} if kind == "message" else {}
        return events + self._event(
            f"response.{_TEXTS[kind]}.delta", **self._place(), delta=delta, **extra
        )

    def _opened(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        events = self._closed()
        self._open = kind
        self._output_index += 1
        item = {**_ITEMS[kind](self._turn_id, ""), "status": "in_progress", "content": []}
        events += self._event(
            "response.output_item.added", output_index=self._output_index, item=item
        )
        return events + self._event(
            "response.content_part.added", **self._place(), part=_PARTS[kind]("")
        )

    def _closed(self) -> bytes:
        if not self._open:
            return b""
        kind, text = self._open, self._sent[self._open]
        logprobs = self._logprobs if kind == "message" else []
        extra: Json = {"logprobs": logprobs} if kind == "message" else {}
        events = self._event(f"response.{_TEXTS[kind]}.done", **self._place(), text=text, **extra)
        events += self._event(
            "response.content_part.done", **self._place(), part=_PARTS[kind](text, logprobs)
        )
        self._open = ""
        return events + self._event(
            "response.output_item.done",
            output_index=self._output_index,
            item=_ITEMS[kind](self._turn_id, text, logprobs),
        )

    def _function_call(self, item: Json) -> bytes:
        self._output_index += 1
        place = {"output_index": self._output_index}
        started = {**item, "status": "in_progress", "arguments": ""}
        named = {**place, "item_id": item["id"]}
        arguments = item["arguments"]
        return b"".join(
            (
                self._event("response.output_item.added", **place, item=started),
                self._event("response.function_call_arguments.delta", **named, delta=arguments),
                self._event(
                    "response.function_call_arguments.done",
                    **named,
                    arguments=arguments,
                    name=item["name"],
                ),
                self._event("response.output_item.done", **place, item=item),
            )
        )

    def _place(self) -> Json:
        item = _ITEMS[self._open](self._turn_id, "")
        return {"item_id": item["id"], "output_index": self._output_index, "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **fields}, name)


def _logprobs(turn: Turn) -> list[Json]:
    """Of the tokens of the message, if they were requested."""
    return content_logprobs(turn) if turn.token_bytes else []


def _message(turn_id: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_output_text(text, logprobs)],
    }


def _reasoning(turn_id: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {
        "id": f"rs_{turn_id}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [_reasoning_text(text)],
    }


def _function_call(turn_id: str, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"fc_{turn_id}_{index}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }


def _output_text(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def _reasoning_text(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "reasoning_text", "text": text}


_ITEMS = {"message": _message, "reasoning": _reasoning}
_PARTS = {"message": _output_text, "reasoning": _reasoning_text}
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
