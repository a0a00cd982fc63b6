"""Templates that loop or ask for memory are ended, and cost nobody else anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from services.lib.rendering.renderer import (
    Renderer,
    RenderError,
    RenderLimitError,
    RenderLimits,
    reserved_names,
)

MESSAGES = [{"role": "user", "content": "hé 😀 </s>"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools | tojson }}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{{ 'x' * 100000000 }}"
GROWS = "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"
SECONDS = 0.5


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    """With little time and the default memory."""
    made = Renderer(RenderLimits(seconds=SECONDS))
    yield made
    made.close()


@pytest.mark.parametrize("add_prompt", [True, False])
@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "é"}}]])
def test_it_writes_what_transformers_does(
    renderer: Renderer, tools: list[dict[str, object]], add_prompt: bool
) -> None:
    """Letter by letter, with variables of the template."""
    template = PLAIN + "{% if add_generation_prompt %}{{ more.a }}{% endif %}{{ bos_token }}"
    variables: dict[str, Any] = {"more": {"a": [1, None, 0.5]}, "bos_token": "<s>"}
    right = render_jinja_template(
        [MESSAGES],
        tools=tools or None,  # type: ignore[arg-type]
        chat_template=template,
        add_generation_prompt=add_prompt,
        **variables,
    )
    found = renderer.render(
        template, MESSAGES, tools=tools, add_prompt=add_prompt, variables=variables
    )
    assert found == right[0][0]


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% if %}"])
def test_what_a_template_raises_is_told(renderer: Renderer, template: str) -> None:
    """And the process goes on."""
    with pytest.raises(RenderError):
        renderer.render(template, MESSAGES)
    (process,) = renderer._idle
    assert renderer.render("a", MESSAGES) == "a"
    assert [process] == [*renderer._idle]


@pytest.mark.parametrize(
    ("template", "limits", "name"),
    [
        (LOOPS, RenderLimits(seconds=SECONDS), "max_render_seconds"),
        (LARGE, RenderLimits(60.0, 64 << 20), "max_render_bytes"),
        (GROWS, RenderLimits(60.0, 64 << 20), "max_render_bytes"),
    ],
)
def test_a_template_that_takes_too_much_is_ended(
    template: str, limits: RenderLimits, name: str
) -> None:
    """The limit is named, its process is gone, and the next one renders."""
    renderer = Renderer(limits)
    renderer.warm()
    (process,) = renderer._idle
    with pytest.raises(RenderLimitError, match=name):
        renderer.render(template, MESSAGES)
    assert process._process.poll() is not None
    assert renderer.render("a", MESSAGES) == "a"
    renderer.close()


def test_without_the_memory_limit_it_takes_all_it_asks_for() -> None:
    """Negative control."""
    renderer = Renderer(RenderLimits(60.0, 4 << 30))
    assert len(renderer.render(LARGE, MESSAGES)) == 100_000_000
    renderer.close()


def test_a_killed_process_is_replaced(renderer: Renderer) -> None:
    """By the kernel's lack of memory, for example."""
    renderer.warm()
    renderer._idle[0]._process.kill()
    assert renderer.render("a", MESSAGES) == "a"


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "return_tensors", "tools", "messages", "bos_token"]
)
def test_parameters_of_the_library_are_reserved(name: str) -> None:
    """Ordinary variables of templates are not."""
    assert name in reserved_names()
    assert not {"enable_thinking", "reasoning_effort", "date_string"} & reserved_names()
