"""A real Slurm of three nodes on this machine, each in namespaces of its own for network and name.

All namespaces are anonymous and end with their processes, so that nothing is left, however the
suite ends: `own_network` moves the suite itself into one, with the bridge between the nodes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = ("n1", "n2", "n3")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv")
_INSIDE = "SEAMFLOW_SLURM_SUITE_INSIDE"
_WAIT_SECONDS = 180.0
_CONF = """
ClusterName=seamflow
SlurmctldHost=controller(10.77.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=bf_interval=2,sched_interval=2
KillWait=10
JobRequeue=1
"""


def missing_programs() -> list[str]:
    """What the suite needs and this machine lacks."""
    return [name for name in _PROGRAMS if shutil.which(name) is None]


def own_network() -> None:
    """Start this program again in namespaces of its own, unless it is there."""
    if os.environ.get(_INSIDE):
        return
    module = (sys.executable, "-m", "tests.suites.slurm")
    command = ["unshare", "--net", "--mount", *module, *sys.argv[1:]]
    os.execvpe("unshare", command, {**os.environ, _INSIDE: "1"})


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Slurm with all nodes idle; `slurm` calls it. Its files are in `folder`."""
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    _write_files(folder)
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "bridge", "type", "bridge")
    _ip("addr", "add", "10.77.0.1/24", "dev", "bridge")
    _ip("link", "set", "bridge", "up")
    started = [_munge(folder), _daemon(folder, "controller", f"slurmctld -D -f {_conf(folder)}")]
    try:
        for number, name in enumerate(NODES, 1):
            started.append(_node(folder, number, name))
        wait_for("idle nodes", lambda: slurm("sinfo", "-h", "-t", "idle", "-o", "%D") == "3")
        yield
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def slurm(*command: str) -> str:
    """What a command of Slurm prints; "" if it fails, as while the controller starts."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""


def wait_for(what: str, holds: Callable[[], bool], seconds: float = _WAIT_SECONDS) -> None:
    """Return once it holds; raises `TimeoutError`."""
    limit = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > limit:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.3)


def _conf(folder: Path) -> Path:
    return folder / "slurm.conf"


def _write_files(folder: Path) -> None:
    (folder / "state").mkdir()
    nodes = [f"NodeName={name} NodeAddr=10.77.0.{10 + i} CPUs=2" for i, name in enumerate(NODES, 1)]
    partition = f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP"
    _conf(folder).write_text("\n".join([_CONF.format(folder=folder), *nodes, partition, ""]))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    lines = [f"10.77.0.{10 + i} {name}" for i, name in enumerate(NODES, 1)]
    (folder / "hosts").write_text(
        "\n".join(["127.0.0.1 localhost", "10.77.0.1 controller", *lines])
    )


def _munge(folder: Path) -> subprocess.Popen[bytes]:
    """The daemon that authenticates; it wants folders that no other user may write."""
    own = folder / "munge"
    own.mkdir(mode=0o755)
    (own / "key").write_bytes(secrets.token_bytes(128))
    (own / "key").chmod(0o400)
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    names["seed-file"] = "seed"
    flags = [f"--{flag}={own / name}" for flag, name in names.items()]
    with (folder / "munge.log").open("ab") as log:
        command = ["munged", "--foreground", "--force", *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    wait_for("munge", (own / "socket").exists)
    return process


def _daemon(folder: Path, name: str, command: str, *flags: str) -> subprocess.Popen[bytes]:
    """A daemon on a host of this name, which knows the others by theirs."""
    text = (
        f"hostname {name} && mount --bind {folder}/hosts /etc/hosts && "
        f"until [ -e {folder}/{name}.up ]; do sleep 0.05; done; exec {command}"
    )
    if not flags:
        (folder / f"{name}.up").touch()
    with (folder / f"{name}.log").open("ab") as log:
        isolated = ["unshare", "--uts", "--mount", *flags, "sh", "-c", text]
        return subprocess.Popen(isolated, stdout=log, stderr=log)


def _node(folder: Path, number: int, name: str) -> subprocess.Popen[bytes]:
    (folder / f"spool-{name}").mkdir()
    process = _daemon(folder, name, f"slurmd -D -N {name} -f {_conf(folder)}", "--net")
    wait_for("a network", lambda: _network(process.pid) != _network(os.getpid()))
    link = f"node{number}"
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
    _ip("link", "set", link, "master", "bridge", "up")
    inside = ("nsenter", f"--net=/proc/{process.pid}/ns/net")
    for command in ("addr add 10.77.0.{}/24 dev eth0", "link set eth0 up", "link set lo up"):
        arguments = command.format(10 + number).split()
        subprocess.run([*inside, "ip", *arguments], check=True)
    (folder / f"{name}.up").touch()
    return process


def _network(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
