"""Renders chat templates, which come with models from anywhere, within limits.

Jinja's sandbox keeps a template from reaching Python, but not from looping for hours or asking for
3 GB of text. So templates are rendered by a process of their own, started at the first one and kept
for all others:

    parent  ──>  {"source", "tokens", "calls": [{"messages", "add_generation_prompt"}, …],
                  "seconds", "most"}
    child   <──  {"texts": [text or {"refused": why}, …]}, {"syntax": why} or {"limit": why}

each as a line of JSON. The system ends the child when it has computed for so many seconds at one
request (CPU time, so a busy machine ends nobody), and gives it no more than `MEMORY`; the parent
sees that it ended and starts another for the next request. The child imports nothing but Jinja.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

SECONDS = 5.0
EACH = 0.02
"""Seconds of computing for one request, and more for each of its calls, which take 0.1 ms."""
MEMORY = 2**30
"""Bytes of address space, of which Python with Jinja takes a tenth."""
MOST_ADDED = 2**24
"""Characters that a template may add to those of the messages, twice."""
_TODAY = datetime(2024, 7, 26)
"""What templates are told if they ask: the day that those of Llama fall back to."""


class TemplateLimitError(Exception):
    """The template takes too long or writes too much; says which."""


class TemplateSyntaxError(Exception):
    """This is no template; says why."""


class Refused(str):
    """Why a template does not accept a conversation."""

    __slots__ = ()


Call = Mapping[str, Any]
"""What a template is rendered with: messages, add_generation_prompt."""


# ------------------------------------------------------------------ rendering


@functools.cache
def environment() -> Any:
    """Jinja as `transformers` sets it up, but for the clock."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Templates may mark answers for other trainers; the marks say nothing new here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        # The filter of Jinja escapes for HTML.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    import jinja2

    try:
        return environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        what = f"line {error.lineno}: not a Jinja template: {error.message}"
        raise TemplateSyntaxError(what) from error
    except MemoryError:
        raise
    except Exception as error:  # such as blocks that are nested too deeply
        what = f"not a Jinja template: {type(error).__name__}: {error}"
        raise TemplateSyntaxError(what) from error


def render_here(
    source: str, tokens: Mapping[str, str], calls: Sequence[Call], *, most: int | None = None
) -> list[str | Refused]:
    """The texts of some calls, by this process; none may have more than `most` characters."""
    compiled, texts = _compiled(source), list[str | Refused]()
    for call in calls:
        try:
            text: str = compiled.render(tools=None, documents=None, **call, **tokens)
        except MemoryError:
            raise TemplateLimitError("it writes too much") from None
        except Exception as error:  # a template can raise anything
            text = Refused(str(error) or type(error).__name__)
        if most is not None and len(text) > most:
            raise TemplateLimitError("it writes too much")
        texts.append(text)
    return texts


# ------------------------------------------------------------------ by another process


class _Renderer:
    """The process that renders, as its parent sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:
                # An answer that nobody waited for would be taken for that of the next request.
                self.close()
                raise
            if not answer.endswith(b"\n"):
                self.close()
                return {"limit": f"it takes longer than {SECONDS:g} seconds, or too much memory"}
            value: dict[str, Any] = json.loads(answer)
            return value

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, which a fork does not inherit."""
        if self._process is None or self._owner != os.getpid():
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for the parent.
                start_new_session=True,
            )
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)


def render(source: str, tokens: Mapping[str, str], calls: Sequence[Call]) -> list[str | Refused]:
    """The texts of some calls, by the other process."""
    given = [sum(len(message["content"]) for message in call["messages"]) for call in calls]
    answer = _RENDERER.ask(
        {
            "source": source,
            "tokens": dict(tokens),
            "calls": list(calls),
            "seconds": SECONDS + EACH * len(calls),
            "most": MOST_ADDED + 2 * max(given, default=0),
        }
    )
    if "syntax" in answer:
        raise TemplateSyntaxError(answer["syntax"])
    if "limit" in answer:
        raise TemplateLimitError(answer["limit"])
    return [text if isinstance(text, str) else Refused(text["refused"]) for text in answer["texts"]]


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        texts = render_here(**request)
    except TemplateSyntaxError as error:
        return {"syntax": str(error)[:1000]}
    except (TemplateLimitError, MemoryError):
        return {"limit": "it writes too much"}
    return {
        "texts": [{"refused": text[:1000]} if isinstance(text, Refused) else text for text in texts]
    }


def serve() -> None:
    """Answer requests until there are no more."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    environment()
    for line in sys.stdin.buffer:
        # The system ends the process, even within one operation on a long text.
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))
        answer = json.dumps(_answer(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
