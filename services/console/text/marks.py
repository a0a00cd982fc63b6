"""Marks by which chat templates say who speaks, and parts of an answer.

Sources: the chat templates that Qwen, Llama 3, Gemma, Phi, GLM, DeepSeek and Mistral publish with
their models. A mark counts only as the single token that the tokenizer has for it.
"""

from __future__ import annotations

from collections.abc import Mapping

HEADERS = frozenset({"<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|header_start|>"})
"""Followed by the name of who speaks, to the end of the line or of the header."""
HEADER_ENDS = frozenset({"<|end_header_id|>", "<|header_end|>"})
SPEAKERS: Mapping[str, str] = {
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
    "<|tool|>": "tool",
    "<|observation|>": "tool",
    "<｜User｜>": "user",
    "<｜Assistant｜>": "assistant",
    "[INST]": "user",
    "[/INST]": "assistant",
    "[SYSTEM_PROMPT]": "system",
    "[/SYSTEM_PROMPT]": "user",
    "[TOOL_RESULTS]": "tool",
    "[/TOOL_RESULTS]": "assistant",
}
"""Who speaks after a mark."""
TURN_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
    | {"<|eot|>", "<｜end▁of▁sentence｜>", "</s>", "<|end_of_text|>", "<eos>"}
)
"""After these marks the text belongs to no role, until the next mark."""
INNER: Mapping[str, tuple[str, bool]] = {
    "<think>": ("reasoning", True),
    "</think>": ("reasoning", False),
    "<tool_call>": ("tool_call", True),
    "</tool_call>": ("tool_call", False),
    "<tool_response>": ("tool_result", True),
    "</tool_response>": ("tool_result", False),
    "[TOOL_CALLS]": ("tool_call", True),
    "<|python_tag|>": ("tool_call", True),
    "<|tool_call_begin|>": ("tool_call", True),
    "<|tool_call_end|>": ("tool_call", False),
}
"""Kind of what is inside, and whether it begins there."""
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "ipython": "tool",
    "function": "tool",
}
"""Names in headers."""
