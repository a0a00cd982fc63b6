"""`make bench-weights`: weights on their way from the weights service into rollout servers.

`stream_vs_raw_socket`: the shard stream beside a plain socket copy of the same files, in turns. Two
processes each: a sender, and a receiver that ends with the files on its disk (page cache). Ours
checks every chunk and every file on the way, the plain copy nothing.

`publish_rpc_vs_shared_folder`: a trainer's publish of twice as much, through the weights service's
folder beside an upload, in turns; both end durable on the disk of the service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from rich.progress import track

from bench.harness.redis_process import FAST, redis_server
from bench.report import Report, ratio
from bench.rollout.weights_parts import (
    publish,
    receive_shards,
    relayed_share,
    update_stalls,
)
from bench.rollout.weights_publish import publish_seconds
from services.chassis import log
from services.chassis.config.settings import ServerConfig

MIB = 1 << 20
NUM_FILES = 4
BUFFER_BYTES = MIB
START_SECONDS = 60
PACKAGES = ("seamflow", "grpcio", "protobuf", "torch", "numpy", "xxhash", "zstandard")


def main() -> None:
    """Measure and report, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.rollout.weights")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--receive", choices=sorted(_RECEIVERS), help="(a process of ours)")
    parser.add_argument("--send", type=Path, help="(a process of ours)")
    parser.add_argument("--port", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.send:
        _send_plain(given.send)
    elif given.receive:
        print(json.dumps(_RECEIVERS[given.receive](given.port, given.folder)), flush=True)
    else:
        _measure(given.rounds, given.mebibytes)


def _measure(rounds: int, mebibytes: int) -> None:
    log.configure(ServerConfig(log_level="error"), "bench")
    with tempfile.TemporaryDirectory(prefix="seamflow-bench-") as made:
        folder = Path(made)
        ours, theirs = _copies(folder, rounds, mebibytes)
        with _weights_service(folder / "publish") as port:
            measured = publish_seconds(port, folder / "trainer", rounds, 2 * mebibytes)
            shared, uploaded = asyncio.run(measured)
        relayed = asyncio.run(relayed_share(folder / "relay"))
        with_prepare, without = asyncio.run(update_stalls(folder / "stall"))
    gibibytes = mebibytes / 1024
    Report(
        bench="weights",
        figures={
            "stream_vs_raw_socket": ratio(theirs, ours),
            "stream_gib_per_second": gibibytes / median(ours),
            "raw_socket_gib_per_second": gibibytes / median(theirs),
            "publish_rpc_vs_shared_folder": ratio(shared, uploaded),
            "publish_seconds_shared_folder": median(shared),
            "publish_seconds_rpc": median(uploaded),
            "relay_sent_by_service_4_servers": relayed,
            "update_stall_ms_prepared": median(with_prepare) * 1e3,
            "update_stall_ms_unprepared": median(without) * 1e3,
            "update_stall_prepared_vs_not": ratio(with_prepare, without),
        },
        raw={
            "stream_seconds": ours,
            "raw_socket_seconds": theirs,
            "publish_seconds_shared_folder": shared,
            "publish_seconds_rpc": uploaded,
            "update_stall_seconds_prepared": with_prepare,
            "update_stall_seconds_unprepared": without,
        },
        packages=PACKAGES,
    ).publish()


def _copies(folder: Path, rounds: int, mebibytes: int) -> tuple[list[float], list[float]]:
    """Seconds of each copy of the same files: ours, plain."""
    source = folder / "source"
    source.mkdir()
    for number in range(NUM_FILES):
        with (source / f"model-{number}.safetensors").open("wb") as file:
            for _ in range(mebibytes // NUM_FILES // 8):
                file.write(secrets.token_bytes(8 * MIB))
    ours: list[float] = []
    theirs: list[float] = []
    with _weights_service(folder / "published") as port, _plain_sender(source) as plain_port:
        asyncio.run(publish(port, source))
        for _ in track(range(rounds), description="shard stream, plain socket"):
            ours.append(_received("stream", port, folder / "to"))
            theirs.append(_received("plain", plain_port, folder / "to"))
    return ours, theirs


def _received(kind: str, port: int, folder: Path) -> float:
    command = [sys.executable, "-m", "bench.rollout.weights", "--receive", kind]
    command += ["--port", str(port), "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def _weights_service(folder: Path) -> Iterator[int]:
    folder.mkdir(parents=True)
    port_file = folder / "port.json"
    command = [sys.executable, "-m", "services.weights", "--port", "0", "--admin-port", "-1"]
    command += ["--folder", str(folder / "weights"), "--log-level", "warning"]
    environment = {**os.environ, "SEAMFLOW_PORT_FILE": str(port_file)}
    with ExitStack() as stack:
        environment["SEAMFLOW_WEIGHTS_REDIS_URL"] = stack.enter_context(redis_server(FAST))
        process = subprocess.Popen(command, env=environment)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        if not port_file.exists():
            raise RuntimeError(f"the weights service did not start: its code is {process.poll()}")
        yield int(json.loads(port_file.read_text())["port"])


@contextmanager
def _plain_sender(source: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "bench.rollout.weights", "--send", str(source)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def _send_plain(source: Path) -> None:
    """Send every file to whoever connects, each behind its length, by the kernel's `sendfile`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                for path in _files(source):
                    connection.sendall(path.stat().st_size.to_bytes(8, "little"))
                    with path.open("rb") as file:
                        connection.sendfile(file)


def _receive_plain(port: int, folder: Path) -> float:
    folder.mkdir(exist_ok=True)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        started = time.perf_counter()
        connection.sendall(b"x")
        for number in range(NUM_FILES):
            remaining = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            with (folder / f"plain-{number}").open("wb", buffering=0) as file:
                while remaining:
                    size = connection.recv_into(buffer[:remaining])
                    file.write(buffer[:size])
                    remaining -= size
        seconds = time.perf_counter() - started
    _clear(folder)
    return seconds


def _receive_stream(port: int, folder: Path) -> float:
    folder.mkdir(exist_ok=True)
    seconds = asyncio.run(receive_shards(port, folder))
    _clear(folder)
    return seconds


def _files(folder: Path) -> Sequence[Path]:
    return sorted(folder.iterdir())


def _clear(folder: Path) -> None:
    for path in _files(folder):
        path.unlink()


_RECEIVERS = {"stream": _receive_stream, "plain": _receive_plain}

if __name__ == "__main__":
    main()
