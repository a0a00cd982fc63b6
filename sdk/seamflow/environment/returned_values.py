"""What the user's code returns, checked and in the contract's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from seamflow.client.messages import Message, Tool, to_messages
from seamflow.client.plain_values import named_rewards, plain, to_json_value, whole_text
from seamflow.common.v1 import tokens_pb2
from seamflow.environment.environment import Observation, Step
from seamflow.environment.v1 import environment_service_pb2 as pb

MAX_OBSERVATION_BYTES = 4 << 20
"""Messages and info of one answer: what a prompt may have at the gateway."""

_MAX_TEXT = 4096
_NODE_BYTES = 8
_ROLES = ("system", "user", "assistant", "tool")


def check_size(what: str, limit: int, *values: object) -> None:
    """Refuse values that together are larger than `limit`, whatever they hold.

    Looks no further than the limit, and not by recursion: at 50 MB of text as at a dict that
    holds itself.

    Raises:
        ValueError: names `what`, such as "step returned messages", the limit and the cure.
    """
    size, left = 0, list[Any](values)
    while left:
        value = left.pop()
        size += _own_size(value)
        # Parts are counted before they are listed: there may be millions.
        if size + _NODE_BYTES * (len(left) + _num_parts(value)) > limit:
            raise ValueError(
                f"{what} of more than {limit} bytes (max_observation_bytes of the environment "
                "server): return less, such as a part that says what was left out"
            )
        if isinstance(value, Mapping):
            left.extend(value.keys())
            left.extend(value.values())
        elif _num_parts(value):
            left.extend(value)


def _num_parts(value: object) -> int:
    if isinstance(value, Mapping):
        return 2 * len(value)
    is_flat = isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence | Set)
    return 0 if is_flat else len(value)  # type: ignore[arg-type]


def _own_size(value: object) -> int:
    if isinstance(value, str | bytes | bytearray):
        return _NODE_BYTES + len(value)
    return _NODE_BYTES + int(getattr(value, "nbytes", 0))


def to_reset(
    returned: object, tools: Sequence[Tool], max_bytes: int = MAX_OBSERVATION_BYTES
) -> pb.ResetResponse:
    """What `reset` returned; `tools` are those of the environment.

    Raises:
        ValueError: names what is wrong with it.
    """
    given = returned
    if not isinstance(given, Observation):
        if not isinstance(given, str | Sequence):
            raise ValueError(  # noqa: TRY004 -- one kind of error for all of it
                f"reset returned {_shown(returned)}: return a text, a list of messages or an "
                "Observation"
            )
        given = Observation(messages=_messages("reset", given))
    check_size("reset returned an observation", max_bytes, given.messages, given.tools, given.info)
    prompt = _converted(
        "reset", _messages("reset", given.messages), tools if given.tools is None else given.tools
    )
    if not prompt.messages:
        raise ValueError("reset returned no message: return at least one")
    return pb.ResetResponse(
        messages=prompt.messages, tools=prompt.tools, info_json=_json("reset", given.info)
    )


def to_step(returned: object, max_bytes: int = MAX_OBSERVATION_BYTES) -> pb.StepResponse:
    """What `step` returned.

    Raises:
        ValueError: names what is wrong with it.
    """
    if not isinstance(returned, Step):
        raise ValueError(  # noqa: TRY004 -- one kind of error for all of it
            f"step returned {_shown(returned)}: return a seamflow.environment.Step"
        )
    check_size("step returned an observation", max_bytes, returned.messages, returned.info)
    prompt = _converted("step", _messages("step", returned.messages), ())
    is_done, is_truncated = _flag("done", returned.done), _flag("truncated", returned.truncated)
    if not prompt.messages and not (is_done or is_truncated):
        raise ValueError("step returned no message: return at least one, or Step(done=True)")
    return pb.StepResponse(
        messages=prompt.messages,
        rewards=to_rewards("step", returned.rewards),
        is_done=is_done,
        is_truncated=is_truncated,
        info_json=_json("step", returned.info),
        policy_failure=whole_text(str(plain(returned.policy_failure) or ""))[:_MAX_TEXT],
    )


def to_rewards(what: str, returned: object) -> list[tokens_pb2.Reward]:
    """Named rewards that `what` returned.

    Raises:
        ValueError: a name is no text, or a value no finite number.
    """
    named = named_rewards(what, returned)
    return [tokens_pb2.Reward(name=name, value=value) for name, value in named.items()]


def rewards_of(rewards: Sequence[tokens_pb2.Reward]) -> dict[str, float]:
    """Values by name."""
    return {reward.name: reward.value for reward in rewards}


def _messages(what: str, messages: str | Sequence[Message]) -> Sequence[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise ValueError(
                f"{what} returned {_shown(message)} as messages[{index}]: return dicts with "
                f'"role" (one of {", ".join(_ROLES)}) and "content"'
            )
    return messages


def _converted(what: str, messages: Sequence[Message], tools: Sequence[Tool]) -> Any:
    try:
        return to_messages(messages, tools)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{what} returned messages or tools that are not in the form of OpenAI's chat API: "
            f"{error!r}"
        ) from error


def _json(what: str, info: Mapping[str, Any]) -> str:
    try:
        return json.dumps(to_json_value(dict(info))) if info else ""
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} returned an info that is no JSON object: {error}") from error


def _flag(name: str, value: object) -> bool:
    value = plain(value)
    if value is not None and not isinstance(value, int | float):
        raise ValueError(f"step returned {_shown(value)} as {name}: return True or False")
    return bool(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
