"""The model families whose response formats are bundled."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from tests.suites.roundtrips.model_family import ModelFamily, Said, json_text

_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_MISTRAL = (
    *("</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
_LLAMA = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_HARMONY = ("<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_CALLS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)

_CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system↵Tools: {{ tools | tojson }} Answer with <tool_call>"
    "FORM</tool_call>.<|im_end|>↵{% endif %}"
)
_CHATML_RESULT = (
    "{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "↵<tool_response>↵{{ m.content }}↵</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>↵{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}↵"
)
_CHATML_END = (
    "<|im_end|>↵{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant↵"
)
_JSON_CALLS = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "↵<tool_call>↵{{ c.function | tojson }}↵</tool_call>{% endfor %}"
)
_XML_CALLS = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}↵<tool_call>↵<function={{ c.function.name }}>↵"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>↵"
    "{{ v if v is string else v | tojson }}↵</parameter>↵{% endfor %}</function>↵</tool_call>"
    "{% endfor %}"
)
_LAST_QUESTION = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
)
_FRESH_REASONING = (
    "{% if m.reasoning_content and loop.index0 > ns.asked %}"
    "<think>↵{{ m.reasoning_content }}↵</think>↵↵{% endif %}"
)
_KEPT_REASONING = (
    "{% if m.reasoning_content %}<think>↵{{ m.reasoning_content }}↵</think>↵↵{% endif %}"
)


def _chatml(calls: str, *, before: str = "", reasoning: str = "", ask: str = "") -> str:
    form = "<function=" if calls == _XML_CALLS else "{}"
    head = _CHATML_TOOLS.replace("FORM", form) + before + "{% for m in messages %}"
    return head + _CHATML_RESULT + reasoning + calls + _CHATML_END + ask + "{% endif %}"


def _thought(said: Said, rng: random.Random) -> str:
    if not said.reasoning:
        return ""
    space = rng.choice(["\n", "", " "])
    return f"<think>{space}{said.reasoning}{space}</think>" + rng.choice([space, "\n\n"])


def _tool_call(call: Any, key: str, rng: random.Random) -> str:
    name, arguments = call
    whole = json_text(dict(arguments), rng)
    parts = [f'"name": {json.dumps(name)}', f'"{key}": {whole}']
    return "{" + rng.choice([", ", ","]).join(parts) + "}"


def _hermes(said: Said, rng: random.Random) -> str:
    space = rng.choice(["\n", "", " "])
    written = [_tool_call(call, "arguments", rng) for call in said.calls]
    calls = (f"<tool_call>{space}{call}{space}</tool_call>" for call in written)
    return _thought(said, rng) + rng.choice(["\n", "", "\n\n"]).join((said.content, *calls))


def _opened(said: Said, rng: random.Random) -> str:
    """As the prompt has opened the reasoning already."""
    opened = said.reasoning + rng.choice(["\n", ""]) + "</think>" + rng.choice(["\n\n", ""])
    return opened + _hermes(Said(content=said.content, calls=said.calls), rng)


def _qwen3_coder(said: Said, rng: random.Random) -> str:
    def call(name: str, arguments: Mapping[str, Any]) -> str:
        values = (
            f"<parameter={key}>\n{v if isinstance(v, str) else json_text(v, rng)}\n</parameter>"
            for key, v in arguments.items()
        )
        body = "\n".join((f"<function={name}>", *values, "</function>"))
        return f"<tool_call>\n{body}\n</tool_call>"

    return rng.choice(["\n", "\n\n"]).join((said.content, *(call(*c) for c in said.calls)))


def _llama3(said: Said, rng: random.Random) -> str:
    if not said.calls:
        return said.content
    tag = rng.choice(["", "", "<|python_tag|>"])
    return tag + _tool_call(said.calls[0], "parameters", rng)


def _mistral(said: Said, rng: random.Random) -> str:
    if not said.calls:
        return rng.choice(["", " "]) + said.content
    calls = ", ".join(_tool_call(call, "arguments", rng) for call in said.calls)
    return f"[TOOL_CALLS]{rng.choice(['', ' '])}[{calls}]"


def _mistral_args(said: Said, rng: random.Random) -> str:
    calls = (f"[TOOL_CALLS]{name}[ARGS]{json_text(dict(a), rng)}" for name, a in said.calls)
    thought = f"[THINK]{said.reasoning}[/THINK]" if said.reasoning else ""
    return thought + "".join((said.content, *calls))


def _deepseek_r1(said: Said, rng: random.Random) -> str:
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
        f"```json\n{json_text(dict(a), rng)}\n```<｜tool▁call▁end｜>"
        for name, a in said.calls
    )
    block = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    thought = _thought(said, rng)
    return thought + said.content + (rng.choice(["", "\n\n"]) + block if block else "")


def _deepseek_v31(said: Said, rng: random.Random) -> str:
    calls = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json_text(dict(a), rng)}<｜tool▁call▁end｜>"
        for name, a in said.calls
    )
    block = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return said.content + block


def _harmony(said: Said, rng: random.Random) -> str:
    parts = []
    if said.reasoning:
        parts.append(f"<|channel|>analysis<|message|>{said.reasoning}<|end|>")
    if said.calls:
        if said.content:
            parts.append(f"<|channel|>commentary<|message|>{said.content}<|end|>")
        ((name, arguments),) = said.calls
        to, channel = f" to=functions.{name}", "<|channel|>commentary"
        header = rng.choice([channel + to, to + channel])
        kind = rng.choice([" <|constrain|>json", " json", ""])
        parts.append(f"{header}{kind}<|message|>{json_text(dict(arguments), rng)}")
    else:
        parts.append(f"<|channel|>final<|message|>{said.content}")
    return "<|start|>assistant".join(parts)


_LLAMA3_TEMPLATE = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>↵↵Tools: "
    "{{ tools | tojson }} Answer with"
    ' {"name": function name, "parameters": dictionary of argument name and its value}'
    "<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>↵↵{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>↵↵{% endif %}"
)
_MISTRAL_TEMPLATE = (
    _LAST_QUESTION + "<s>{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.asked %}[AVAILABLE_TOOLS] "
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ {'content': m.content} | tojson }}"
    "[/TOOL_RESULTS]{% elif m.role == 'system' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)
_MISTRAL_ARGS_TEMPLATE = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role != 'assistant' %}[INST]{{ m.content }}[/INST]{% else %}"
    "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}"
    "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
)
_DEEPSEEK_HEAD = (
    "<｜begin▁of▁sentence｜>{% if tools %}Tools: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}{% if loop.first or loop.previtem.role != 'tool' %}<｜Assistant｜>{% endif %}"
)
_DEEPSEEK_TAIL = (
    "<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>"
)
_DEEPSEEK_R1_TEMPLATE = (
    _DEEPSEEK_HEAD + "{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}↵"
    "```json↵{{ c.function.arguments | tojson }}↵```<｜tool▁call▁end｜>"
    "{{ '' if loop.last else '\\n' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    + _DEEPSEEK_TAIL
    + "{% endif %}"
)
_DEEPSEEK_V31_TEMPLATE = (
    _DEEPSEEK_HEAD + "</think>{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    "{% endif %}" + _DEEPSEEK_TAIL + "</think>{% elif add_generation_prompt %}</think>{% endif %}"
)
_DEEPSEEK_V31_TEXT_TEMPLATE = _DEEPSEEK_V31_TEMPLATE.replace(
    "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"
)
"""As DeepSeek released it: it takes arguments as text only."""
_HARMONY_TEMPLATE = (
    "{% set ns = namespace(name='') %}<|start|>system<|message|>Channels: analysis, commentary, "
    "final.<|end|>{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.{{ ns.name }}"
    " to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set ns.name = f.name %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% if m.content %}<|start|>assistant<|channel|>commentary<|message|>"
    "{{ m.content }}<|end|>{% endif %}<|start|>assistant<|channel|>commentary to=functions."
    "{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_ALL = (
    ModelFamily(
        name="hermes",
        response_format="hermes",
        chat_template=_chatml(_JSON_CALLS),
        special=_CHATML,
        others=_TAGS,
        more_stops=("<|endoftext|>",),
        write=_hermes,
        reasons=False,
    ),
    ModelFamily(
        name="qwen3",
        response_format="hermes",
        chat_template=_chatml(_JSON_CALLS, before=_LAST_QUESTION, reasoning=_FRESH_REASONING),
        special=_CHATML,
        others=_TAGS,
        write=_hermes,
        rewrites_history=True,
    ),
    ModelFamily(
        name="qwen3_opened",
        response_format="hermes",
        chat_template=_chatml(_JSON_CALLS, reasoning=_KEPT_REASONING, ask="<think>↵"),
        special=_CHATML,
        others=_TAGS,
        write=_opened,
    ),
    ModelFamily(
        name="qwen3_coder",
        response_format="qwen3_coder",
        chat_template=_chatml(_XML_CALLS),
        special=_CHATML,
        others=_TAGS,
        write=_qwen3_coder,
        reasons=False,
    ),
    ModelFamily(
        name="llama3",
        response_format="llama3",
        chat_template=_LLAMA3_TEMPLATE,
        special=(*_LLAMA, "<|python_tag|>", "<|eom_id|>"),
        more_stops=("<|eom_id|>",),
        write=_llama3,
        ends=lambda said: "<|eom_id|>" if said.calls else "<|eot_id|>",
        reasons=False,
        max_calls=1,
        calls_with_text=False,
    ),
    ModelFamily(
        name="mistral",
        response_format="mistral",
        chat_template=_MISTRAL_TEMPLATE,
        special=_MISTRAL,
        write=_mistral,
        reasons=False,
        calls_with_text=False,
        rewrites_history=True,
    ),
    ModelFamily(
        name="mistral_args",
        response_format="mistral_args",
        chat_template=_MISTRAL_ARGS_TEMPLATE,
        special=(*_MISTRAL, "[ARGS]", "[THINK]", "[/THINK]"),
        write=_mistral_args,
    ),
    ModelFamily(
        name="deepseek_r1",
        response_format="deepseek",
        chat_template=_DEEPSEEK_R1_TEMPLATE,
        special=_DEEPSEEK,
        others=(*_DEEPSEEK_CALLS, "<think>", "</think>"),
        write=_deepseek_r1,
        rewrites_history=True,
    ),
    ModelFamily(
        name="deepseek_v31",
        response_format="deepseek",
        chat_template=_DEEPSEEK_V31_TEMPLATE,
        special=_DEEPSEEK,
        others=(*_DEEPSEEK_CALLS, "<think>", "</think>"),
        write=_deepseek_v31,
        reasons=False,
    ),
    ModelFamily(
        name="deepseek_v31_text",
        response_format="deepseek",
        chat_template=_DEEPSEEK_V31_TEXT_TEMPLATE,
        special=_DEEPSEEK,
        others=(*_DEEPSEEK_CALLS, "<think>", "</think>"),
        write=_deepseek_v31,
        reasons=False,
    ),
    ModelFamily(
        name="harmony",
        response_format="harmony",
        chat_template=_HARMONY_TEMPLATE,
        special=(*_HARMONY, "<|constrain|>"),
        more_stops=("<|call|>",),
        write=_harmony,
        ends=lambda said: "<|call|>" if said.calls else "<|return|>",
        max_calls=1,
        rewrites_history=True,
    ),
)
FAMILIES = {family.name: family for family in _ALL}
"""By name."""
