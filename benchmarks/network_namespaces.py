"""Workers on one machine with slow links: a network namespace for each, joined by a bridge.

    python benchmarks/network_namespaces.py
    python benchmarks/network_namespaces.py --workers 8 --rates 50 200 unlimited

    worker 0: eth0 10.77.0.1 ── grist123v0 ─┐
    worker 1: eth0 10.77.0.2 ── grist123v1 ─┼─ grist123b (bridge)
    worker 2: eth0 10.77.0.3 ── grist123v2 ─┘

Run as a script, it sends bytes over the links and prints the measured rates beside the asked ones.

A token bucket at both ends of each link limits what the worker sends and what it receives. Only the
rate is limited: there is no delay and no loss beyond what full queues cause, since kernels often
lack netem. Names carry this process's id, so that a later run can remove what a killed one left.
The host has no address on the bridge, so nothing here reaches other networks.

Where root, ip, tc or a right is missing, the processes run without namespaces at full speed, and a
line says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gristmill.base.exits import SUPERVISOR

PREFIX = "grist"
PORT = 29500
GRACE = 10.0
"""Seconds that the others get to report when a worker has failed."""
SAMPLED = 0.05
"""Seconds between two readings of the byte counters."""

SLICE = 0.02
"""Seconds for which a slow worker computes before it rests."""

Rate = float | None
"""Mbit/s; None: unlimited."""


class WorkersError(Exception):
    """Workers that ended badly, with the end of the log of the one that did so first."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a worker's interface has sent and received. Headers add up to 5 %, and less where
    the kernel merges packets before it counts them."""

    sent: int
    received: int


@dataclass
class Network:
    """Places for workers, with links between them if they are `isolated`."""

    workers: int
    isolated: bool
    rates: Sequence[Rate]
    slow: tuple[int, float] | None = None
    """A worker that computes only a part of the time, and that part."""
    name: str = field(default_factory=lambda: f"{PREFIX}{os.getpid()}")

    def address(self, worker: int) -> str:
        return f"10.77.0.{worker + 1}" if self.isolated else "127.0.0.1"

    def command(self, worker: int, words: Sequence[str]) -> list[str]:
        """A command as it runs at a worker's place."""
        inside = ["ip", "netns", "exec", f"{self.name}-{worker}"] if self.isolated else []
        return [*inside, *words]

    def traffic(self) -> list[Traffic] | None:
        """What each worker has sent and received so far; None where links are not its own."""
        if not self.isolated:
            return None
        # The host's end of a link receives what the worker sends.
        ends = [Path(f"/sys/class/net/{self.name}v{i}/statistics") for i in range(self.workers)]
        return [
            Traffic(
                sent=int((end / "rx_bytes").read_text()),
                received=int((end / "tx_bytes").read_text()),
            )
            for end in ends
        ]

    def set_rates(self, rates: Sequence[Rate]) -> None:
        """Change the links, also while workers use them; without effect where they have none."""
        if not self.isolated:
            return
        for worker, (before, rate) in enumerate(zip(self.rates, rates, strict=True)):
            if before != rate:
                self._shape(worker, rate, before=before)
        self.rates = rates

    def _shape(self, worker: int, rate: Rate, *, before: Rate = None) -> None:
        inside = ["tc", "-n", f"{self.name}-{worker}", "qdisc"], "eth0"
        outside = ["tc", "qdisc"], f"{self.name}v{worker}"
        for words, device in (inside, outside):
            if rate is not None:
                _call(*words, "replace", "dev", device, "root", *_bucket(rate))
            elif before is not None:
                _call(*words, "delete", "dev", device, "root")

    def _create(self) -> None:
        bridge = f"{self.name}b"
        _call("ip", "link", "add", bridge, "type", "bridge")
        _call("ip", "link", "set", bridge, "up")
        for worker, rate in enumerate(self.rates):
            inside, outer = f"{self.name}-{worker}", f"{self.name}v{worker}"
            _call("ip", "netns", "add", inside)
            # Without IPv6 nothing is sent that the workers did not send.
            with contextlib.suppress(WorkersError):
                setting = "net.ipv6.conf.all.disable_ipv6=1"
                _call("ip", "netns", "exec", inside, "sysctl", "-qw", setting)
            words = ("type", "veth", "peer", "name", "eth0", "netns", inside)
            _call("ip", "link", "add", outer, *words)
            _call("ip", "link", "set", outer, "master", bridge, "up")
            address = f"{self.address(worker)}/24"
            _call("ip", "-n", inside, "address", "add", address, "dev", "eth0")
            _call("ip", "-n", inside, "link", "set", "eth0", "up")
            _call("ip", "-n", inside, "link", "set", "lo", "up")
            self._shape(worker, rate)


def _bucket(rate: float) -> list[str]:
    """A token bucket for at least a millisecond. It must hold the largest packet, 64 KiB: one that
    still waits when the rate is changed, and is larger than the bucket, blocks the link for ever.
    """
    burst = max(131_072, int(rate * 1e6 / 8 / 1000))
    return f"tbf rate {rate:g}mbit burst {burst} latency 100ms".split()


@functools.cache
def why_not() -> str:
    """What keeps this process from having namespaces, tried out once; empty if nothing does."""
    if sys.platform != "linux":
        return "this is not Linux"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) not installed"
    if os.geteuid() != 0:
        return "not root"
    probe = Network(1, isolated=True, rates=[50.0])
    try:
        probe._create()
    except WorkersError as error:
        return f"no permission, or the kernel cannot: {error}"
    finally:
        with contextlib.suppress(WorkersError):
            _remove(probe.name)
    return ""


@contextlib.contextmanager
def open_network(rates: Sequence[Rate]) -> Iterator[Network]:
    """A place for each worker, with a link of this rate; all is removed at the end."""
    reason = why_not()
    if reason:
        print(f"links are NOT shaped ({reason}): all run at the speed of this machine", flush=True)
        yield Network(len(rates), isolated=False, rates=[None] * len(rates))
        return
    remove_leftovers()
    network = Network(len(rates), isolated=True, rates=rates)
    with stopped_by_term():
        try:
            network._create()
            yield network
        finally:
            _remove(network.name)


@contextlib.contextmanager
def stopped_by_term() -> Iterator[None]:
    """TERM and HUP end the program as Ctrl-C does, so that it tidies up."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def remove_leftovers() -> None:
    """Remove the namespaces and links of runs that were killed."""
    listed = _call("ip", "netns", "list") + _call("ip", "-brief", "link")
    names = {match[0]: int(match[1]) for match in re.finditer(rf"\b{PREFIX}(\d+)(?=[-bv])", listed)}
    for name, pid in names.items():
        if pid != os.getpid() and not Path(f"/proc/{pid}").exists():
            _remove(name)


def _remove(name: str) -> None:
    """Remove everything that carries this name, and end what still runs inside."""
    for line in _call("ip", "netns", "list").splitlines():
        inside = line.split()[0] if line else ""
        if inside.startswith(f"{name}-"):
            for pid in _call("ip", "netns", "pids", inside).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            # A link ends with the namespace of one of its ends.
            _call("ip", "netns", "delete", inside)
    for match in re.finditer(rf"^({name}[bv]\d*)\b", _call("ip", "-brief", "link"), re.MULTILINE):
        with contextlib.suppress(WorkersError):
            _call("ip", "link", "delete", match[1])


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkersError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


# ------------------------------------------------------------------ workers


@dataclass
class Readings:
    """Byte counters over time."""

    times: list[float] = field(default_factory=list)
    traffic: list[list[Traffic]] = field(default_factory=list)

    def sent_between(self, begin: float, end: float) -> list[float]:
        """Bytes that each worker sent from one time (since 1970) to another."""
        return [b - a for a, b in zip(self._sent_by(begin), self._sent_by(end), strict=True)]

    def _sent_by(self, when: float) -> list[float]:
        after = next((i for i, time_ in enumerate(self.times) if time_ >= when), len(self.times))
        if after in (0, len(self.times)):
            return [float(one.sent) for one in self.traffic[min(after, len(self.times) - 1)]]
        begin, end = self.times[after - 1], self.times[after]
        part = (when - begin) / (end - begin)
        pairs = zip(self.traffic[after - 1], self.traffic[after], strict=True)
        return [a.sent + part * (b.sent - a.sent) for a, b in pairs]


def run_workers(
    network: Network,
    words: Sequence[str],
    *,
    logs: Path,
    timeout: float,
    enough: Callable[[], bool] = lambda: False,
) -> Readings:
    """Run a command at every worker's place, with the variables of torchrun, until all have ended
    or it is `enough`, when they are killed.

    Each writes to a file in `logs`. `enough` is asked often, and may change rates meanwhile.
    """
    logs.mkdir(parents=True, exist_ok=True)
    port = PORT if network.isolated else _free_port()
    readings, started = Readings(), time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    files: list[IO[bytes]] = []
    try:
        for worker in range(network.workers):
            files.append((logs / f"worker-{worker}.log").open("wb"))
            processes.append(
                subprocess.Popen(
                    network.command(worker, words),
                    env=_variables(network, worker, port),
                    stdout=files[-1],
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        with _sliced(network, processes):
            _wait(network, processes, readings, logs=logs, end=started + timeout, enough=enough)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for file in files:
            file.close()
    return readings


def _variables(network: Network, worker: int, port: int) -> dict[str, str]:
    place = {
        "RANK": worker,
        "LOCAL_RANK": 0 if network.isolated else worker,
        "WORLD_SIZE": network.workers,
        "LOCAL_WORLD_SIZE": 1 if network.isolated else network.workers,
        "GROUP_WORLD_SIZE": network.workers if network.isolated else 1,
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        SUPERVISOR: os.getpid(),
    }
    interface = {"GLOO_SOCKET_IFNAME": "eth0"} if network.isolated else {}
    return os.environ | interface | {name: str(value) for name, value in place.items()}


def _wait(
    network: Network,
    processes: Sequence[subprocess.Popen[bytes]],
    readings: Readings,
    *,
    logs: Path,
    end: float,
    enough: Callable[[], bool],
) -> None:
    failed: int | None = None
    while any(process.poll() is None for process in processes):
        traffic = network.traffic()
        if traffic is not None:
            readings.times.append(time.time())
            readings.traffic.append(traffic)
        if enough():
            return
        bad = [worker for worker, process in enumerate(processes) if process.returncode]
        if bad and failed is None:
            failed, end = bad[0], min(end, time.monotonic() + GRACE)
        if time.monotonic() > end:
            break
        time.sleep(SAMPLED)
    bad = [worker for worker, process in enumerate(processes) if process.poll()]
    if failed is None and bad:
        failed = bad[0]
    if failed is not None:
        code = processes[failed].returncode
        raise WorkersError(f"worker {failed} ended with status {code}: {_tail(logs, failed)}")
    slow = [worker for worker, process in enumerate(processes) if process.returncode is None]
    if slow:
        raise WorkersError(f"not done in time: workers {slow}; worker 0: {_tail(logs, 0)}")


def _tail(logs: Path, worker: int) -> str:
    lines = (logs / f"worker-{worker}.log").read_text(errors="replace").strip().splitlines()
    return " / ".join(line.strip() for line in lines[-4:]) or "it wrote nothing"


@contextlib.contextmanager
def _sliced(network: Network, processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Stop the slow worker again and again, as if its processor were slower."""
    done = threading.Event()

    def slice_time() -> None:
        while not done.wait(SLICE):
            if network.slow is not None:
                worker, part = network.slow
                with contextlib.suppress(ProcessLookupError):
                    processes[worker].send_signal(signal.SIGSTOP)
                    time.sleep(SLICE * (1 / part - 1))
                    processes[worker].send_signal(signal.SIGCONT)

    thread = threading.Thread(target=slice_time, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# ------------------------------------------------------------------ a check of the links

_SINK = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 29600)); print("ready", flush=True)
peer, _ = server.accept(); total, begin = 0, time.perf_counter()
while data := peer.recv(1 << 20): total += len(data)
print(total, time.perf_counter() - begin)
"""
_SOURCE = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 29600)); data = bytes(1 << 16)
end = time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < end: peer.sendall(data)
"""


@dataclass(frozen=True)
class Transfer:
    """Bytes that arrived over TCP."""

    bytes: int
    seconds: float

    @property
    def mbit(self) -> float:
        return self.bytes * 8 / 1e6 / self.seconds


def transfer(network: Network, sender: int, receiver: int, *, seconds: float = 3.0) -> Transfer:
    """Send as much as possible from one worker to another for some seconds."""
    address = network.address(receiver)
    sink_words = network.command(receiver, [sys.executable, "-c", _SINK, address])
    with subprocess.Popen(sink_words, stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        sink.stdout.readline()
        source_words = [sys.executable, "-c", _SOURCE, address, str(seconds)]
        _call(*network.command(sender, source_words))
        total, took = sink.stdout.readline().split()
    return Transfer(int(total), float(took))


def parse_rate(text: str) -> Rate:
    return None if text == "unlimited" else float(text)


def rate_name(rate: Rate) -> str:
    return "unlimited" if rate is None else f"{rate:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--rates", nargs="+", type=parse_rate, default=[50.0, 100.0, 200.0, 1000.0, None]
    )
    options = parser.parse_args()
    print("| asked, Mbit/s | first to last | last to first | counted by the interface |")
    print("| ---: | ---: | ---: | ---: |")
    for rate in options.rates:
        with open_network([rate] * options.workers) as network:
            last, before = options.workers - 1, network.traffic()
            there = transfer(network, 0, last)
            after = network.traffic()
            back = transfer(network, last, 0)
            counted = "nothing"
            if before is not None and after is not None:
                share = (after[0].sent - before[0].sent) / there.bytes
                counted = f"{share:.1%} of the bytes that arrived"
        print(f"| {rate_name(rate)} | {there.mbit:.1f} | {back.mbit:.1f} | {counted} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
