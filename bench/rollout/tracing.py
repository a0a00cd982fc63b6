"""`make bench-tracing`: what tracing costs, switched off and on.

Three sets of services run side by side, and take turns: without the tracing's code, with it
switched off, and exporting every span. Compared is the CPU time of gateway, trajectory manager and
rollout server per agent's turn, as the machine's other load does not change it much. Agents,
services and Redis are real, the engine is the fake one. Round by round the order changes.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 15
TURNS = 400
AT_ONCE = 16
TOKENS = 16
SIDES = ("without", "off", "on")


@dataclass(slots=True)
class Side:
    """One set of services."""

    processes: Sequence[psutil.Process]
    client: Client
    count: int = 0

    async def play(self) -> float:
        """CPU seconds of the services per turn, over so many turns."""
        before = self._cpu()
        for _ in range(TURNS // AT_ONCE):
            await asyncio.gather(*(self._turn() for _ in range(AT_ONCE)))
        return (self._cpu() - before) / TURNS

    async def _turn(self) -> None:
        self.count += 1
        rollout = await self.client.start_rollout(f"rollout-{self.count}")
        sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
        await rollout.generate(token_ids=[1, 2, 3, 4], sampling=sampling)
        await rollout.finish(1.0)

    def _cpu(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return sum(each.user + each.system for each in times)


def main() -> None:
    """Run it and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    asyncio.run(_measured(given.seed, given.rounds)).publish()


async def _measured(seed: int, rounds: int) -> Report:
    random = Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    with scratch() as folder, _collector() as endpoint:
        model = make_byte_model(Path(folder) / "model")
        async with (
            _side(Path(folder), model, "without", {}) as without,
            _side(Path(folder), model, "off", {}) as off,
            _side(Path(folder), model, "on", {"otlp_endpoint": endpoint}) as on,
        ):
            sides = dict(zip(SIDES, (without, off, on), strict=True))
            for side in sides.values():
                await side.play()  # warm
            for _ in track(range(rounds), "rounds"):
                for name in random.sample(SIDES, len(SIDES)):
                    seconds[name].append(await sides[name].play())
    figures = {
        **ratios("off_vs_without", seconds["off"], seconds["without"]),
        **ratios("on_vs_off", seconds["on"], seconds["off"]),
        "off_cpu_ms_per_turn": 1e3 * sorted(seconds["off"])[rounds // 2],
        "rounds": rounds,
        "turns_per_round": TURNS,
    }
    return Report(bench="tracing", figures=figures, raw=seconds, seeds=[seed])


@asynccontextmanager
async def _side(
    folder: Path, model: Path, name: str, shared: Mapping[str, object]
) -> AsyncIterator[Side]:
    """Its services and a client."""
    with ExitStack() as stack:

        def start(table: str, module: str, **settings: object) -> Server:
            given = {"admin_port": -1, "log_level": "warning", **shared, **settings}
            server = _service(name, table, module, folder, given)
            return stack.enter_context(server)

        redis = stack.enter_context(redis_server(FAST))
        manager = start(
            "trajectory_manager", "trajectory_manager", redis_url=redis, durability="fast"
        )
        engine = {"engine": "fake", "fake_mean_tokens": 0, "fake_vocab_size": 256}
        server = start("rollout_server", "rollout.server", run_id=RUN_ID, **engine)
        gateway = start(
            "rollout_gateway",
            "rollout.gateway",
            run_id=RUN_ID,
            model=model,
            trajectory_manager=manager.address,
            servers=server.address,
        )
        async with connect(manager.address) as channel:
            options = Options(seed=0, trajectories=1, writers=1, batch=1, redis=redis)
            await create_run(channel, options, trajectory_pb2.DURABILITY_FAST)
        processes = [psutil.Process(each.pid) for each in (manager, server, gateway)]
        async with Client(gateway.address, run_id=RUN_ID) as client:
            yield Side(processes, client)


def _service(
    side: str, table: str, module: str, folder: Path, settings: Mapping[str, object]
) -> Server:
    port = free_port()
    given = {"port": port, **settings}
    names = {f"SEAMFLOW_{table}_{key}".upper(): str(value) for key, value in given.items()}
    command = python("bench.rollout.without_tracing", side, module)
    return Server(f"{side}-{table}", command, folder, environment(names), port)


@contextmanager
def _collector() -> Iterator[str]:
    """The address of a collector that drops what it gets."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


if __name__ == "__main__":
    main()
