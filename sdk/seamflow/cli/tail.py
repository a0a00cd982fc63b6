"""Follow a rollout: its turns as they grow, with every change of weights marked."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from seamflow.cli.parser import Verbs
from seamflow.common.v1 import tokens_pb2
from seamflow.enum_names import enum_name
from seamflow.errors import UnavailableError, decode
from seamflow.inspect.endpoints import Endpoints, decoder_of, manager_of_run
from seamflow.inspect.run_folders import recorded_rollouts, recorded_turns
from seamflow.pages import pages
from seamflow.retry import Backoff
from seamflow.stubs import async_stub
from seamflow.token_text import Decode, token_numbers
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

_NEWEST = 20
_SECONDS = 10.0


def register(verbs: Verbs) -> None:
    watch = verbs.add("tail", "Follow the turns of a rollout as they grow.", _tail)
    watch.add_argument("rollout", nargs="?", help="its id; none: list those of the run")
    watch.add_argument("--model", type=Path, help="folder whose tokenizer turns ids into text")


async def _tail(given: argparse.Namespace, endpoints: Endpoints) -> int:
    if given.rollout is None:
        return await _rollouts(endpoints)
    no_model = given.model is None and endpoints.model is None
    decoder = token_numbers if no_model else decoder_of(given.model, endpoints)
    if endpoints.ended and endpoints.folder:
        print("".join(recorded_turns(endpoints.folder, given.rollout, decoder, endpoints.ended)))
        return 0
    async with manager_of_run(endpoints) as (channel, run_id):
        async for text in tail(channel, run_id, given.rollout, decoder):
            print(text, end="", flush=True)
    return 0


async def _rollouts(endpoints: Endpoints) -> int:
    """Print the names that `seamflow tail` takes."""
    if endpoints.ended and endpoints.folder:
        print("\n".join(recorded_rollouts(endpoints.folder, endpoints.ended)))
        return 0
    async with manager_of_run(endpoints) as (channel, run_id):
        async for text in newest_rollouts(channel, run_id):
            print(text)
    return 0


async def newest_rollouts(channel: grpc.aio.Channel, run_id: str) -> AsyncIterator[str]:
    """A line for each of the newest rollouts, the running ones last: name, state, purpose.

    Raises:
        grpc.aio.AioRpcError: the trajectory manager rejects the request, or does not answer.
    """
    stub = async_stub(TrajectoryServiceStub, channel)
    request = pb.ListTrajectoriesRequest(run_id=run_id, page_size=1000, headers_only=True)
    found: deque[trajectory_pb2.Trajectory] = deque(maxlen=_NEWEST)
    running: deque[trajectory_pb2.Trajectory] = deque(maxlen=_NEWEST)
    async for page in pages(lambda page: stub.ListTrajectories(page, timeout=_SECONDS), request):
        for each in page.trajectories:
            is_running = each.state == trajectory_pb2.ROLLOUT_STATE_RUNNING
            (running if is_running else found).append(each)
    for each in (*found, *running):
        state = enum_name(trajectory_pb2.RolloutState, each.state).lower()
        yield f"{each.rollout_id}  {state}, {enum_name(tokens_pb2.Purpose, each.purpose).lower()}"
    yield "follow one with `seamflow tail ID`" if found or running else "no rollouts yet"


async def tail(
    channel: grpc.aio.Channel, run_id: str, rollout_id: str, decoder: Decode
) -> AsyncIterator[str]:
    """Text to write as the rollout grows, until it closes; reconnects a lost stream."""
    stub = async_stub(TrajectoryServiceStub, channel)
    request = pb.WatchTrajectoryRequest(run_id=run_id, rollout_id=rollout_id)
    printer, backoff, attempts = TailPrinter(decoder), Backoff(), 0
    while not printer.closed:
        try:
            async for response in stub.WatchTrajectory(request):
                attempts = 0
                backoff.reset()
                yield printer.update(response.trajectory)
        except grpc.aio.AioRpcError as failure:
            error = decode(failure)
            attempts += 1
            if not isinstance(error, UnavailableError) or attempts > 5:
                raise error from failure
        if not printer.closed:
            await backoff.wait()


@dataclass(slots=True)
class _Shown:
    """How much of a turn has been written."""

    num_tokens: int = 0
    source: str | None = None
    """Origin of the last written token."""
    pending: list[int] = field(default_factory=list)
    """Ids whose text is not complete yet."""
    finished: bool = False


class TailPrinter:
    """Renders what each snapshot of a trajectory adds to the one before."""

    def __init__(self, decoder: Decode) -> None:
        self.closed = False
        self._decode = decoder
        self._turns: dict[str, _Shown] = {}
        self._current: str | None = None

    def update(self, trajectory: trajectory_pb2.Trajectory) -> str:
        """Text to write for this snapshot."""
        parts = [text for turn in trajectory.turns for text in self._turn(turn)]
        if trajectory.state != trajectory_pb2.ROLLOUT_STATE_RUNNING:
            self.closed = True
            parts.append(_closing(trajectory))
        return "".join(parts)

    def _turn(self, turn: trajectory_pb2.Turn) -> Iterator[str]:
        shown = self._turns.setdefault(turn.turn_id, _Shown())
        is_grown = len(turn.tokens.token_ids) > shown.num_tokens
        is_ended = turn.finish_reason != 0 and not shown.finished
        if not (is_grown or is_ended):
            return
        if self._current != turn.turn_id:
            self._current = turn.turn_id
            after = f" after {turn.prefix_turn_id}" if turn.prefix_turn_id else ""
            yield f"\n── turn {turn.turn_id}{after}, {turn.prefix_length} tokens shared\n"
        for span in turn.tokens.spans:
            yield from self._span(turn.tokens.token_ids, span, shown)
        if is_ended:
            shown.finished = True
            reason = tokens_pb2.FinishReason.Name(turn.finish_reason)
            yield self._flush(shown)
            yield f"\n── {reason.removeprefix('FINISH_REASON_').lower()}\n"

    def _span(
        self, token_ids: Sequence[int], span: tokens_pb2.Span, shown: _Shown
    ) -> Iterator[str]:
        end = span.start + span.num_tokens
        if end <= shown.num_tokens:
            return
        source = _source(span)
        if shown.source != source:
            yield self._flush(shown)
            yield f"\n[{source}] " if shown.source is None else f"\n[{shown.source} → {source}] "
            shown.source = source
        shown.pending += token_ids[shown.num_tokens : end]
        shown.num_tokens = end
        text = self._decode(shown.pending)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else: half a character
            shown.pending = []
            yield text

    def _flush(self, shown: _Shown) -> str:
        text = self._decode(shown.pending) if shown.pending else ""
        shown.pending = []
        return text


def _source(span: tokens_pb2.Span) -> str:
    if span.origin != tokens_pb2.ORIGIN_POLICY:
        return "environment"
    return f"v{span.weight_version} {span.server_id}".rstrip()


def _closing(trajectory: trajectory_pb2.Trajectory) -> str:
    if trajectory.state == trajectory_pb2.ROLLOUT_STATE_FAILED:
        name = tokens_pb2.FailureClass.Name(trajectory.failure.failure_class)
        return (
            f"\nfailed, {name.removeprefix('FAILURE_CLASS_').lower()}: "
            f"{trajectory.failure.message}\n"
        )
    rewards = ", ".join(f"{reward.name} {reward.value:g}" for reward in trajectory.rewards.rewards)
    return f"\nfinished: {rewards or 'no reward'}\n"
