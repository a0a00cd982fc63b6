"""Templates that loop or ask for memory are ended, and cost nobody else anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
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
    """The limit is named, its process is gone, and the next one renders at once."""
    renderer = Renderer(limits)
    renderer.render("a", MESSAGES)
    before = children(renderer)
    with pytest.raises(RenderLimitError, match=name):
        renderer.render(template, MESSAGES)
    assert renderer.render("a", MESSAGES) == "a"
    after = children(renderer)
    assert len(before) == len(after) == 2  # a keeper and its child
    assert len(before & after) == 1
    renderer.close()


def test_all_end_with_the_process_that_renders() -> None:
    """Also one in the middle of a loop."""
    code = (
        "from services.lib.rendering.renderer import Renderer, RenderLimits\n"
        "renderer = Renderer(RenderLimits(seconds=600))\n"
        "renderer.render('a', [])\n"
        "print('ready', flush=True)\n"
        f"renderer.render({LOOPS!r}, [])"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()
    family = psutil.Process(started.pid).children(recursive=True)
    assert len(family) == 3
    started.kill()
    started.wait()
    started.stdout.close()
    assert psutil.wait_procs(family, timeout=60)[1] == []


def children(renderer: Renderer) -> set[int]:
    """Ids of the processes that were forked."""
    assert renderer._forks is not None
    forks = psutil.Process(renderer._forks._process.pid)
    return {child.pid for child in forks.children(recursive=True)}


def test_without_the_memory_limit_it_takes_all_it_asks_for() -> None:
    """Negative control."""
    renderer = Renderer(RenderLimits(60.0, 4 << 30))
    assert len(renderer.render(LARGE, MESSAGES)) == 100_000_000
    renderer.close()


def test_a_killed_process_is_replaced(renderer: Renderer) -> None:
    """By the kernel's lack of memory, for example."""
    renderer.render("a", MESSAGES)
    for pid in children(renderer):
        with suppress(ProcessLookupError):  # it has ended with the one before
            os.kill(pid, signal.SIGKILL)
    assert renderer.render("a", MESSAGES) == "a"


def test_the_process_that_forks_is_replaced(renderer: Renderer) -> None:
    """Those that it forked end with it."""
    renderer.render("a", MESSAGES)
    assert renderer._forks is not None
    renderer._forks._process.kill()
    renderer._forks._process.wait()
    assert renderer.render("a", MESSAGES) == "a"


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "return_tensors", "tools", "messages", "bos_token"]
)
def test_parameters_of_the_library_are_reserved(name: str) -> None:
    """Ordinary variables of templates are not."""
    assert name in reserved_names()
    assert not {"enable_thinking", "reasoning_effort", "date_string"} & reserved_names()
