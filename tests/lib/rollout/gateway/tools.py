"""A chat template with tools, one tool, and an answer that calls it."""

from __future__ import annotations

from seamflow.rollout.v1 import rollout_service_pb2 as pb

TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Tools, reasoning and tool calls, as Qwen's and Hermes' templates have them."""
ADD = pb.Tool(name="add", description="adds", parameters_json='{"type": "object"}')
SAID = '<think>hm</think>Sure.<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
ARGUMENTS = {"a": 1, "b": 2}
