"""`seamflow train --config tools/console_demo/elevator.toml`, then
`python -m tools.console_demo runs/elevator`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

from services.lib.redis_binary import find_redis_server, socket_folder

_OUT = Path(__file__).parents[2] / "services" / "console" / "demo" / "demo_run.tar.xz"
_FILES = (
    "lives.jsonl",
    "summary.json",
    "metrics.jsonl",
    "evaluation.jsonl",
    "prepared/model/tokenizer.json",
    "logs/rollout_server-node-a.log",
    "logs/rollout_server-node-b.log",
)
"""Beside what is stored; nothing secret, and no weights."""
_SECONDS = 30.0


def main() -> None:
    """Pack the folder of an ended run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    run: Path = parser.parse_args().run
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary) / run.name
        for name in _FILES:
            (packed / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(run / name, packed / name)
            _take_out_folder(run, packed / name)
        _write_addresses(run, packed)
        shutil.copytree(run / "redis", packed / "redis")
        _rewrite(packed / "redis")
        with tarfile.open(_OUT, "w:xz") as archive:
            archive.add(packed, run.name, filter=_anonymous)
    print(f"{_OUT}: {_OUT.stat().st_size >> 10} KiB")


def _write_addresses(run: Path, packed: Path) -> None:
    """Where the services were is of no use; names of folders say where it was made."""
    before = json.loads((run / "addresses.json").read_text(encoding="utf-8"))
    model = Path(before["model"]).relative_to(before["folder"])
    kept = {"run_id": before["run_id"], "agents": before["agents"]}
    kept |= {"folder": f"/{run.name}", "model": f"/{run.name}/{model}"}
    (packed / "addresses.json").write_text(json.dumps(kept, indent=2), encoding="utf-8")
    shutil.copystat(run / "addresses.json", packed / "addresses.json")


def _take_out_folder(run: Path, file: Path) -> None:
    """A file that names where it was made names the run instead."""
    times = file.stat()
    text = file.read_text(encoding="utf-8").replace(str(run.resolve()), f"/{run.name}")
    file.write_text(text, encoding="utf-8")
    os.utime(file, (times.st_atime, times.st_mtime))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _rewrite(folder: Path) -> None:
    """Let Redis write its data anew: a compressed base, without what was overwritten."""
    with socket_folder() as short:
        socket = Path(short, "redis.sock")
        options = {
            "port": "0",
            "unixsocket": str(socket),
            "dir": str(folder),
            "appendonly": "yes",
            "save": "",
            # The archive is compressed better as a whole.
            "rdbcompression": "no",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        server = subprocess.Popen((find_redis_server(), *arguments), stdout=subprocess.DEVNULL)
        try:
            _wait_until_rewritten(socket)
        finally:
            server.terminate()
            server.wait()


def _wait_until_rewritten(socket: Path) -> None:
    from redis import Redis

    with Redis(unix_socket_path=str(socket), decode_responses=True) as redis:
        deadline = time.monotonic() + _SECONDS
        while not socket.exists() or redis.info("persistence")["loading"]:
            assert time.monotonic() < deadline, "Redis does not start"
            time.sleep(0.1)
        redis.bgrewriteaof()
        while redis.info("persistence")["aof_rewrite_in_progress"]:
            assert time.monotonic() < deadline, "Redis does not end its rewrite"
            time.sleep(0.1)


if __name__ == "__main__":
    main()
