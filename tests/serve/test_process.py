"""The command `serve`, in a process of its own: how it starts and how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill.base.errors import Exit

GATED = """
import os, time
from gristmill.generate.engine import Engine
step, steps = Engine.step, 0
def gated(engine):
    global steps
    steps += 1
    if steps > 3 and not os.path.exists({file!r}):
        time.sleep(0.01)
        return []
    return step(engine)
Engine.step = gated
"""
LONG = 90.0
STREAM = {"prompt": "the mill", "max_tokens": 100, "stream": True, "ignore_eos": True}


class Served:
    """A server in a process of its own."""

    def __init__(self, started: Any) -> None:
        self.started, self.pid = started, started.pid
        self.url = self._wait_for(r"serving mill at (http://\S+)")
        self._wait_for(r"loaded (mill): step")

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + LONG
        while time.monotonic() < deadline and self.started.process.is_alive():
            if found := re.search(pattern, self.log):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(self.log)

    @property
    def log(self) -> str:
        file = self.started.said / "errors"
        return file.read_text() if file.is_file() else ""

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for_health(self, status: str) -> None:
        deadline = time.monotonic() + LONG
        while httpx.get(f"{self.url}/health", timeout=LONG).json() != {"status": status}:
            assert time.monotonic() < deadline


@pytest.fixture
def begin(begin_gristmill: Callable[..., Any], mill: Path, tmp_path: Path) -> Callable[..., Served]:
    """Start a server that computes three steps, and more only when the file `go` is there."""

    def start(*words: object, gated: bool = True) -> Served:
        first = GATED.format(file=str(tmp_path / "go")) if gated else ""
        common = ("--device", "cpu", "--port", 0)
        return Served(begin_gristmill("serve", mill, *common, *words, first=first))

    return start


def stream_of(served: Served) -> Iterator[str]:
    """The pieces of a stream, as they come."""
    client = httpx.Client(timeout=LONG)
    with client, client.stream("POST", f"{served.url}/v1/completions", json=STREAM) as answer:
        assert answer.status_code == 200
        yield from answer.iter_lines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_runs(
    begin: Callable[..., Served], tmp_path: Path, number: int
) -> None:
    served = begin()
    lines = stream_of(served)
    first = next(lines)
    assert first.startswith("data: ")
    served.send(number)
    served.wait_for_health("draining")
    refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    (tmp_path / "go").touch()
    rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    texts = (json.loads(line.removeprefix("data: ")) for line in [first, *rest[:-1]])
    assert [v["choices"][0]["finish_reason"] for v in texts][-1] == "length"
    assert served.started.end().returncode == Exit.DONE


def test_what_takes_too_long_is_ended(begin: Callable[..., Served]) -> None:
    served = begin("--drain", 0.5)
    lines = stream_of(served)
    next(lines)
    served.send(signal.SIGTERM)
    *_, last = (line for line in lines if line)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert served.started.end().returncode == Exit.DONE


def test_half_a_request_does_not_hold_it_up(begin: Callable[..., Served]) -> None:
    served = begin("--drain", 0.5, gated=False)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        time.sleep(0.3)
        begun = time.monotonic()
        served.send(signal.SIGTERM)
        done = served.started.end()
        assert time.monotonic() - begun < 15  # a body has 30 seconds to come
        assert raw.recv(12) == b"HTTP/1.1 503"
    assert done.returncode == Exit.DONE
    assert "1 request may take 0.5s to finish" in done.stderr
    assert "cut short after 0.5s: 1 request" in done.stderr


def test_the_second_signal_ends_it_at_once(begin: Callable[..., Served]) -> None:
    served = begin()
    lines = stream_of(served)
    next(lines)
    served.send(signal.SIGTERM)
    served.wait_for_health("draining")
    served.send(signal.SIGTERM)
    with pytest.raises(httpx.TransportError):
        list(lines)
    assert served.started.end().returncode == 128 + signal.SIGTERM


def test_it_says_what_it_does(begin: Callable[..., Served]) -> None:
    served = begin("--slots", 3, "--context", 64, "--precision", "fp32", gated=False)
    assert "3 slots of 64 tokens in float32" in served.log
    assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["context"] == 64
    served.send(signal.SIGTERM)
    done = served.started.end()
    assert done.returncode == Exit.DONE and "Traceback" not in done.stderr
    assert all(re.match(r"\d{4}-\d\d-\d\d", line) for line in done.stderr.splitlines())


def test_it_goes_on_and_stops_when_nobody_reads_its_log(mill: Path) -> None:
    command = [sys.executable, "-m", "gristmill", "serve", str(mill), "--device", "cpu"]
    process = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        assert "loaded mill" in process.stderr.readline()
        process.stderr.close()
        older = httpx.post(f"{url}/v1/completions", json={"model": "mill@50", "prompt": "a"})
        assert older.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == Exit.DONE
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--host", "0.0.0.0"), "it needs API keys"),
        (("--device", "tpu"), "is not auto, cpu, cuda or mps"),
        (("--api-key-file", "nothing"), "cannot be read"),
        (("--template", "nothing"), "nothing"),
    ],
)
def test_what_a_user_can_mend(
    gristmill: Callable[..., Any], mill: Path, words: tuple[str, ...], what: str
) -> None:
    done = gristmill("serve", mill, *words, "--port", "0")
    assert done.returncode in (Exit.CONFIG, Exit.DATA)
    assert what in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_an_error_of_the_user(gristmill: Callable[..., Any], mill: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = gristmill("serve", mill, "--port", taken.getsockname()[1])
    assert done.returncode == Exit.CONFIG
    assert "another program uses this port" in done.stderr
