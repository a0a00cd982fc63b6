"""Scores the transcripts of ended episodes with a reward server, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from seamflow.environment import EnvironmentClient, Transcript
from seamflow.errors import InvalidRequestError, SeamflowError

_MAX_BATCH = 32
_BATCH_SECONDS = 0.05
_Waiting = tuple[Transcript, asyncio.Future[dict[str, float]]]


class RewardCollector:
    """Transcripts that come within 50 ms, at most 32, are one call."""

    def __init__(self, client: EnvironmentClient) -> None:
        """`client` calls the reward server; it is waited for while it is unavailable."""
        self._client = client
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, transcript: Transcript) -> dict[str, float]:
        """Rewards by name; waits for as long as the server is unavailable.

        Raises:
            SeamflowError: this transcript cannot be scored; others of its batch may be.
        """
        rewards: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        self._waiting.append((transcript, rewards))
        if len(self._waiting) >= _MAX_BATCH:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_BATCH_SECONDS, self._send)
        return await rewards

    def _send(self) -> None:
        """Call the server with all that wait."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        # Whose episode has ended in the meantime waits no more.
        batch = [each for each in self._waiting if not each[1].done()]
        self._waiting = []
        if batch:
            call = asyncio.create_task(self._score(batch))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            for _, rewards in batch:
                rewards.add_done_callback(lambda _: _cancel_if_unwanted(call, batch))

    async def _score(self, batch: Sequence[_Waiting]) -> None:
        try:
            found = await self._client.score([each for each, _ in batch], timeout=None)
        except InvalidRequestError as error:
            await self._one_by_one(batch, error)
            return
        except Exception as error:
            for _, rewards in batch:
                _settle(rewards, error)
            return
        if len(found) != len(batch):
            found = [_broken_contract(len(batch), len(found))] * len(batch)
        for (_, rewards), result in zip(batch, found, strict=True):
            _settle(rewards, result)

    async def _one_by_one(self, batch: Sequence[_Waiting], error: InvalidRequestError) -> None:
        """A transcript that the server does not accept must not fail the others."""
        if len(batch) == 1:
            _settle(batch[0][1], error)
            return
        for each in batch:
            await self._score([each])


def _cancel_if_unwanted(call: asyncio.Task[None], batch: Sequence[_Waiting]) -> None:
    if all(rewards.done() for _, rewards in batch):
        call.cancel()


def _settle(
    rewards: asyncio.Future[dict[str, float]], result: dict[str, float] | Exception
) -> None:
    if rewards.done():
        return
    if isinstance(result, Exception):
        rewards.set_exception(result)
    else:
        rewards.set_result(result)


def _broken_contract(given: int, returned: int) -> SeamflowError:
    return SeamflowError(
        f"the reward server returned {returned} results for {given} transcripts: it must return "
        "one for each, in order"
    )
