"""The live page: how soon it shows something, what an update costs, how much memory it takes.

    pip install 'gristmill[serve,data]' httpx           playwright and a browser for the page itself
    python benchmarks/watch.py                          100 runs of 100,000 points, in a new folder
    python benchmarks/watch.py --runs 1000 --points 50  a long list
    python benchmarks/watch.py --folder F               keep the generated runs there, or use them

Runs are generated, then a server is started in a process of its own, and everything is timed from
outside. An append is one more record in each of `--growing` runs, as when they train.

    rows         from the start of the server to the first list with all runs
    curves       the first answer with the loss of all runs, as 25 runs at a time ask for it
    indexed      from the start until all lines were read
    news         from an append to the event that tells of it
    update       the answer with what is new in the curves of all runs: seconds and bytes
    zoom         the answer with a hundredth of one run
    first paint  in the browser, from the navigation until curves are drawn: while files are still
                 being read, and when all was read

The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

NAMES = ["loss", "grad_norm", "lr", "tokens_per_second", "mfu", "validation.loss"]
AT_A_TIME = 25
TOKENS = 480 * 1024
PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
SETTINGS = 'name = "{name}"\n[train]\nuntil = "1M steps"\nseed = {seed}\n[optim]\nlr = {lr}\n'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--growing", type=int, default=20, help="runs that get new records")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-browser", action="store_true")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_runs(folder, options.runs, options.points)
        result = measure(folder, options)
    print(json.dumps(result))


# ------------------------------------------------------------------ generated runs


def make_runs(folder: Path, runs: int, points: int) -> None:
    begun = time.perf_counter()
    for number in range(runs):
        run = folder / f"run-{number:04d}"
        if (run / "run.toml").exists():
            continue
        run.mkdir(parents=True)
        lines = (step_line(step, seed=number) for step in range(1, points + 1))
        (run / "metrics.jsonl").write_text("".join(lines))
        (run / "status.json").write_text('{"state": "running", "step": 0, "steps": 1000000}')
        settings = SETTINGS.format(name=run.name, seed=number % 5, lr=1e-3 / (1 + number // 5))
        (run / "run.toml").write_text(settings)
    size = sum(file.stat().st_size for file in folder.glob("*/metrics.jsonl"))
    print(f"{runs} runs, {size / 2**30:.2f} GiB, made in {time.perf_counter() - begun:.1f} s")


def step_line(step: int, *, seed: int, at: float | None = None) -> str:
    noise = random.random()
    loss = 2.7 + 8.0 / (1.0 + step / 300) ** 0.6 + 0.02 * (seed % 7) + 0.06 * noise
    when = 1.7e9 + 1.3 * step if at is None else at
    line = (
        f'{{"kind": "step", "step": {step}, "samples": {480 * step}, "tokens": {TOKENS * step}, '
        f'"time": {when:.3f}, "loss": {loss!r}, "lr": {6e-4 / (1 + step / 5e4)!r}, '
        f'"grad_norm": {0.3 + noise * noise!r}, "tokens_per_second": {3.7e5 + 1e3 * noise!r}, '
        f'"step_seconds": {1.3 + 0.01 * noise!r}, "tflops": 304.5, "tflops_causal": 283.1, '
        f'"mfu": {0.46 + 0.01 * noise!r}, "mfu_causal": 0.43, "memory_bytes": 61203283968, '
        '"loss_scale": null, "next_lr": null, "next_loss_scale": null, "skipped": 0, "nan": 0, '
        f'"data_wait": {0.001 * noise!r}, "sync_wait": {0.01 * noise!r}, "sent_bytes": null, '
        '"mixing": null}\n'
    )
    if step % 1000 == 0:
        stamp = line[: line.index('"loss"')].replace('"step", ', '"validation", ', 1)
        line += f'{stamp}"loss": {loss!r}, "perplexity": {math.exp(loss)!r}, "windows": 64, '
        line += '"seconds": 2.5, "best": true}\n'
    return line


# ------------------------------------------------------------------ the server


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    begun: float

    def memory(self, field: str) -> float:
        """MiB: VmRSS now, VmHWM at most."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", text)
        return round(int(found[1]) / 1024, 1) if found else math.nan


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Server]:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "gristmill", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r" at (http://\S+)", line):
                yield Server(process, found[1], begun)
                break
    finally:
        process.terminate()
        process.wait(30)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "runs": options.runs,
        "points": options.points,
    }
    with served(folder) as server:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            result |= at_the_start(server, client, options.runs)
            result |= updates(client, folder, options)
            result |= zoom(client, options.points)
        if not options.no_browser:
            result |= in_browser(server.url, "read")
        result["rss_mib"], result["most_rss_mib"] = server.memory("VmRSS"), server.memory("VmHWM")
        print(f"server: {result['rss_mib']} MiB, at most {result['most_rss_mib']} MiB")
    if not options.no_browser:
        with served(folder) as server:
            result |= in_browser(server.url, "unread")
    return result


def at_the_start(server: Server, client: httpx.Client, runs: int) -> dict[str, Any]:
    """Until everything is there, at first and at last."""
    result: dict[str, Any] = {"listening_s": round(time.perf_counter() - server.begun, 3)}
    rows: list[dict[str, Any]] = []
    while len(rows) < runs:
        rows = client.get("/api/runs").json()["runs"]
        time.sleep(0.01)
    result["rows_s"] = round(time.perf_counter() - server.begun, 3)
    result["rows_kib"] = round(len(client.get("/api/runs").content) / 1024, 1)
    begun = time.perf_counter()
    size = sum(len(content) for content in ask(client, rows, ["loss"], {}))
    result["first_curves_ms"] = round(1e3 * (time.perf_counter() - begun), 1)
    result["first_curves_kib"] = round(size / 1024, 1)
    slowest = 0.0
    while True:
        begun = time.perf_counter()
        rows = client.get("/api/runs").json()["runs"]
        slowest = max(slowest, time.perf_counter() - begun)
        if all(row["read"] == 1.0 for row in rows):
            break
        time.sleep(0.1)
    result["indexed_s"] = round(time.perf_counter() - server.begun, 2)
    result["slowest_list_while_indexing_ms"] = round(1e3 * slowest, 1)
    for name, value in result.items():
        print(f"{name:32} {value}")
    return result


def ask(
    client: httpx.Client, rows: list[dict[str, Any]], names: list[str], held: dict[Any, Any]
) -> Iterator[bytes]:
    """Curves of all runs, as the page asks for them; `held` is what it has."""
    for first in range(0, len(rows), AT_A_TIME):
        ids = [row["id"] for row in rows[first : first + AT_A_TIME]]
        since = [[*key, *value] for key, value in held.items() if key[0] in ids]
        body = {"runs": ids, "names": names, "x": "step", "points": 600, "since": since}
        content = client.post("/api/curves", json=body).content
        (length,) = struct.unpack_from("<I", content)
        header = json.loads(content[4 : 4 + length])
        for run, name, generation, begin, points, _ in header["entries"]:
            revision = header["revisions"][run]
            key = header["runs"][run], header["names"][name]
            held[key] = [generation, begin + points, revision]
        yield content


def updates(client: httpx.Client, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Append to some runs, wait for the event, ask for what is new."""
    rows = client.get("/api/runs").json()["runs"]
    held: dict[Any, Any] = {}
    begun = time.perf_counter()
    size = sum(len(content) for content in ask(client, rows, NAMES, held))
    result: dict[str, Any] = {
        "all_curves_ms": round(1e3 * (time.perf_counter() - begun), 1),
        "all_curves_kib": round(size / 1024, 1),
    }
    files = sorted(folder.glob("*/metrics.jsonl"))[: options.growing]
    version = client.get("/api/runs").json()["version"]
    news, times, sizes, events = list[float](), list[float](), list[int](), list[int]()
    with client.stream("GET", f"/api/events?version={version}") as stream:
        lines = stream.iter_lines()
        for number in range(options.updates):
            begun = time.perf_counter()
            for seed, file in enumerate(files):
                with file.open("a") as opened:
                    opened.write(step_line(options.points + number + 1, seed=seed, at=time.time()))
            data = next(line for line in lines if line.startswith("data: "))
            news.append(time.perf_counter() - begun)
            events.append(len(data))
            changed = {row["id"] for row in json.loads(data[6:])["rows"]}
            begun = time.perf_counter()
            these = [row for row in rows if row["id"] in changed]
            sizes.append(sum(len(content) for content in ask(client, these, NAMES, held)))
            times.append(time.perf_counter() - begun)
    result |= {
        "news_s": summary(news),
        "event_kib": round(max(events) / 1024, 1),
        "update_ms": summary([1e3 * one for one in times]),
        "update_kib": round(max(sizes) / 1024, 1),
    }
    for name, value in result.items():
        print(f"{name:32} {value}")
    return result


def zoom(client: httpx.Client, points: int) -> dict[str, Any]:
    (id, *_) = [row["id"] for row in client.get("/api/runs").json()["runs"]]
    times = []
    for number in range(10):
        low = points * (0.1 + 0.08 * number)
        query = {"runs": id, "names": "loss,grad_norm", "from": low, "to": low + points / 100}
        begun = time.perf_counter()
        client.get("/api/curves", params=query).raise_for_status()
        times.append(1e3 * (time.perf_counter() - begun))
    print(f"{'zoom_ms':32} {summary(times)}")
    return {"zoom_ms": summary(times)}


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": round(ordered[len(ordered) // 2], 3), "most": round(ordered[-1], 3)}


# ------------------------------------------------------------------ the browser


def in_browser(url: str, when: str) -> dict[str, Any]:
    """From the navigation until curves are drawn, and what the page then takes."""
    program = os.environ.get("GRISTMILL_BROWSER") or next(
        filter(None, map(shutil.which, PROGRAMS)), None
    )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        print("no browser: first paint was not measured")
        return {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        with page.expect_response(lambda answer: "/api/curves" in answer.url, timeout=120_000):
            page.goto(url)
        after = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame("
        drawn = page.evaluate(f"{after}() => done(performance.now()))))")
        paints = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
        result = {
            f"first_contentful_paint_{when}_ms": round(page.evaluate(paints), 1),
            f"first_curves_drawn_{when}_ms": round(drawn, 1),
        }
        browser.close()
    for name, value in result.items():
        print(f"{name:32} {value}")
    return result


if __name__ == "__main__":
    main()
