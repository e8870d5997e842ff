"""Serving: tokens/s and waiting times of `gristmill serve` beside `transformers serve`.

    pip install 'gristmill[serve,hf]' httpx 'transformers[serving]' accelerate
    python benchmarks/serving.py MODEL --clients 1 8 64 256
    python benchmarks/serving.py MODEL --peer                  transformers serve, same weights
    python benchmarks/serving.py MODEL --soak 300              all kinds of requests, then a check

MODEL is whatever `gristmill serve` takes; for `--peer` a Hugging Face folder. `--url` asks a server
that runs already. Each client sends one streamed request after the other: a prompt of `--prompt`
words, then `--tokens` tokens at temperature 1. Times are those that clients see:

    ttft       from sending a request to its first text, in ms
    between    from one chunk of a stream to the next, in ms

The soak mixes good requests, wrong ones, clients that leave, clients that read slowly and bodies
that are too large. Afterwards no slot may be taken, and memory may not have grown. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORDS = "the mill turns and grinds the corn into flour while water runs below the wheel".split()
START_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--prompt", type=int, default=32, help="words of a prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--peer", action="store_true", help="also transformers serve")
    parser.add_argument("--soak", type=float, metavar="SECONDS")
    parser.add_argument("--options", nargs="*", default=[], help="for gristmill serve, without --")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count()}
    with server(options) as (url, pid):
        if options.soak:
            result["soak"] = asyncio.run(soak(url, pid, options.soak))
            print(json.dumps(result))
            sys.exit(0 if result["soak"]["ok"] else 1)
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        result["gristmill"] = measure("gristmill", url, model, options)
    if options.peer:
        with peer(options.model) as url:
            result["transformers"] = measure("transformers", url, options.model, options)
    print(json.dumps(result))


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """A server of the model: its address, and its process."""
    if options.url:
        yield options.url, None
        return
    extra = [f"--{word}" if not word[0].isdigit() else word for word in options.options]
    command = [sys.executable, "-m", "gristmill", "serve", options.model, "--port", "0"]
    command += ["--queue", "2000", *extra]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = ""
            for line in process.stderr:
                print(line, end="")
                found = re.search(r"http://\S+", line)
                url = found[0] if found else url
                if " loaded " in line:
                    break
            yield url, process.pid
        finally:
            process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def peer(model: str) -> Iterator[str]:
    """`transformers serve`, in its fastest way for several clients."""
    port = 8000 + os.getpid() % 1000
    command = ["transformers", "serve", model, "--port", str(port), "--continuous-batching"]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=silent, stderr=silent) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + START_SECONDS
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"{url}/health", timeout=5)
                    break
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


# ------------------------------------------------------------------ speed


@dataclass
class Times:
    """What clients have seen, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0


def measure(name: str, url: str, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of clients."""
    asyncio.run(load(url, model, clients=1, requests=1, options=options))
    print(f"{name:>14}  clients  tokens/s  ttft p50  ttft p99  between p50  between p99  failed")
    rows = []
    for clients in options.clients:
        begun = time.perf_counter()
        times = asyncio.run(
            load(url, model, clients=clients, requests=options.requests, options=options)
        )
        rate = times.tokens / (time.perf_counter() - begun)
        row = {
            "clients": clients,
            "tokens_per_second": round(rate, 1),
            "ttft_p50_ms": quantile(times.first, 0.5),
            "ttft_p99_ms": quantile(times.first, 0.99),
            "between_p50_ms": quantile(times.between, 0.5),
            "between_p99_ms": quantile(times.between, 0.99),
            "failed": times.failed,
        }
        widths = (7, 8, 8, 8, 11, 11, 6)
        cells = (f"{value:>{width}}" for value, width in zip(row.values(), widths, strict=True))
        print(" " * 16 + "  ".join(cells), flush=True)
        rows.append(row)
    return rows


def quantile(values: list[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(values) or [0.0]
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


async def load(
    url: str, model: str, *, clients: int, requests: int, options: argparse.Namespace
) -> Times:
    times = Times()
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
    async with client, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(one_client(client, model, number, requests, options, times))
    return times


async def one_client(
    client: httpx.AsyncClient,
    model: str,
    number: int,
    requests: int,
    options: argparse.Namespace,
    times: Times,
) -> None:
    rng = random.Random(number)
    for _ in range(requests):
        text = " ".join(rng.choices(WORDS, k=options.prompt))
        body = {
            "model": model,
            "prompt": text,
            "max_tokens": options.tokens,
            "temperature": 1.0,
            "stream": True,
        }
        if model != options.model:  # the peer refuses what it does not know
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        last = time.perf_counter()
        seen, tokens = False, 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                times.failed += 1
                continue
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk, now = json.loads(line[6:]), time.perf_counter()
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                if not any(choice.get("text") for choice in chunk["choices"]):
                    continue
                (times.between if seen else times.first).append(now - last)
                seen, last = True, now
        times.tokens += tokens


# ------------------------------------------------------------------ soak


async def soak(url: str, pid: int | None, seconds: float) -> dict[str, Any]:
    """Requests of all kinds for so long; what became of them, of memory and of slots."""
    statuses, deadline = Counter[str](), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    memory = [resident(pid)]
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def worker(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < deadline:
                kind = rng.choice([*KINDS])
                try:
                    statuses[f"{kind} {await KINDS[kind](client, rng)}"] += 1
                except httpx.TransportError as error:
                    statuses[f"{kind} {type(error).__name__}"] += 1

        async def watch() -> None:
            while time.monotonic() < deadline:
                await asyncio.sleep(max(1.0, seconds / 20))
                memory.append(resident(pid))

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            for number in range(32):
                group.create_task(worker(number))
        used = "slots are taken"
        for _ in range(100):
            text = (await client.get("/metrics")).text
            used = sum(map(float, re.findall(r"gristmill_slots_used\{.*\} (.+)", text)))
            if used == 0:
                break
            await asyncio.sleep(0.1)
    for name, count in sorted(statuses.items()):
        print(f"{name:>24}  {count}")
    early, late = memory[len(memory) // 4], memory[-1]
    print(f"memory in MiB: {memory}; slots taken: {used}")
    good = all(status.split()[-1] in EXPECTED[status.split()[0]] for status in statuses)
    return {
        "seconds": seconds,
        "requests": statuses.total(),
        "statuses": dict(sorted(statuses.items())),
        "memory_mib": memory,
        "slots_used": used,
        "ok": good and used == 0 and late <= early * 1.1 + 20,
    }


def resident(pid: int | None) -> int:
    """Memory of the server in MiB; 0 if it is not ours."""
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmRSS:\s+(\d+)", status.read_text()) if status.is_file() else None
    return int(found[1]) // 1024 if found else 0


def soak_body(rng: random.Random, **more: Any) -> dict[str, Any]:
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))
    return {"prompt": prompt, "max_tokens": rng.randint(1, 40), **more}


async def good(client: httpx.AsyncClient, rng: random.Random) -> int:
    more = rng.choice([{}, {"n": 3}, {"logprobs": 5, "echo": True}, {"stop": ["e"]}])
    return (await client.post("/v1/completions", json=soak_body(rng, **more))).status_code


async def streamed(client: httpx.AsyncClient, rng: random.Random) -> int:
    body = soak_body(rng, stream=True)
    answer = await client.post("/v1/completions", json=body)
    return answer.status_code if answer.text.endswith("[DONE]\n\n") else 0


async def wrong(client: httpx.AsyncClient, rng: random.Random) -> int:
    body = soak_body(rng, **rng.choice([{"n": 0}, {"temperature": "x"}, {"prompt": "x" * 100_000}]))
    return (await client.post("/v1/completions", json=body)).status_code


async def broken(client: httpx.AsyncClient, rng: random.Random) -> int:
    content = rng.choice([b"{", b"[" * 10_000, b"\xff", b'{"prompt": NaN}'])
    return (await client.post("/v1/completions", content=content)).status_code


async def large(client: httpx.AsyncClient, rng: random.Random) -> int:
    return (await client.post("/v1/completions", content=b"x" * (5 * 2**20))).status_code


async def leaving(client: httpx.AsyncClient, rng: random.Random) -> int:
    body = soak_body(rng, max_tokens=500, stream=rng.random() < 0.5)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.random() * 0.2):
            await client.post("/v1/completions", json=body)
    return 0


async def slow(client: httpx.AsyncClient, rng: random.Random) -> int:
    body = soak_body(rng, max_tokens=40, n=4, logprobs=20, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_bytes(2000):
            await asyncio.sleep(rng.random() * 0.05)
        return answer.status_code


KINDS: dict[str, Any] = {
    one.__name__: one for one in (good, streamed, wrong, broken, large, leaving, slow)
}
EXPECTED = {"good": ["200"], "streamed": ["200"], "wrong": ["400"], "broken": ["400"],
            "large": ["413"], "leaving": ["0"], "slow": ["200"]}  # fmt: skip


if __name__ == "__main__":
    main()
