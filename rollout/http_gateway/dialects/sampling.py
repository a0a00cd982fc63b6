"""Sampling parameters that several dialects share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from seamflow.common.v1.tokens_pb2 import SamplingParams

from rollout.http_gateway.dialects.request_model import RequestModel

_MAX_INT32 = 2**31 - 1

Budget = Annotated[int, Field(ge=1, le=_MAX_INT32)]
"""Tokens to sample at most."""
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32)]
"""Id of the vocabulary."""
StopStrings = str | list[str] | None
"""One stop string or several."""


class SamplingRequest(RequestModel):
    """The parameters of OpenAI's API and vLLM's that this system has."""

    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopStrings = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None

    def sampling(self, budget: int | None) -> SamplingParams:
        """The contract's form; `budget` None: the gateway's default."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "min_p", "seed")}
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)  # vLLM writes "off" as -1
        params = SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            stop=_strings(self.stop),
            stop_token_ids=self.stop_token_ids or (),
        )
        if budget is not None:
            params.max_new_tokens = budget
        if self.ignore_eos is not None:
            params.ignore_eos = self.ignore_eos
        return params


def _strings(stop: StopStrings) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop
