"""Routes that ask of the model: /v1/models and the number of tokens of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rollout.http_gateway.config import HttpGatewayConfig
from rollout.http_gateway.dialects.anthropic_messages import CountTokens
from rollout.http_gateway.request_body import credential, read_body

if TYPE_CHECKING:
    from seamflow.client import Client

_MAX_KNOWN = 4096


class ModelRoutes:
    """For the holder of any rollout's credential."""

    def __init__(self, config: HttpGatewayConfig, client: Client) -> None:
        self._config = config
        self._client = client
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models: the one model, in the forms of OpenAI and Anthropic."""
        await self._check_credential(request)
        model = await self._model()
        listed = {"object": "list", "data": [model], "has_more": False}
        return web.json_response({**listed, "first_id": model["id"], "last_id": model["id"]})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}: the same model by any name."""
        await self._check_credential(request)
        return web.json_response(await self._model())

    def count_tokens(self) -> Callable[[web.Request], Awaitable[web.Response]]:
        dialect = CountTokens()

        async def handle(request: web.Request) -> web.Response:
            await self._check_credential(request)
            body = dialect.parse(await read_body(request, self._config))
            ids = await self._client.tokenize(
                body.messages, tools=body.tools, template_arguments=body.template_arguments
            )
            return web.json_response({"input_tokens": len(ids)})

        return handle

    async def _model(self) -> dict[str, Any]:
        model = await self._client.model()
        return {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": "seamflow",
            "max_model_len": model.max_context,
            "type": "model",
            "display_name": model.name,
            "created_at": "1970-01-01T00:00:00Z",
            "weight_version": model.weight_version,
        }

    async def _check_credential(self, request: web.Request) -> None:
        """Raises `SeamflowError` unless the credential opens the rollout."""
        key = request.match_info["rollout_id"], credential(request)
        if key not in self._known:
            await self._client.rollout(*key).trajectory()
            self._known[key] = None
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
