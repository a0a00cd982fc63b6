"""Ways to read prompts that are wrong, which round trips have to notice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Self

from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_pb2 import Turn

from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.conversation import TemplateMessage, parse_conversation
from rollout.gateway.prompt.prompt import History, Prompt


def reencoded(request: pb.GenerateRequest, template: ChatTemplate, history: History) -> Prompt:
    """Without matching: every prompt is rendered and encoded as a whole."""
    conversation = parse_conversation(request.messages)
    return Prompt(template=template, conversation=conversation, ids=template.encode(conversation))


class RolesOnlyPrompt(Prompt):
    """Messages match whatever they say, if only their roles are equal."""

    @classmethod
    def parse(
        cls,
        request: pb.GenerateRequest,
        template: ChatTemplate,
        history: History,
        max_tokens: int = 1 << 20,
        recorded: Sequence[Turn] = (),
    ) -> Self:
        """See `Prompt.parse`."""
        prompt = super().parse(request, template, history, max_tokens, recorded)
        messages: Sequence[Any] = prompt.conversation.messages if prompt.conversation else ()
        keys = [_key(message) for message in messages] if prompt.message_keys else ()
        return cls(
            template=template,
            conversation=prompt.conversation,
            message_keys=keys,
            ids=prompt.ids,
        )

    def answer_key(self, answer: TemplateMessage) -> str:
        """See `Prompt.answer_key`."""
        return _key(answer) if self.message_keys else ""


def _key(message: TemplateMessage) -> str:
    return hashlib.sha256(message["role"].encode()).hexdigest()[:32]
