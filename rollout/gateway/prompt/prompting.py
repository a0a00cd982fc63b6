"""How the gateway makes requests to prompts, and what it allows them to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_pb2 import Turn

from rollout.gateway.config import GatewayConfig
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import Prompt
from services.chassis.rpc.request_budget import RequestBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """What all prompts of a gateway share."""

    template: ChatTemplate
    """Tokenizer and chat template of the model."""
    config: GatewayConfig
    """What happens to rewritten messages, and the limits of requests."""
    budget: RequestBudget
    """Bounds the requests in progress."""

    def prompt(self, request: pb.GenerateRequest, recorded: Sequence[Turn]) -> Prompt:
        """The prompt of a checked request; takes long for a long one.

        Raises:
            ServiceError: INVALID_ARGUMENT; NOT_FOUND, it names a turn that is none of `recorded`.
        """
        config = self.config
        limit = config.max_prompt_tokens
        return Prompt.parse(request, self.template, config.history, limit, recorded)
