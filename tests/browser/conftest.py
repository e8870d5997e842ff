"""A browser, a server for it, and pages that fail a test when anything is wrong with them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HINT = "needs playwright: make test-browser"
PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
SIZES = {"wide": {"width": 1280, "height": 800}, "narrow": {"width": 375, "height": 740}}
LIMIT = 10_000
"""Milliseconds that a page may take for anything; all of it takes far less where nothing else
runs."""


def find_browser() -> str | None:
    """GRISTMILL_BROWSER, or the first browser that is installed."""
    named = os.environ.get("GRISTMILL_BROWSER")
    if named:
        return named
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason=HINT)
    sync_api.expect.set_options(timeout=LIMIT)
    program = find_browser()
    if program is None:
        pytest.skip(f"needs a browser, one of {', '.join(PROGRAMS)}: make test-browser")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def _one_server() -> Iterator[Any]:
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package, reason=f"needs {package}: make test-browser")
    server = _load("fake_server").FakeServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def fake(_one_server: Any) -> Any:
    """The stand-in, which does what a test plans: delays, errors, odd output."""
    _one_server.reset()
    return _one_server


class Watching:
    """`gristmill watch` of some folders, as a process that tests stop and start."""

    def __init__(self, *folders: Path, control: bool = False, key_file: Path | None = None) -> None:
        self.folders = folders
        self.port = 0
        self.token = ""
        self._options = ["--interval", "0.2"]
        if control:
            self._options.append("--control")
        if key_file is not None:
            self._options += ["--api-key-file", str(key_file)]
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        command = [sys.executable, "-m", "gristmill", "watch", *map(str, self.folders)]
        command += ["--port", str(self.port), *self._options]
        process = self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        lines: queue.Queue[str] = queue.Queue()
        assert process.stdout is not None
        output = process.stdout
        threading.Thread(target=lambda: [lines.put(line) for line in output], daemon=True).start()
        told = ""
        while not (found := re.search(r" at http://[\w.]+:(\d+)(?:/#token=(\S+))?", told)):
            with contextlib.suppress(queue.Empty):
                told += lines.get(timeout=1)
            assert process.poll() is None, told
        self.port, self.token = int(found[1]), found[2] or ""

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None


@pytest.fixture
def run_folders() -> ModuleType:
    """The module that writes run folders."""
    return sys.modules.get("run_folders") or _load("run_folders")


@pytest.fixture
def watching_options() -> dict[str, Any]:
    """How the live page is served; modules and tests put their own in its place."""
    return {}


@pytest.fixture
def watching(tmp_path: Path, watching_options: dict[str, Any]) -> Iterator[Watching]:
    """The live page of the runs in `tmp_path / "runs"`, also of those that are written later."""
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package, reason=f"needs {package}: make test-browser")
    (tmp_path / "runs").mkdir(exist_ok=True)
    found = Watching(tmp_path / "runs", **watching_options)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> str:
    """Where the pages are: GRISTMILL_BROWSER_SERVER, the live page, or the stand-in."""
    if "watching" in request.fixturenames:
        return str(request.getfixturevalue("watching").url)
    if "fake" not in request.fixturenames and "GRISTMILL_BROWSER_SERVER" in os.environ:
        return os.environ["GRISTMILL_BROWSER_SERVER"]
    return str(request.getfixturevalue("fake").url)


class Watched:
    """What went wrong in a page without being seen in it."""

    def __init__(self, server: str) -> None:
        self.server = urlsplit(server).netloc
        self.expected: tuple[str, ...] = ()
        """What the browser itself may write to the console, since a test makes requests fail."""
        self.wrong: list[str] = []

    def watch(self, page: Any) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("request", self._request)
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (event) =>"
            " console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"
        )

    def _console(self, message: Any) -> None:
        known = any(text in message.text for text in self.expected)
        if message.type in ("error", "warning") and not known:
            self.wrong.append(f"{message.type}: {message.text}")

    def _request(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self.server:
            self.wrong.append(f"request to {request.url}")


@pytest.fixture
def watched(server: str) -> Iterator[Watched]:
    what = Watched(server)
    yield what
    assert what.wrong == []


@pytest.fixture
def visit(
    request: pytest.FixtureRequest, browser: Any, server: str, watched: Watched
) -> Iterator[Callable[..., Any]]:
    """Open the page as a new visitor, or in the `context` of an earlier one."""
    contexts = []

    def opened(
        size: str = "wide",
        *,
        context: Any = None,
        ready: bool = True,
        path: str = "/",
        **how: Any,
    ) -> Any:
        if context is None:
            touch = size == "narrow"
            how = {"reduced_motion": "reduce", "has_touch": touch, "locale": "en-GB", **how}
            context = browser.new_context(viewport=SIZES[size], **how)
            context.set_default_timeout(LIMIT)
            contexts.append(context)
        page = context.new_page()
        watched.watch(page)
        page.goto(server.rstrip("/") + path)
        if ready and "watching" in request.fixturenames:
            page.locator("#live[data-state=live]").wait_for()
        elif ready:
            page.locator("#model option").first.wait_for(state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(params=["wide", "narrow"])
def page(request: pytest.FixtureRequest, visit: Callable[..., Any]) -> Any:
    """A new visitor's page, once on a screen and once on a phone."""
    return visit(request.param)


@pytest.fixture
def wide(visit: Callable[..., Any]) -> Any:
    return visit("wide")
