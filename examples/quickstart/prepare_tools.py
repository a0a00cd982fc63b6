"""Make the start of a tool agent: model, tokenizer and tasks of the quickstart with tool calls.

    python -m examples.quickstart.prepare_tools --out runs/demo/start --seed 0

The model answers each call of the lift with a call of the tool `ride`, and "done" when no call is
left. As in the quickstart, a sloppy teacher has taught it to wait before it sets off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from examples.quickstart import task
from examples.quickstart.lift import Lift
from examples.quickstart.prepare import WORDS, WarmStart, build_tokenizer, make_start

__all__ = ["CHAT_TEMPLATE", "TOOL_WORDS", "main", "tool_calls"]

# Calls as Qwen and Hermes write them. Of tools the name is shown: so small a model knows its own.
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}"
    """{{ 'tool: "' + tool['function']['name'] + '", ' + eos_token }}{% endfor %}"""
    "{% for message in messages %}{{ message['role'] + ': ' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    """{{ '<tool_call> {"name": "' + call['function']['name'] + '", "arguments": ' }}"""
    "{{ (call['function']['arguments'] | tojson) + ' } </tool_call>' }}"
    "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOL_WORDS = (
    *("tool:", "idle", "done", "<tool_call>", "</tool_call>"),
    *('{"name":', '"ride",', '"arguments":', '{"floors":', '"', '"}', "}"),
)
"""Tokens of a call: each is written with white space around it."""


def tool_calls(payload: task.Payload, answers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A ride for each answer, and a last turn that ends the conversation."""
    lift, role = Lift(payload), 'tool: "ride", <eos> user:'
    for answer in answers:
        call = f'{{"name": "ride", "arguments": {{"floors": " {answer} "}} }}'
        yield f"{role} {lift.call()} <eos> assistant:", f"<tool_call> {call} </tool_call> <eos>"
        lift.ride(answer)
        role = "tool:"
    yield f"{role} {lift.call()} <eos> assistant:", "done <eos>"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the start of a tool agent."""
    tokenizer = build_tokenizer((*WORDS, *TOOL_WORDS), CHAT_TEMPLATE)
    return make_start(tokenizer, WarmStart(steps=600), tool_calls, argv)


if __name__ == "__main__":
    raise SystemExit(main())
