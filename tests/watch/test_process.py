"""The command `watch`, in a process of its own: how it starts, what it says, how it stops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill.base.errors import Exit

LONG = 90.0


def address(started: Any) -> str:
    deadline, file = time.monotonic() + LONG, started.said / "errors"
    while time.monotonic() < deadline and started.process.is_alive():
        text = file.read_text() if file.is_file() else ""
        if found := re.search(r"watching \S+ at (http://\S+)", text):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_even_while_pages_listen(
    begin_gristmill: Callable[..., Any], made: Callable[..., Any], number: int
) -> None:
    run = made(steps=5)
    started = begin_gristmill("watch", run.folder.path.parent, "--port", 0)
    url = address(started)
    with httpx.stream("GET", f"{url}/api/events", timeout=LONG) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("retry")
        os.kill(started.pid, number)
        list(lines)  # the stream ends properly
    done = started.end()
    assert done.returncode == Exit.DONE and "Traceback" not in done.stderr
    assert "cut short" not in done.stderr


def test_it_says_how_to_reach_it_and_with_control_who_may_act(
    begin_gristmill: Callable[..., Any], made: Callable[..., Any]
) -> None:
    started = begin_gristmill("watch", made().folder.path, "--port", 0, "--control")
    url = address(started)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{20,}", url)
    port = url.split(":")[2].split("/")[0]
    os.kill(started.pid, signal.SIGTERM)
    assert f"ssh -L {port}:127.0.0.1:{port} " in started.end().stderr


def test_it_does_not_import_torch() -> None:
    code = (
        "import sys, gristmill.cli.watch, gristmill.watch.server, starlette.routing, uvicorn\n"
        "print([name for name in ('torch', 'safetensors', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_user_can_mend(gristmill: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for words, what in (
        ((file,), "this is no folder"),
        (("--host", "0.0.0.0"), "it needs API keys"),
        (("--interval", "0"), "--interval"),
    ):
        done = gristmill("watch", *words, "--port", 0)
        assert done.returncode in (Exit.CONFIG, Exit.USAGE)
        assert what in done.stderr and "Traceback" not in done.stderr
