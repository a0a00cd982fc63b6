"""Processes that render chat templates, started by `renderer`: one request after the other.

A template is a program: it may loop for ever or ask for any amount of memory. The timer kills its
process in the middle of whatever it does, and the kernel refuses memory above the limit.

    forks           imports what rendering needs, once; forks a keeper for each connection
     └ keeper       forks a child, tells that the timer has killed it, and forks the next
        └ child     answers the requests of the connection

Started by its path, it imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TEXT = b"t"
"""Starts the answer that is a text."""
REFUSED = b"r"
"""Starts the answer that the template cannot render: the name of an exception, ":", its text."""
TOO_LARGE = b"m"
"""The answer of a child that has used up its memory, and ends."""
TOO_LONG = b"s"
"""The keeper's answer for a child that has used up its time."""
READY = b"."
"""Sent once, before the first request is read."""
TEXT_SHARE = 16
"""A text may have the memory limit divided by this: readers keep several copies."""
_PR_SET_PDEATHSIG = 1
_CLOSED, _NEXT = 0, 3
"""Exit codes of a child: nobody asks any more; its memory is used up."""


def main() -> None:
    """Fork a keeper for each connection that comes over a socket, until that is closed."""
    asked, seconds, num_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the one who started it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _end_with_parent()
    import transformers.utils.chat_template_utils  # noqa: F401  before anything is forked

    with socket.socket(fileno=asked) as connections:
        while descriptors := socket.recv_fds(connections, 1, 1)[1]:
            _fork(partial(_keep, connections, descriptors[0], seconds, num_bytes))
            os.close(descriptors[0])


def _keep(connections: socket.socket, descriptor: int, seconds: float, num_bytes: int) -> int:
    connections.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Connection(descriptor) as connection:
        connection.send_bytes(READY)
        code = _NEXT
        while code in (_NEXT, -signal.SIGPROF):
            child = _fork(partial(_serve, connection, seconds, num_bytes))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code == -signal.SIGPROF:
                connection.send_bytes(TOO_LONG)
    return _CLOSED


def _serve(connection: Connection, seconds: float, num_bytes: int) -> int:
    """Answer until the other side closes the connection, or memory is used up."""
    _limit_memory(num_bytes)
    answer = READY
    while answer != TOO_LARGE:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return _CLOSED
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its time on a processor
        answer = _answer(request, num_bytes // TEXT_SHARE)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)
    return _NEXT


def _fork(work: Callable[[], int]) -> int:
    """The id of a process that ends with this one; the result of `work` is its exit code."""
    parent = os.getpid()
    if child := os.fork():
        return child
    code = 1
    try:
        _end_with_parent()
        if os.getppid() == parent:
            code = work()
    except OSError:
        pass  # the other side has closed the connection
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
