"""Child process of the tool loop that computes rewards.

It loads the user's functions and math-verify once, then forks for each score. So a score has a main
thread, where signals work, can be killed, and leaves nothing behind that another could notice.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from seamflow.client.plain_values import named_rewards
from seamflow.client.turn import Task
from seamflow.environment import EnvironmentFailed
from seamflow.environment.environment_class import load_object
from seamflow.user_code.user_calls import user_place

from services.tool_loop.config import BUILT_IN, REGEX
from services.tool_loop.prompt_template import payload_field

Expected = str | int | float | bool
_NUMBER = re.compile(
    r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:[eE][+-]?\d{1,4})?|[+-]?\.\d+(?:[eE][+-]?\d{1,4})?"
)


def expected_answers(value: Any, field: str, task_id: str) -> list[Expected]:
    """The answers of which each is right.

    Args:
        value: what the payload has, one answer or a list of them.
        field: of the payload, for the message.
        task_id: likewise.

    Raises:
        EnvironmentFailed: it is null, an object, or an empty list, so that no answer is right.
    """
    answers = value if isinstance(value, list) else [value]
    if not answers or not all(isinstance(each, Expected) for each in answers):
        shown = json.dumps(value, ensure_ascii=False)[:200]
        raise EnvironmentFailed(
            f"[tool_loop] answer_field names the field {field!r}, which is {shown} in task "
            f"{task_id!r}: give a text, a number, or a list of those that are right"
        )
    return answers


def as_text(expected: Expected) -> str:
    """The answer as people write it."""
    return expected.strip() if isinstance(expected, str) else json.dumps(expected)


def is_exactly(expected: Expected, answer: str) -> bool:
    """Whether `answer`, without space around it, is the expected one.

    Texts are equal character by character; a number equals each way to write it, as 4 does "4.0",
    and true and false in any case.
    """
    if isinstance(expected, str):
        return answer == expected.strip()
    if isinstance(expected, bool):
        return answer.lower() == as_text(expected)
    if not _NUMBER.fullmatch(answer):
        return False
    return Decimal(answer.replace(",", "")) == Decimal(as_text(expected))


READY = b"ready\n"
_MAX_MORE_BYTES = 1 << 30
_WARM = (
    ("12", "It is **12**."),
    (r"\frac{\pi}{3}", r"\boxed{60^\circ}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    ("[1, 2)", r"\boxed{1 \le x < 2}"),
    (r"\{1, 2\}", r"\boxed{1, 2}"),
    (r"\left[\begin{matrix}1 & 2\end{matrix}\right]", r"$\begin{bmatrix}1 & 3\end{bmatrix}$"),
    ("even", r"\boxed{\text{odd}}"),
)

Transcript = Sequence[Mapping[str, Any]]


class Scores:
    """The rewards of [tool_loop.rewards] but those of functions that are coroutines."""

    def __init__(self, rewards: Mapping[str, str], answer_field: str, answer_pattern: str) -> None:
        self._answer_field = answer_field
        self._answer_pattern = re.compile(answer_pattern)
        self._patterns = {
            name: re.compile(how.removeprefix(REGEX))
            for name, how in rewards.items()
            if how.startswith(REGEX)
        }
        self._functions = {
            name: load_object(how, f"[tool_loop.rewards] {name}")
            for name, how in rewards.items()
            if how not in BUILT_IN and not how.startswith(REGEX)
        }
        self._rewards = rewards
        if "math" in rewards.values():
            from services.tool_loop import math_answer

            self._math = math_answer
            for expected, answer in _WARM:  # what it imports and caches at first use
                self._math.is_right([expected], answer)

    def score(self, name: str, task: Task, transcript: Transcript) -> dict[str, float]:
        """The reward `name`, or several if its function returns several.

        Raises:
            EnvironmentFailed: the task has no expected answer; others are those of the function.
        """
        if (function := self._functions.get(name)) is not None:
            returned = function(task, transcript)
            if inspect.isawaitable(returned):  # of a callable object, say
                returned = asyncio.run(_awaited(returned))
            return named_scores(name, self._rewards[name], returned)
        _limit_memory()
        return {name: float(self._is_right(name, task, transcript))}

    def _is_right(self, name: str, task: Task, transcript: Transcript) -> bool:
        answer = self._answer(_last_text(transcript))
        if (pattern := self._patterns.get(name)) is not None:
            return answer is not None and pattern.search(answer) is not None
        field = self._answer_field
        expected: list[Expected] = expected_answers(
            payload_field("answer_field", task, field), field, task.task_id
        )
        if self._rewards[name] == "exact":
            return answer is not None and any(is_exactly(each, answer) for each in expected)
        texts = [as_text(each) for each in expected]
        if not all(texts):
            raise EnvironmentFailed(
                f"answer_field names the field {field!r}, which is empty in task {task.task_id!r}: "
                'correct the task, or use another reward than "math"'
            )
        if answer is None or self._math.is_cut_off(_last_text(transcript)):
            return False
        return self._math.is_right(texts, answer)

    def _answer(self, text: str) -> str | None:
        """The answer in the last message of the policy; None: there is none."""
        if not self._answer_pattern.pattern:
            return text.strip()
        matches = list(self._answer_pattern.finditer(text))
        if not matches:
            return None
        found = matches[-1].group(1 if self._answer_pattern.groups else 0)
        return (found or "").strip()


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


def _limit_memory() -> None:
    """A comparison that needs more ends as one without a result does."""
    with suppress(OSError):  # where there is no /proc
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MAX_MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def named_scores(name: str, function: str, returned: Any) -> dict[str, float]:
    """What the function of reward `name` returned, by name.

    Raises:
        EnvironmentFailed: it has none of this name, or what is no number; names the function.
    """
    what = f"[tool_loop.rewards] {name} = {function!r}"
    given = returned if isinstance(returned, Mapping) else {name: returned}
    if name not in given:
        there = ", ".join(map(str, given)) or "none"
        raise EnvironmentFailed(
            f"{what} returned no reward of this name: name the setting after one that it returns "
            f"({there})"
        )
    try:
        return named_rewards(what, given)
    except ValueError as error:
        raise EnvironmentFailed(str(error)) from error


def _last_text(transcript: Transcript) -> str:
    """The last message, if it is the policy's."""
    last = transcript[-1]
    return str(last.get("content") or "") if last["role"] == "assistant" else ""


def main() -> None:
    """Fork for each connection that the tool loop sends, until it ends."""
    control, given = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    sys.path[:] = given.pop("path")
    logging.getLogger("math_verify").disabled = True  # parts of answers, which are not logged
    try:
        scores = Scores(**given)
    except Exception as error:
        traceback.print_exc()
        control.sendall(f"{error!r}\n".encode())
        return
    control.sendall(READY)
    gc.freeze()
    children: set[int] = set()
    while (connection := _received(control)) is not None:
        if (pid := os.fork()) == 0:
            control.close()
            _answer_and_exit(connection, scores)
        connection.close()
        children = {child for child in (*children, pid) if os.waitpid(child, os.WNOHANG) == (0, 0)}
    for child in children:  # the tool loop has ended
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def _received(control: socket.socket) -> socket.socket | None:
    _, descriptors, *_ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _answer_and_exit(connection: socket.socket, scores: Scores) -> NoReturn:
    """Answer one request, in the main thread of a process group of its own."""
    try:
        os.setpgid(0, 0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # or all scores would draw the same numbers
        with connection, connection.makefile("rwb") as stream:
            stream.write(b"%d\n" % os.getpid())
            stream.flush()
            if line := stream.readline():
                stream.write(json.dumps(_reply(json.loads(line), scores)).encode() + b"\n")
        sys.stdout.flush()
    finally:
        os._exit(0)


def _reply(request: Mapping[str, Any], scores: Scores) -> dict[str, Any]:
    name, task = request["name"], Task(**request["task"])
    signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])  # its signal ends the process
    try:
        return {"rewards": scores.score(name, task, request["transcript"])}
    except EnvironmentFailed as error:
        return {"error": str(error), "failure_class": int(error.failure_class)}
    except BaseException as error:  # exit() too
        traceback.print_exc()
        return {"error": f"[tool_loop.rewards] {name} raised {error!r}{user_place(error)}"}


if __name__ == "__main__":
    main()
