"""`make bench-stop-strings`: a gateway's CPU time for a long answer, with and without stop strings.

One set of services, real but for the engine, which is the fake one. Round by round an answer of
`TOKENS` tokens is sampled with three stop strings that never occur, and one without any, in random
order; compared is the CPU time of the gateway's process.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from rich.progress import track
from seamflow import Client
from seamflow.channel import connect
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.trajectory.v1 import trajectory_pb2

from bench.baselines.store.seamflow_run import RUN_ID, create_run
from bench.baselines.store.workload import Options
from bench.harness.byte_model import make_byte_model
from bench.harness.processes import Server, environment, python, scratch
from bench.harness.redis_process import FAST, free_port, redis_server
from bench.report import Report, ratios

TOKENS = 32_768
ROUNDS = 7
STOPS = ("\nObservation:", "</answer>", "STOP STOP STOP")


@dataclass(slots=True)
class Gateway:
    """A gateway process and a client of it."""

    process: psutil.Process
    client: Client
    count: int = 0
    chunks: int = 0
    """Of the newest answer."""

    async def answer(self, stops: Sequence[str]) -> float:
        """CPU seconds of the gateway for one answer."""
        self.count += 1
        before = self._cpu()
        rollout = await self.client.start_rollout(f"rollout-{self.count}")
        sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, stop=stops)
        stream = rollout.stream(token_ids=[1, 2, 3, 4], sampling=sampling)
        self.chunks = len([chunk async for chunk in stream])
        assert len(stream.turn.token_ids) == TOKENS, "no stop string ends it"
        await rollout.finish(1.0)
        return self._cpu() - before

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def main() -> None:
    """Run it and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    asyncio.run(_measured(given.seed, given.rounds)).publish()


async def _measured(seed: int, rounds: int) -> Report:
    sides = {"with": STOPS, "without": ()}
    random, seconds = Random(seed), {name: list[float]() for name in sides}
    with scratch() as folder:
        async with _gateway(Path(folder)) as gateway:
            await gateway.answer(STOPS)  # warm
            for _ in track(range(rounds), "rounds"):
                for name in random.sample(sorted(sides), len(sides)):
                    seconds[name].append(await gateway.answer(sides[name]))
    figures = {
        **ratios("with_vs_without", seconds["with"], seconds["without"]),
        "with_cpu_seconds": sorted(seconds["with"])[rounds // 2],
        "tokens": TOKENS,
        "chunks": gateway.chunks,
        "rounds": rounds,
    }
    return Report(bench="stop_strings", figures=figures, raw=seconds, seeds=[seed])


@asynccontextmanager
async def _gateway(folder: Path) -> AsyncIterator[Gateway]:
    model = make_byte_model(folder / "model")
    with ExitStack() as stack:

        def start(table: str, module: str, **settings: object) -> Server:
            port = free_port()
            given = {"port": port, "admin_port": -1, "log_level": "warning", **settings}
            names = {f"SEAMFLOW_{table}_{key}".upper(): str(v) for key, v in given.items()}
            return stack.enter_context(
                Server(table, python(module), folder, environment(names), port)
            )

        redis = stack.enter_context(redis_server(FAST))
        manager = start(
            "trajectory_manager", "trajectory_manager", redis_url=redis, durability="fast"
        )
        engine = {
            "engine": "fake",
            "fake_mean_tokens": 0,
            "fake_vocab_size": 256,
            "max_context": 2 * TOKENS,
        }
        server = start("rollout_server", "rollout.server", run_id=RUN_ID, **engine)
        places = {"trajectory_manager": manager.address, "servers": server.address}
        gateway = start("rollout_gateway", "rollout.gateway", run_id=RUN_ID, model=model, **places)
        async with connect(manager.address) as channel:
            options = Options(seed=0, trajectories=1, writers=1, batch=1, redis=redis)
            await create_run(channel, options, trajectory_pb2.DURABILITY_FAST)
        async with Client(gateway.address, run_id=RUN_ID) as client:
            yield Gateway(psutil.Process(gateway.pid), client)


if __name__ == "__main__":
    main()
