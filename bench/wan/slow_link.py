"""A slow link between two network namespaces, emulated in user space; needs root.

Each side is a TUN device. A packet waits until those before it are through at the link's rate, then
half a round trip longer; one that would wait longer than the queue holds is lost. Both ends have
the kernel's own TCP, so that windows and retransmissions are those of a real link.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_OWNER = os.environ.setdefault("SLOW_LINK_OWNER", str(os.getpid()))
"""Process that makes the link; those that it starts inherit it. Several may each have one."""
NAMESPACES = (f"sf-west-{_OWNER}", f"sf-east-{_OWNER}")
"""Of the two sides; their interfaces have these names, too."""
ADDRESSES = ("10.97.0.1", "10.97.0.2")
"""Of the two sides."""
_SET_INTERFACE = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_PACKET_BYTES = 9000
_LONGEST_WAIT = 0.05


@dataclass(slots=True)
class _Direction:
    """Packets on their way to one side."""

    free_at: float = 0.0
    """When the link has sent all that waits."""
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)
    """Time of arrival, and the packet."""
    sent_bytes: int = 0
    """All that the link took."""


class SlowLink:
    """Two namespaces, and the link between them."""

    def __init__(self, *, round_trip_ms: float, megabits: float, queue_ms: float) -> None:
        """Prepare it: bits a second of each direction, and how long a packet may wait for it."""
        self.is_cut = False
        """While set, every packet is lost, those under way included."""
        self.round_trip_ms = round_trip_ms
        """May be changed; counts for packets that are sent from then on."""
        self._rate = megabits * 1e6 / 8
        self._queue = queue_ms / 1000
        self._directions = (_Direction(), _Direction())
        self._ending = threading.Event()

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes sent by each side so far, with the headers of their packets."""
        first, second = self._directions
        return first.sent_bytes, second.sent_bytes

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make the namespaces and carry packets; both are gone afterwards."""
        _forget_killed()
        with ExitStack() as stack:
            devices = [
                self._side(stack, name, address)
                for name, address in zip(NAMESPACES, ADDRESSES, strict=True)
            ]
            carrier = threading.Thread(target=self._carry, args=(devices,), daemon=True)
            carrier.start()
            stack.callback(carrier.join)
            stack.callback(self._ending.set)
            yield

    def _side(self, stack: ExitStack, name: str, address: str) -> int:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, device)
        request = struct.pack("16sH22s", name.encode(), _TUN_WITHOUT_HEADER, b"")
        fcntl.ioctl(device, _SET_INTERFACE, request)
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("link", "set", name, "netns", name)
        inside = ("-n", name)
        _ip(*inside, "addr", "add", f"{address}/24", "dev", name)
        _ip(*inside, "link", "set", name, "mtu", str(_PACKET_BYTES), "up")
        _ip(*inside, "link", "set", "lo", "up")
        return device

    def _carry(self, devices: list[int]) -> None:
        while not self._ending.is_set():
            now = time.monotonic()
            due = [each.packets[0][0] for each in self._directions if each.packets]
            wait = max(0.0, min([*due, now + _LONGEST_WAIT]) - now)
            for device in select.select(devices, [], [], wait)[0]:
                self._take(device, self._directions[devices.index(device)])
            for direction, target in zip(self._directions, reversed(devices), strict=True):
                if self.is_cut:
                    direction.packets.clear()
                _deliver(direction, target)

    def _take(self, device: int, direction: _Direction) -> None:
        """Read what a side sends, as long as the queue has room."""
        while True:
            try:
                packet = os.read(device, _PACKET_BYTES)
            except BlockingIOError:
                return
            now = time.monotonic()
            begin = max(now, direction.free_at)
            if self.is_cut or begin - now > self._queue:
                continue  # lost
            direction.free_at = begin + len(packet) / self._rate
            direction.sent_bytes += len(packet)
            arrival = direction.free_at + self.round_trip_ms / 2000
            direction.packets.append((arrival, packet))


def _deliver(direction: _Direction, device: int) -> None:
    now = time.monotonic()
    while direction.packets and direction.packets[0][0] <= now:
        os.write(device, direction.packets.popleft()[1])


def _forget_killed() -> None:
    """Delete the namespaces of owners that were killed."""
    for name in Path("/run/netns").glob("sf-*-*"):
        if not Path("/proc", name.name.rpartition("-")[2]).exists():
            _ip("netns", "del", name.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
