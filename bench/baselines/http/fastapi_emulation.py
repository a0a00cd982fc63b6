"""An emulation of the HTTP server of SGLang or vLLM: chat completions by FastAPI and uvicorn.

It parses and writes the same objects as pydantic models, one per chunk of a stream, in front of the
rollout server at `argv[2]`. What it leaves out, those servers do on top: a chat template, a
tokenizer, tool calls, checks of parameters. A character of its text is a token.
"""

from __future__ import annotations

import array
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc.aio
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub

_FIRST_CHARACTER = 33
_FINISHES = {
    tokens_pb2.FINISH_REASON_STOP: "stop",
    tokens_pb2.FINISH_REASON_LENGTH: "length",
}


class _Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class _Request(BaseModel):
    model: str
    messages: list[_Message] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    ignore_eos: bool = False
    stream: bool = False


class _Part(BaseModel):
    role: str | None = None
    content: str | None = None


class _Choice(BaseModel):
    index: int = 0
    message: _Part | None = None
    delta: _Part | None = None
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Answer(BaseModel):
    id: str
    object: str
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[_Choice]
    usage: _Usage | None = None


class _Chat:
    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._stub: Any = None

    async def complete(self, request: _Request) -> Any:
        """POST /v1/chat/completions."""
        if request.stream:
            return StreamingResponse(self._events(request), media_type="text/event-stream")
        ids, finish = list[int](), None
        prompt = _prompt(request)
        async for sampled, reason in self._sampled(request, prompt):
            ids += sampled
            finish = reason
        choice = _Choice(message=_Part(role="assistant", content=_text(ids)), finish_reason=finish)
        usage = _Usage(
            prompt_tokens=len(prompt),
            completion_tokens=len(ids),
            total_tokens=len(prompt) + len(ids),
        )
        answer = _Answer(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            object="chat.completion",
            model=request.model,
            choices=[choice],
            usage=usage,
        )
        return JSONResponse(answer.model_dump())

    async def _events(self, request: _Request) -> AsyncIterator[str]:
        name = f"chatcmpl-{uuid.uuid4().hex}"

        def event(choice: _Choice) -> str:
            answer = _Answer(
                id=name, object="chat.completion.chunk", model=request.model, choices=[choice]
            )
            return f"data: {answer.model_dump_json()}\n\n"

        yield event(_Choice(delta=_Part(role="assistant", content="")))
        finish = None
        async for ids, reason in self._sampled(request, _prompt(request)):
            yield event(_Choice(delta=_Part(content=_text(ids))))
            finish = reason
        yield event(_Choice(delta=_Part(), finish_reason=finish))
        yield "data: [DONE]\n\n"

    async def _sampled(
        self, request: _Request, prompt: list[int]
    ) -> AsyncIterator[tuple[list[int], str | None]]:
        if self._stub is None:  # in the loop of the server
            self._stub = RolloutServerServiceStub(grpc.aio.insecure_channel(self._engine))
        asked = pb.GenerateTokensRequest(
            run_id="bench",
            attempt_id=uuid.uuid4().hex,
            token_ids=array.array("i", prompt).tobytes(),
            sampling=tokens_pb2.SamplingParams(
                max_new_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                ignore_eos=request.ignore_eos,
            ),
        )
        if not request.stream:
            asked.chunk_interval.FromSeconds(1)
        async for element in self._stub.GenerateTokens(asked):
            ids = array.array("i", element.tokens.token_ids).tolist()
            yield ids, _FINISHES.get(element.finish_reason)


def _prompt(request: _Request) -> list[int]:
    text = "".join(message.content for message in request.messages)
    return [ord(character) - _FIRST_CHARACTER for character in text]


def _text(ids: list[int]) -> str:
    return "".join(chr(_FIRST_CHARACTER + i) for i in ids)


def main() -> None:
    """Serve until the process is ended."""
    app = FastAPI()
    chat = _Chat(sys.argv[2])
    app.post("/v1/chat/completions")(chat.complete)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False)


if __name__ == "__main__":
    main()
