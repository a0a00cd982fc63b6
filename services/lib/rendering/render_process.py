"""A process that renders chat templates, started by `renderer`: one request after the other.

A template is a program: it may loop for ever or ask for any amount of memory. The timer kills this
process in the middle of whatever it does, and the kernel refuses memory above the limit.
Started by its path, it imports nothing of ours.
"""

from __future__ import annotations

import json
import mmap
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TEXT = b"t"
"""Starts the answer that is a text."""
REFUSED = b"r"
"""Starts the answer that the template cannot render: the name of an exception, ":", its text."""
TOO_LARGE = b"m"
"""The answer of a process that has used up its memory, and ends."""
READY = b"."
"""Sent once, before the first request is read."""
TEXT_SHARE = 16
"""A text may have the memory limit divided by this: readers keep several copies."""


def main() -> None:
    """Answer requests until the other side closes the connection, or memory is used up."""
    descriptor, seconds, num_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the one who started it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    import transformers.utils.chat_template_utils  # noqa: F401  before memory is limited

    _limit_memory(num_bytes)
    with Connection(descriptor) as connection:
        connection.send_bytes(READY)
        answer = READY
        while answer != TOO_LARGE:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its time on a processor
            answer = _answer(request, num_bytes // TEXT_SHARE)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answer)


def _limit_memory(num_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * mmap.PAGESIZE + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(request: bytes, most: int) -> bytes:
    try:
        text = _render(**json.loads(request)).encode(errors="surrogatepass")
    except MemoryError:
        return TOO_LARGE
    except Exception as error:  # a template may raise anything
        kind = type(error).__name__
        return REFUSED + f"{kind}:{error or kind}".encode(errors="replace")
    return TOO_LARGE if len(text) > most else TEXT + text


def _render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    add_prompt: bool,
    variables: dict[str, Any],
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    # `variables` have none of its parameters' names: see `reserved_names`.
    rendered: Any = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=template,
        add_generation_prompt=add_prompt,
        **variables,
    )
    text: str = rendered[0][0]
    return text


if __name__ == "__main__":
    main()
