"""AppendTokens: independent appends in one message, in order within a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import Reason, ServiceError
from services.lib.token_bytes import pack_ids, pack_logprobs, unpack_ids
from tests.lib.trajectory_manager.client import rewards
from tests.lib.trajectory_manager.support import CREDENTIAL, Run, token_append
from trajectory_manager.api.append_tokens import AppendTokensHandler
from trajectory_manager.cli import store_budget
from trajectory_manager.model.records import RolloutState
from trajectory_manager.model.tokens import Appended
from trajectory_manager.service.rollouts import Rollouts

STOP = tokens_pb2.FINISH_REASON_STOP


def appends(run: Run, max_inflight_bytes: int = 1 << 20) -> AppendTokensHandler:
    """The servicer's part that does them."""
    return AppendTokensHandler(run.rollouts, store_budget(max_inflight_bytes), 1000)


def message(
    run: Run, rollout_id: str, epoch: int, offset: int, ids: list[int], **more: object
) -> pb.TokenAppend:
    """One append of sampled ids."""
    span = tokens_pb2.Span(
        start=0,
        num_tokens=len(ids),
        origin=tokens_pb2.ORIGIN_POLICY,
        weight_version=2,
        version_source=tokens_pb2.VERSION_SOURCE_ENGINE,
    )
    tokens = tokens_pb2.PackedTokens(
        token_ids=pack_ids(ids),
        logprobs=pack_logprobs([-0.5] * len(ids)),
        spans=[span] if ids else [],
    )
    return pb.TokenAppend(
        run_id=run.run_id,
        rollout_id=rollout_id,
        turn_id="t",
        epoch=epoch,
        offset=offset,
        tokens=tokens,
        **more,  # type: ignore[arg-type]
    )


async def opened(run: Run, *rollout_ids: str) -> list[int]:
    """Rollouts with an open turn each; their epochs."""
    epochs = []
    for name in rollout_ids:
        await run.start(name)
        epochs.append((await run.begin(name, "t", [1])).epoch)
    return epochs


async def test_one_failed_append_does_not_affect_the_others(run: Run) -> None:
    """Results stand in the order of the appends, each with its tokens or its reason."""
    a, b = await opened(run, "a", "b")
    request = pb.AppendTokensRequest(
        appends=[
            message(run, "a", a, 0, [1, 2]),
            message(run, "a", a + 1, 2, [3]),
            message(run, "nobody", a, 0, [1]),
            message(run, "b", b, 0, [7, 8, 9]),
            message(run, "b!", b, 0, [7]),
        ]
    )
    results = (await appends(run).append(request)).results
    assert [result.appended.num_tokens for result in results] == [2, 0, 0, 3, 0]
    reasons = [result.error.details[0].value for result in results if result.HasField("error")]
    wanted = (Reason.STALE_EPOCH, Reason.NOT_FOUND, Reason.INVALID_FIELD)
    for reason, encoded in zip(wanted, reasons, strict=True):
        assert reason.value.encode() in encoded
    (stored,) = await run.store.tokens.tokens(run.run_id, "b", ["t"])
    assert list(unpack_ids(stored.ids)) == [7, 8, 9]


async def test_an_append_may_end_its_turn_and_be_repeated(run: Run) -> None:
    """The repetition is acknowledged; another end, or more tokens, are not."""
    (epoch,) = await opened(run, "a")
    first = message(run, "a", epoch, 0, [1, 2])
    last = message(run, "a", epoch, 2, [3], finish_reason=STOP, message_key="k")
    request = pb.AppendTokensRequest(appends=[first, last])
    for _ in range(2):
        results = (await appends(run).append(request)).results
        turns = await run.store.tokens.turns(run.run_id, "a")
        assert (turns[0].finish_reason, turns[0].answer_key) == (STOP, "k")
        assert results[1].appended.num_tokens == 3
        request = pb.AppendTokensRequest(appends=[last, last])
    other = message(run, "a", epoch, 2, [3], finish_reason=STOP, message_key="other")
    more = message(run, "a", epoch, 3, [4], finish_reason=STOP, message_key="k")
    late = pb.AppendTokensRequest(appends=[other, more])
    for result in (await appends(run).append(late)).results:
        assert result.HasField("error")


async def test_an_end_may_come_without_tokens(run: Run) -> None:
    """An append of nothing needs a finish_reason."""
    (epoch,) = await opened(run, "a")
    nothing = message(run, "a", epoch, 0, [])
    end = message(run, "a", epoch, 0, [], finish_reason=STOP)
    for append, is_refused in ((nothing, True), (end, False)):
        request = pb.AppendTokensRequest(appends=[append])
        (result,) = (await appends(run).append(request)).results
        assert result.HasField("error") is is_refused


async def test_appends_after_a_failed_one_of_their_turn_fail(run: Run) -> None:
    """It would leave a gap, which fails the rollout; validation or the store rejects both."""
    (epoch,) = await opened(run, "a")
    unsound, late = message(run, "a", epoch, -1, [1]), message(run, "a", epoch + 1, 0, [1])
    for bad in (unsound, late):
        request = pb.AppendTokensRequest(appends=[bad, message(run, "a", epoch, 1, [2])])
        results = (await appends(run).append(request)).results
        assert all(result.HasField("error") for result in results)
    rollout = await run.store.tokens.rollout(run.run_id, "a")
    assert rollout is not None
    assert rollout.state is RolloutState.RUNNING


async def test_sent_separately_they_leave_a_gap(run: Run) -> None:
    """Negative control: the same two appends, sent one after the other, fail the rollout."""
    (epoch,) = await opened(run, "a")
    tokens = message(run, "a", epoch, 0, [1])
    assert tokens.tokens.token_ids
    made = [
        token_append(run.run_id, "a", "t", given, offset)
        for given, offset in ((epoch + 1, 0), (epoch, 1))
    ]
    for append in made:
        await run.rollouts.append([append])
    rollout = await run.store.tokens.rollout(run.run_id, "a")
    assert rollout is not None
    assert rollout.state is RolloutState.FAILED


class Slow(Rollouts):
    """A store that answers when allowed."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self.may_answer = asyncio.Event()

    async def append(self, appends: Sequence[pb.TokenAppend]) -> list[Appended | ServiceError]:
        """Do them once that is allowed."""
        await self.may_answer.wait()
        return await self._rollouts.append(appends)


async def test_bytes_in_flight_to_a_slow_store_are_bounded(run: Run) -> None:
    """More gets RESOURCE_EXHAUSTED with a retry time, and nothing accepted is lost."""
    epochs = await opened(run, "a", "b")
    slow = Slow(run.rollouts)
    bounded = AppendTokensHandler(slow, store_budget(200), 1000)
    requests = [
        pb.AppendTokensRequest(appends=[message(run, name, epoch, 0, [1] * 20)])
        for name, epoch in zip(("a", "b"), epochs, strict=True)
    ]
    first = asyncio.ensure_future(bounded.append(requests[0]))
    await asyncio.sleep(0)
    with pytest.raises(ServiceError) as caught:
        await bounded.append(requests[1])
    assert caught.value.reason is Reason.STORE_FULL
    assert caught.value.retry_after
    slow.may_answer.set()
    assert (await first).results[0].appended.num_tokens == 20
    assert (await bounded.append(requests[1])).results[0].appended.num_tokens == 20


async def test_a_message_without_room_ends_no_rollout(run: Run) -> None:
    """It was not done at all; with room it is."""
    (epoch, _) = await opened(run, "a", "b")
    inflight = store_budget(8)
    servicer = AppendTokensHandler(run.rollouts, inflight, 1000)
    finish = pb.RolloutFinish(
        run_id=run.run_id,
        rollout_id="b",
        credential_digest=CREDENTIAL,
        rewards=rewards(),
    )
    appended = message(run, "a", epoch, 0, [1])
    request = pb.AppendTokensRequest(appends=[appended], finishes=[finish])
    with inflight.reserve(8), pytest.raises(ServiceError):
        await servicer.append(request)
    states = [(await run.store.tokens.read(run.run_id, ["b"]))[0]]
    await servicer.append(request)
    states += await run.store.tokens.read(run.run_id, ["b"])
    assert [found and found[0].state for found in states] == [
        RolloutState.RUNNING,
        RolloutState.FINISHED,
    ]


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "wrong"),
    [
        (b"\0\0\0", b"\0\0\0", "token_ids"),
        (pack_ids([1, 2]), pack_logprobs([0.0]), "logprobs"),
        (pack_ids([1, -2]), pack_logprobs([0.0, 0.0]), "token_ids"),
        (pack_ids([1, 2]), pack_logprobs([0.0, float("nan")]), "logprobs"),
        (pack_ids([1, 2]), pack_logprobs([float("-inf"), 0.0]), "logprobs"),
        (pack_ids([1, 2]), pack_logprobs([-80.01, 0.0]), "logprobs"),
        (pack_ids([1, 2]), pack_logprobs([0.02, 0.0]), "logprobs"),
        (pack_ids([1]), pack_logprobs([0.0]), "spans"),
    ],
)
async def test_bad_arrays_are_named(
    run: Run, token_ids: bytes, logprobs: bytes, wrong: str
) -> None:
    """Sizes, signs, finite numbers and spans are checked before anything is stored."""
    (epoch,) = await opened(run, "a")
    append = message(run, "a", epoch, 0, [1, 2])
    append.tokens.token_ids, append.tokens.logprobs = token_ids, logprobs
    (result,) = (await appends(run).append(pb.AppendTokensRequest(appends=[append]))).results
    assert f"tokens.{wrong}" in result.error.message


@pytest.mark.parametrize("value", [-80.0, -32.5, -1e-30, 1e-30, 0.01 - 1e-9])
async def test_log_probs_at_the_bounds_are_kept(run: Run, value: float) -> None:
    """The quick check of their highest bytes does not reject what is possible."""
    (epoch,) = await opened(run, "a")
    append = message(run, "a", epoch, 0, [1, 2])
    append.tokens.logprobs = pack_logprobs([value, 0.0])
    (result,) = (await appends(run).append(pb.AppendTokensRequest(appends=[append]))).results
    assert result.appended.num_tokens == 2
