"""What agents ask of the model: GetModel and Tokenize."""

from __future__ import annotations

from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.dispatch.server_pool import ServerPool
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import Prompt
from services.chassis.errors import invalid_argument, not_found


class ModelInfo:
    """The model that a gateway serves."""

    def __init__(self, run_id: str, template: ChatTemplate, servers: ServerPool) -> None:
        self._run_id = run_id
        self._template = template
        self._servers = servers

    def get(self, request: pb.GetModelRequest) -> pb.GetModelResponse:
        """Describe it. Raises `ServiceError`: NOT_FOUND, this gateway serves another run."""
        self._check_run(request.run_id)
        template = self._template
        return pb.GetModelResponse(
            name=template.name,
            vocabulary_size=template.vocabulary_size,
            max_context=self._servers.shortest_context,
            stop_token_ids=sorted(template.stop_token_ids),
            chat_template=template.source,
            template_fingerprint=template.fingerprint,
            parses_tool_calls=template.format.parses_tool_calls,
            parses_reasoning=template.format.parses_reasoning,
            weight_version=self._servers.newest_weight_version,
        )

    def servers(self, request: pb.ListServersRequest) -> pb.ListServersResponse:
        """List the servers. Raises `ServiceError`: NOT_FOUND, this gateway serves another run."""
        self._check_run(request.run_id)
        return pb.ListServersResponse(servers=self._servers.uses())

    def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Encode a prompt.

        Raises:
            ServiceError: NOT_FOUND, this gateway serves another run; INVALID_ARGUMENT.
        """
        self._check_run(request.run_id)
        match request.WhichOneof("prompt"):
            case "messages":
                whole = pb.GenerateRequest(messages=request.messages)
                prompt = Prompt.parse(whole, self._template, "as_sampled")
                assert prompt.conversation is not None
                text = self._template.render(prompt.conversation) + prompt.constraint.opening
            case "text":
                text = request.text
            case _:
                raise invalid_argument("prompt", None, "give messages or text")
        return pb.TokenizeResponse(token_ids=self._template.encode_text(text), text=text)

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise not_found("run", run_id)
