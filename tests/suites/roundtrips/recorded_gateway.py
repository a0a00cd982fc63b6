"""The gateway's prompts and records on a store in memory, without servers or connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from seamflow.common.v1 import tokens_pb2
from seamflow.errors import from_status
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2 import GenerateTokensResponse
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.credentials import digest
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import History, Prompt
from rollout.gateway.record.recorder import Recorder, begin_request
from rollout.gateway.record.turn_record import TurnRecord
from tests.lib.rollout.gateway.support import sampled
from tests.lib.trajectory_manager.memory.store import memory_store
from tests.lib.trajectory_manager.support import RULES
from trajectory_manager.api.append_tokens import AppendTokensHandler
from trajectory_manager.api.begin_turns import BeginTurnsHandler
from trajectory_manager.cli import store_budget
from trajectory_manager.service.rollouts import Rollouts

if TYPE_CHECKING:
    pass

RUN = "run"
_CREDENTIAL = "credential"

PromptOf = Callable[[pb.GenerateRequest, ChatTemplate, History], Prompt]


class RecordedGateway:
    """Turns of one rollout."""

    def __init__(
        self, template: ChatTemplate, history: History, prompt_of: PromptOf = Prompt.parse
    ) -> None:
        """`prompt_of` reads the prompt of a request; another one than the gateway's: a control."""
        self._store = memory_store()
        rollouts = Rollouts(self._store)
        self._template = template
        self._history = history
        self._prompt_of = prompt_of
        self.appended: list[store_pb.TokenAppend] = []
        """All that was recorded, in order."""
        self._begins = BeginTurnsHandler(rollouts)
        self._appends = AppendTokensHandler(rollouts, store_budget(1 << 30), 1 << 20)

    async def start(self) -> None:
        """Open the rollout."""
        await self._store.runs.create_run(RUN, RULES)
        rollout = store_pb.NewRollout(
            run_id=RUN,
            rollout_id="r",
            purpose=tokens_pb2.PURPOSE_EVAL,
            credential_digest=digest(_CREDENTIAL),
        )
        answer = await self._begins.begin(store_pb.BeginTurnsRequest(rollouts=[rollout]))
        if answer.rollouts[0].HasField("error"):
            raise from_status(answer.rollouts[0].error)

    async def begin(self, turn_id: str, messages: pb.Messages, **fields: Any) -> TurnRecord:
        """Begin a turn: match its prompt and encode the rest; `fields` are those of the request."""
        request = pb.GenerateRequest(
            run_id=RUN, rollout_id="r", turn_id=turn_id, messages=messages, **fields
        )
        prompt = self._prompt_of(request, self._template, self._history)
        begin = begin_request(request, _CREDENTIAL, prompt, "attempt")
        answer = await self._begins.begin(store_pb.BeginTurnsRequest(turns=[begin]))
        if answer.turns[0].HasField("error"):
            raise from_status(answer.turns[0].error)
        return TurnRecord(begin, prompt, answer.turns[0].begun, cast("Recorder", self))

    async def end(self, record: TurnRecord, ids: Sequence[int], *, has_stopped: bool) -> None:
        """Record the answer and the turn's end."""
        stop, length = tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH
        reason = stop if has_stopped else length
        await record.append(GenerateTokensResponse(tokens=sampled(ids), finish_reason=reason))
        await record.close()

    async def record(self, append: store_pb.TokenAppend) -> int:
        """Append to the record, as `Recorder` does."""
        self.appended.append(append)
        answer = await self._appends.append(store_pb.AppendTokensRequest(appends=[append]))
        if answer.results[0].HasField("error"):
            raise from_status(answer.results[0].error)
        return answer.results[0].appended.num_tokens
