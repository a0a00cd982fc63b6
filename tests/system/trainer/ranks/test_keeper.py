"""A rank is kept alive by its parent, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.lib.trainer.support import ROOT

KEPT = """
import os, signal, sys, time
from trainer.ranks.lives import keep_rank

def work(life):
    if sys.argv[1] == "waits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(life, os.getpid(), flush=True)
    if sys.argv[1] in ("waits", "is signalled at once"):
        time.sleep(60)
    if sys.argv[1] == "fails":
        raise SystemExit(78)
    if life < 3:
        os.kill(os.getpid(), signal.SIGKILL)

def fork(real=os.fork):
    child = real()
    if child:
        os.kill(os.getpid(), signal.SIGTERM)
    return child

masks = []
def mask(how, numbers, real=signal.pthread_sigmask):
    masks.append(how)
    if masks.count(signal.SIG_BLOCK) == 2 and how == signal.SIG_BLOCK:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(how, numbers)

if sys.argv[1] == "is signalled at once":
    os.fork = fork
if sys.argv[1] == "is signalled between lives":
    signal.pthread_sigmask = mask
sys.exit(keep_rank(work))
"""


def kept(how: str) -> subprocess.Popen[str]:
    """A keeper whose rank does this."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}"}
    command = [sys.executable, "-c", KEPT, how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_rank_begins_another_life_until_it_ends_by_itself() -> None:
    """Two kills, three lives in three processes."""
    with kept("dies") as process:
        output = process.communicate()[0].split()
    assert output[::2] == ["1", "2", "3"]
    assert len(set(output[1::2])) == 3
    assert process.returncode == 0


def test_a_signal_within_the_fork_is_handed_on() -> None:
    """The rank ends by it, and no other life begins."""
    with kept("is signalled at once") as process:
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_signal_between_two_lives_ends_it() -> None:
    """There is nobody to hand it on to, and no other life begins."""
    with kept("is signalled between lives") as process:
        output = process.communicate(timeout=30)[0].split()
    assert output[::2] == ["1"]
    assert process.returncode > 128


def test_a_rank_that_fails_is_not_replaced() -> None:
    """Its exit code is that of the keeper, for torchrun."""
    with kept("fails") as process:
        output = process.communicate()[0].split()
    assert output[::2] == ["1"]
    assert process.returncode == 78


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_a_rank_ends_with_its_keeper(number: signal.Signals, code: int) -> None:
    """A signal to end is handed on, and no other life begins; a kill takes the rank with it."""
    with kept("waits") as process:
        assert process.stdout is not None
        rank = psutil.Process(int(process.stdout.readline().split()[1]))
        process.send_signal(number)
        assert process.wait() == code
        psutil.wait_procs([rank], timeout=20)
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
