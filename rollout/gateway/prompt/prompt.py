"""The prompt of one turn: messages rendered by the chat template, or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.retokenization import find_drift
from services.chassis.errors import invalid_argument

__all__ = ["Prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Immutable. The store matches it with the record by `message_keys` if any, else by `ids`."""

    template: ChatTemplate
    """Renders and encodes the messages."""
    messages: Sequence[Mapping[str, str]] = ()
    """Role and content of each message; empty for a prompt of ids."""
    message_keys: Sequence[str] = ()
    """Digest of each message; empty where the prompt is matched by its ids."""
    ids: Sequence[int] | None = None
    """All token ids; None where they depend on the prefix that the store has recorded."""

    @classmethod
    def parse(cls, request: pb.GenerateRequest, template: ChatTemplate) -> Prompt:
        """Read the prompt of a checked request.

        Raises:
            ServiceError: INVALID_ARGUMENT, the template cannot render the messages.
        """
        if not request.messages:
            return cls(template=template, ids=tuple(request.token_ids))
        messages = [{"role": m.role, "content": m.content} for m in request.messages]
        if not _is_append_only(messages, template):
            return cls(template=template, messages=messages, ids=template.encode(messages))
        has_answers = any(m["role"] == "assistant" for m in messages)
        return cls(
            template=template,
            messages=messages,
            message_keys=template.keys(messages),
            ids=None if has_answers else template.encode(messages),
        )

    @property
    def num_answers(self) -> int:
        """Answers of the policy among the messages; 0 for a prompt of ids."""
        return sum(m["role"] == "assistant" for m in self.messages)

    def remaining_ids(self, begun: store_pb.NewTurnResult) -> Sequence[int]:
        """Ids after the prefix that the store matched: this turn's environment tokens."""
        if not self.message_keys:
            return (self.ids or ())[len(begun.prefix_token_ids) :]
        if not begun.num_matched_messages:
            return self.template.encode(self.messages) if self.ids is None else self.ids
        last = begun.prefix_token_ids[-1]
        return self.template.encode_after(self.messages, begun.num_matched_messages, last)

    def drift(self, begun: store_pb.NewTurnResult) -> trajectory_pb2.Drift | None:
        """Retokenization drift; None for messages matched by keys, whose recorded ids are used."""
        if self.message_keys or not begun.HasField("divergence"):
            return None
        return find_drift(self.template, self.ids or (), begun.divergence)

    def answer_key(self, text: str) -> str:
        """Digest of `text` as the next answer; empty where the prompt is matched by its ids."""
        if not self.message_keys:
            return ""
        return self.template.keys([{"role": "assistant", "content": text}])[0]


def _is_append_only(messages: Sequence[Mapping[str, str]], template: ChatTemplate) -> bool:
    try:
        return template.is_append_only(messages)
    except ValueError as error:
        raise invalid_argument("messages", f"{len(messages)} messages", str(error)) from error
