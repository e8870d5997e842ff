"""Whether a slow process of a run is named, which, as what, and after how many steps.

    python benchmarks/stragglers.py
    python benchmarks/stragglers.py --cases quiet --repeat 10
    python benchmarks/stragglers.py --cases stopped core disk delay rate

Four gloo processes train a small model with one thread each. After 60 steps one of them is slowed:

    quiet     not at all: nobody must be named
    stopped   SIGSTOP for 20 ms in every 50 ms
    core      it is bound to one core, on which six other programs compute (the others may use all)
    disk      its token files answer late, which is imitated: every batch takes 0.2 s longer
    delay     its link takes 20 ms longer     } network namespaces, joined by a bridge and a tap
    rate      its link has 12 MB/s            } device; needs root and /dev/net/tun

The last line is the result as JSON. Run it while nothing else keeps the machine busy: another
program that takes a process its core makes that process slow, which then is what this reports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.tokenizer import open_tokenizer

RANKS, SLOW = 4, 2
FROM = 60
"""The step from which one is slow."""
CASES = ("quiet", "stopped", "core", "disk", "delay", "rate")
LINKS = {"delay": "0.02 0", "rate": "0 12e6"}
RUN = """
name = "{name}"
folder = "{folder}"
preset = "gpt2-nano"
data = {{ paths = "{tokens}", sequence = 64, split = "100,0" }}
train = {{ until = "{steps} steps", batch = 8 }}
optim.lr = 1e-3
checkpoint.every = "100k steps"
parallel.timeout = "2m"
runtime = {{ device = "cpu", threads = 1 }}
"""
PROGRAM = """
import os, sys, time
from pathlib import Path
from gristmill.data.loader import Loader

real = Loader.step_batches

def late(self, first_sample):
    if Path({flag!r}).exists() and os.environ["RANK"] == "{slow}":
        time.sleep(0.2)
    return real(self, first_sample)

Loader.step_batches = late
sys.argv = ["gristmill", "train", {run!r}]
from gristmill.cli.main import main
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        documents = (Document(f"The mill turns {n} times. " * 50, f"{n}") for n in range(2000))
        prepare_documents(documents, tokenizer=open_tokenizer("bytes"), output=scratch / "tokens")
        for case in options.cases:
            for number in range(options.repeat):
                found.append(measure(case, scratch, f"{case}-{number}", options.steps))
                print(described(found[-1]), flush=True)
    print(json.dumps(found))


def measure(case: str, scratch: Path, name: str, steps: int) -> dict[str, Any]:
    """One run, and what it said about its processes."""
    folder, run, flag = scratch / name, scratch / f"{name}.toml", scratch / f"{name}.slow"
    text = RUN.format(name=name, folder=folder, tokens=scratch / "tokens", steps=steps)
    run.write_text(text)
    program = PROGRAM.format(flag=str(flag), slow=SLOW, run=str(run))
    with contextlib.ExitStack() as cleanup:
        prefixes, address, settings = [[] for _ in range(RANKS)], "127.0.0.1", None
        if case in LINKS:
            prefixes, settings = cleanup.enter_context(linked(scratch))
            address = "10.78.0.1"
        processes = [
            cleanup.enter_context(started(rank, [*prefixes[rank], sys.executable, "-c", program],
                                          address, "eth0" if case in LINKS else "lo"))
            for rank in range(RANKS)
        ]  # fmt: skip
        while last_step(folder) < FROM:
            require_alive(processes)
            time.sleep(0.05)
        began, slow = last_step(folder), processes[SLOW]
        if case == "disk":
            flag.touch()
        if case == "core":
            cleanup.enter_context(crowded_core(slow.pid))
        if settings is not None:
            settings.write_text(LINKS[case])
        while any(process.poll() is None for process in processes):
            if case == "stopped" and slow.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    slow.send_signal(signal.SIGSTOP)
                    time.sleep(0.02)
                    slow.send_signal(signal.SIGCONT)
            time.sleep(0.03)
    named = [record for record in records(folder) if record["kind"] == "straggler"]
    seconds = [record["step_seconds"] for record in records(folder) if record["kind"] == "step"]
    return {
        "case": case,
        "from_step": began,
        "step_ms": round(1000 * sorted(seconds)[len(seconds) // 2], 1),
        "named": [
            {key: one[key] for key in ("step", "rank", "phase", "ratio", "cause", "over")}
            for one in named
        ],
    }


def described(found: dict[str, Any]) -> str:
    first = next((one for one in found["named"] if not one["over"]), None)
    if first is None:
        return f"{found['case']:8} nobody was named ({found['step_ms']} ms a step)"
    late = first["step"] - found["from_step"]
    right = first["rank"] == SLOW and found["case"] != "quiet"
    cause = f", {first['cause']}" if first["cause"] else ""
    return (
        f"{found['case']:8} rank {first['rank']} {'(right)' if right else '(WRONG)'} after {late} "
        f"steps of {found['step_ms']} ms: {first['phase']} {first['ratio']:.3g} x{cause}"
    )


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def last_step(folder: Path) -> int:
    if not (folder / "metrics.jsonl").is_file():
        return 0
    return max((record["step"] for record in records(folder)), default=0)


def require_alive(processes: list[subprocess.Popen[bytes]]) -> None:
    if any(process.poll() is not None for process in processes):
        raise SystemExit("a process has ended before it was slowed")


@contextlib.contextmanager
def started(
    rank: int, command: list[str], address: str, interface: str
) -> Iterator[subprocess.Popen[bytes]]:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
    }
    process = subprocess.Popen(
        command, env={**os.environ, **own}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def crowded_core(pid: int) -> Iterator[None]:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), {0})
    busy = [sys.executable, "-c", "import os; os.sched_setaffinity(0, {0})\nwhile True: pass"]
    others = [subprocess.Popen(busy) for _ in range(6)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def linked(scratch: Path) -> Iterator[tuple[list[list[str]], Path]]:
    """A namespace for each rank; the slow one behind a tap device. Yields the commands that run
    something there, and the settings of that link."""
    base, settings = f"strag{os.getpid()}", scratch / "link"
    settings.write_text("0 0")
    names = [f"{base}-{rank}" for rank in range(RANKS)]
    with contextlib.ExitStack() as cleanup:
        bridge = f"sb{os.getpid()}"
        ip("link", "add", bridge, "type", "bridge")
        cleanup.callback(ip, "link", "delete", bridge)
        ip("link", "set", bridge, "up")
        for rank, name in enumerate(names):
            ip("netns", "add", name)
            cleanup.callback(ip, "netns", "delete", name)
            host = f"sv{os.getpid()}-{rank}"
            if rank == SLOW:
                link = [sys.executable, str(Path(__file__).with_name("tap_link.py"))]
                tap = subprocess.Popen(
                    [*link, host, name, str(settings)], stdout=subprocess.PIPE, text=True
                )
                cleanup.callback(tap.wait)
                cleanup.callback(tap.kill)
                assert tap.stdout is not None and tap.stdout.readline()
            else:
                ip("link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", host, "master", bridge, "up")
            ip("-n", name, "address", "add", f"10.78.0.{rank + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in names], settings


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


PORT = free_port()

if __name__ == "__main__":
    main()
