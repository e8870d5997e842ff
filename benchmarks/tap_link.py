"""A link between a bridge and a network namespace whose delay and rate can be changed at any time.

    python tap_link.py BRIDGE_SIDE NAMESPACE SETTINGS

Frames go from a tap device on the host to one called eth0 in the namespace, and back. SETTINGS is a
file with the delay in seconds and the rate in bytes per second (0: unlimited), read twice a second.
For kernels without netem and token buckets; needs root and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path

TUNSETIFF = 0x400454CA
TAP = 0x0002 | 0x1000  # IFF_TAP | IFF_NO_PI
AT_A_TIME = 64
MOST_WAITING = 3000
"""Frames; more are dropped, as a full queue does."""


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), TAP))
    return device


def enter(namespace: str) -> None:
    """What this process opens from now on is in the namespace."""
    with open(f"/var/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def forward(ends: tuple[int, int], settings: Path) -> None:
    queues = {end: deque[tuple[float, bytes]]() for end in ends}
    free = dict.fromkeys(ends, 0.0)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    delay = rate = looked = 0.0
    while True:
        now = time.monotonic()
        if now - looked > 0.5:
            looked = now
            with contextlib.suppress(OSError, ValueError):
                delay, rate = map(float, settings.read_text().split())
        due = min((queue[0][0] for queue in queues.values() if queue), default=now + 0.5)
        readable, _, _ = select.select(ends, [], [], min(0.5, max(0.0, due - now)))
        now = time.monotonic()
        for end in readable:
            with contextlib.suppress(BlockingIOError):
                # A few at a time: whoever sends without a pause must not hold up what is due.
                for _ in range(AT_A_TIME):
                    frame, to = os.read(end, 1 << 16), other[end]
                    if len(queues[to]) < MOST_WAITING:
                        free[to] = max(now, free[to]) + (len(frame) / rate if rate else 0.0)
                        queues[to].append((free[to] + delay, frame))
        now = time.monotonic()
        for end, queue in queues.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):
                    os.write(end, queue.popleft()[1])


if __name__ == "__main__":
    on_host = open_tap(sys.argv[1])
    enter(sys.argv[2])
    in_namespace = open_tap("eth0")
    print("ready", flush=True)
    forward((on_host, in_namespace), Path(sys.argv[3]))
