"""`make bench-rollout`, its first part: seamflow in front of SGLang beside SGLang by itself.

One SGLang server answers both sides in turn: ours, raw, ours, raw. Load generator, SGLang and all
of seamflow share this machine's cores. Both sides sample the same numbers of tokens after prompts
that no other turn has, and stream them at the same interval. What is compared is neighbouring
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Protocol

import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.baselines.environments import installed
from bench.baselines.generation.sglang_models import SHAPES, make_model
from bench.baselines.generation.sglang_raw import RawSGLang, TurnOf
from bench.baselines.generation.sglang_seamflow import Seamflow, seamflow_before
from bench.baselines.generation.sglang_server import PYTHON, sglang_server
from bench.harness.processes import scratch
from bench.report import Report, percentile, ratio

CONCURRENCIES = (16, 32)
ROUNDS = 5
PROMPT_TOKENS = 32
VOCABULARY = 40
TURN_TOKENS = {"75m": 48, "0.4m": 128}
TURNS_EACH = {"75m": 1, "0.4m": 2}
FIRST_TOKENS = 100
UPDATES = 10
STREAMS = 8
STREAM_TOKENS = 512
SUFFIXES = {"75m": "", "0.4m": "_small"}


class Side(Protocol):
    """Who samples turns."""

    def agent(self) -> AbstractAsyncContextManager[TurnOf]:
        """Begin and end what an agent needs for its turns."""
        ...


@dataclass(slots=True)
class Found:
    """Figures, and the samples behind them."""

    figures: dict[str, float] = field(default_factory=dict)
    raw: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Both sides in front of one SGLang, and the load they are given."""

    seamflow: Seamflow
    raw: RawSGLang
    random: Random
    progress: Progress
    found: Found

    async def throughput(self, shape: str, concurrency: int) -> None:
        """Tokens per second with so many turns at a time, ours over raw."""
        name = f"throughput_vs_raw_sglang{SUFFIXES[shape]}_{concurrency}"
        ours: list[float] = []
        theirs: list[float] = []
        await self._load(self.seamflow, shape, concurrency)
        await self._load(self.raw, shape, concurrency)
        for _ in self.progress.track(range(ROUNDS), description=name):
            ours.append(await self._load(self.seamflow, shape, concurrency))
            theirs.append(await self._load(self.raw, shape, concurrency))
        self.found.figures[name] = ratio(ours, theirs)
        self.found.raw |= {f"{name}_ours": ours, f"{name}_raw": theirs}

    async def first_tokens(self) -> None:
        """How much later the first token of a turn comes than from SGLang by itself."""
        ours: list[float] = []
        theirs: list[float] = []
        bar = self.progress.track(range(FIRST_TOKENS), description="added_ttft_p50_ms")
        for _ in bar:
            ours.append(await self._first_token(self.seamflow))
            theirs.append(await self._first_token(self.raw))
        self.found.figures["added_ttft_p50_ms"] = 1e3 * (median(ours) - median(theirs))
        self.found.raw |= {"ttft_ours_s": ours, "ttft_raw_s": theirs}

    async def stalls(self, model: Path) -> None:
        """How long agents' streams stand still across an update, beside what SGLang itself needs.

        A stall is the silence between two versions in a stream, less the usual one of that stream:
        with several tokens in a message a stream is silent between any two, update or not. An
        update may cut such an interval short, so this is the time that the agent loses to it; the
        whole silences, which are an upper bound, are among the samples.
        """
        silences: list[tuple[float, float]] = []
        theirs: list[float] = []
        bar = self.progress.track(range(UPDATES), description="extra_stall_p99_ms")
        for _ in bar:
            silences += await self._silences(self.seamflow, self.seamflow.publish)
            # Under the label that is loaded: seamflow takes no token of weights it does not know.
            label = str(self.seamflow.version)
            began = time.perf_counter()
            await self.raw.update_weights(model, label)
            theirs.append(time.perf_counter() - began)
        ours = [silence - usual for silence, usual in silences]
        if len(ours) < UPDATES:
            raise RuntimeError(f"only {len(ours)} streams met {UPDATES} updates: too short")
        extra = percentile(ours, 0.99) - median(theirs)
        whole = [silence for silence, _ in silences]
        self.found.figures["extra_stall_p99_ms"] = 1e3 * extra
        self.found.figures["extra_silence_p99_ms"] = 1e3 * (
            percentile(whole, 0.99) - median(theirs)
        )
        self.found.raw |= {"stall_s": ours, "silence_s": whole, "raw_update_s": theirs}

    async def _load(self, side: Side, shape: str, concurrency: int) -> float:
        """Tokens per second of agents that ask for one turn after the other."""
        count = 0

        def on_tokens(num_tokens: int, version: object) -> None:
            nonlocal count
            count += num_tokens

        async def agent() -> None:
            async with side.agent() as turn:
                for _ in range(TURNS_EACH[shape]):
                    await turn(self._prompt(), TURN_TOKENS[shape], on_tokens)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as agents:
            for _ in range(concurrency):
                agents.create_task(agent())
        expected = concurrency * TURNS_EACH[shape] * TURN_TOKENS[shape]
        if count != expected:
            raise RuntimeError(f"{type(side).__name__} gave {count} tokens instead of {expected}")
        return count / (time.perf_counter() - began)

    async def _first_token(self, side: Side) -> float:
        came: list[float] = []
        async with side.agent() as turn:
            began = time.perf_counter()
            await turn(self._prompt(), 16, lambda *_: came.append(time.perf_counter()))
        return came[0] - began

    async def _silences(
        self, side: Side, update: Callable[[], Awaitable[None]]
    ) -> list[tuple[float, float]]:
        """Of each stream around an update that comes in the middle of all of them."""
        streams: list[list[tuple[float, object]]] = [[] for _ in range(STREAMS)]
        under_way = asyncio.Event()

        async def stream(mine: list[tuple[float, object]]) -> None:
            def on_tokens(num_tokens: int, version: object) -> None:
                mine.append((time.perf_counter(), version))
                if all(len(each) > 2 for each in streams):
                    under_way.set()

            async with side.agent() as turn:
                await turn(self._prompt(), STREAM_TOKENS, on_tokens)

        async with asyncio.TaskGroup() as agents:
            for mine in streams:
                agents.create_task(stream(mine))
            await under_way.wait()
            await update()
        return [silence for mine in streams for silence in _silences_between_versions(mine)]

    def _prompt(self) -> list[int]:
        return [self.random.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)]


def _silences_between_versions(
    arrivals: Sequence[tuple[float, object]],
) -> list[tuple[float, float]]:
    """Silences in which the version changed, each with the median silence of the stream."""
    pairs = list(itertools.pairwise(arrivals))
    usual = median(after - before for (before, _), (after, _) in pairs)
    return [(after - before, usual) for (before, old), (after, new) in pairs if old != new]


def main() -> None:
    """Measure, and write bench/results/rollout.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    shapes = parser.parse_args().shapes
    found = Found()
    with _progress() as progress:
        for shape in shapes:
            uvloop.run(_measure(shape, found, progress))
    packages = ("seamflow", "grpcio", "protobuf", "redis", "aiohttp", "uvloop")
    Report(
        bench="rollout",
        figures=found.figures,
        raw=found.raw,
        seeds=[0],
        packages=packages,
        peers={"sglang": installed(PYTHON, "sglang", "torch", "transformers")},
    ).publish()


async def _measure(shape: str, found: Found, progress: Progress) -> None:
    with scratch() as name:
        folder = Path(name)
        model = make_model(folder / "model", shape)
        with sglang_server(model, folder) as url:
            async with seamflow_before(url, model, folder) as seamflow, RawSGLang(url) as raw:
                bench = Bench(
                    seamflow=seamflow, raw=raw, random=Random(0), progress=progress, found=found
                )
                for concurrency in CONCURRENCIES:
                    await bench.throughput(shape, concurrency)
                if shape == "0.4m":
                    await bench.first_tokens()
                    await bench.stalls(model)


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        yield progress


if __name__ == "__main__":
    main()
