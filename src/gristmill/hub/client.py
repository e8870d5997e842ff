"""The Hugging Face Hub: names, one way to call its libraries, and what their errors mean.

    NAME             openai-community/gpt2; some old ones have no owner: gpt2
    NAME@REVISION    the same at a branch, a tag or a commit

`ask_hub` calls a library. The libraries resume downloads and retry most requests themselves, but
not the first one, which asks for the commit of a branch: what may pass (too many requests, a
failing server, a cut connection) is tried again here, and anything else becomes one error that says
what is wrong and what to do. The libraries print nothing: their bars and log lines would break
ours, so waits are told and bytes are shown through the `DownloadDisplay` of the command line. A
user who sets HF_HUB_VERBOSITY, DATASETS_VERBOSITY or TRANSFORMERS_VERBOSITY gets the log lines
back.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import storage_errors
from gristmill.base.units import format_seconds

OnDownload: TypeAlias = Callable[[int, int | None], None]
"""Called with the bytes received so far, and the total if it is known."""
RepositoryKind: TypeAlias = Literal["model", "dataset"]
Result = TypeVar("Result")

_SPEC = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<revision>\w[\w./-]*))?")
_ATTEMPTS = 5
_TELL_EVERY = 10
"""Seconds."""
_told: dict[str, float] = {}
"""When a wait for this reason was told, or will be over."""
_LONGEST_WAIT = 300
"""Seconds. The Hub counts requests in windows of five minutes."""
_BUSY = 429
_UNREACHABLE = {"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError"}
_PASSING = {"NetworkError", "RemoteProtocolError", "TimeoutException", "XetDownloadError"}
"""Classes of errors by name, since the HTTP client differs between versions of the libraries."""
_VERBOSITY = {
    "huggingface_hub": "HF_HUB_VERBOSITY",
    "datasets": "DATASETS_VERBOSITY",
    "transformers": "TRANSFORMERS_VERBOSITY",
}
_WAIT = re.compile(r"(Rate limited\. Waiting|Retrying in) ([\d.]+) ?s")
_SECONDS = re.compile(r";t=(\d+)")
_LITTLE_ROOM = "Not enough free disk space"
_MISSING = re.compile(r"missing \((.+?)\)\.")
_LARGER_DISK = "make room, or set HF_HOME to a folder on a larger disk"
_LOG_IN = "log in: `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class HubRepository:
    """A model or dataset on the Hub, at a revision."""

    name: str
    revision: str | None = None
    """A branch, a tag or a commit; None is the main branch."""
    kind: RepositoryKind = "model"
    files: tuple[str, ...] = ()
    """Patterns of the files that are wanted; empty for all of them."""
    config: str | None = None
    """The config of a dataset that is wanted, if its files are not known."""

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def page(self) -> str:
        """Where a person reads about it."""
        return f"{hub_endpoint()}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    @property
    def download_remedy(self) -> str:
        """What to do where there is network, so that the cache has what is wanted of it."""
        revision = f" --revision {self.revision}" if self.revision else ""
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        wanted = "".join(f" --include {shlex.quote(pattern)}" for pattern in self.files)
        whole = ""
        if self.config and not self.files:
            whole = f" (this is all of it; --include takes only the files of {self.config!r})"
        return f"run `hf download {self.name}{revision}{kind}{wanted}`{whole}"

    @property
    def copy_remedy(self) -> str:
        """What to do on a machine that has no network at all."""
        from huggingface_hub import constants

        return f"{self.download_remedy} where there is one, and copy {constants.HF_HUB_CACHE}"


class DownloadDisplay(NamedTuple):
    """How downloads are shown."""

    show: Callable[[str], AbstractContextManager[OnDownload]]
    """Shows the progress of the download of that name while the context is open."""
    note: Callable[[str], None]
    """Prints a line, such as why nothing happens for a while."""


_DISPLAYS: list[DownloadDisplay | None] = [None]
"""The last one counts. Threads of the libraries use it too, so it is no context variable."""


@contextmanager
def downloads_shown(display: DownloadDisplay | None) -> Iterator[None]:
    """Show downloads in this block; None shows nothing."""
    _DISPLAYS.append(display)
    try:
        yield
    finally:
        _DISPLAYS.pop()


def shown_download(name: str) -> AbstractContextManager[OnDownload]:
    """A context that shows the progress of one download; called with bytes."""
    display = _DISPLAYS[-1]
    return display.show(name) if display else nullcontext(lambda done, total: None)


def hub_endpoint() -> str:
    """The address of the Hub, or of the mirror in HF_ENDPOINT."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def parse_repository(spec: str) -> HubRepository | None:
    """Parse NAME or NAME@REVISION; None if this cannot be the name of a repository."""
    match = _SPEC.fullmatch(spec)
    return HubRepository(match["name"], match["revision"]) if match else None


def ask_hub(
    call: Callable[[], Result], repository: HubRepository, *, where: str, remedy: str
) -> Result:
    """Call a library of Hugging Face; `remedy` is what to do if there is no such repository."""
    quiet_library("huggingface_hub")
    started = time.monotonic()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Better to stop before the download than at its end.
                warnings.filterwarnings("error", message=_LITTLE_ROOM)
                return call()
        except UserError:
            raise
        except Exception as error:  # the libraries' errors and those of their HTTP client differ
            failure = _Failure(error)
            wait = failure.wait(attempt)
            if wait is None or attempt == _ATTEMPTS:
                failure.raise_storage_error()
                times = f"{attempt} time{'s' * (attempt > 1)}"
                tried = f"tried {times} in {format_seconds(time.monotonic() - started)}"
                what, how = (
                    _explain_repository(failure, repository, remedy=remedy)
                    or _explain_server(failure, tried=tried)
                    or _explain_network(failure, repository, tried=tried)
                    or (
                        f"the {repository.kind} {str(repository)!r} cannot be had from Hugging "
                        f"Face: {first_line(error)}",
                        remedy,
                    )
                )
                raise DataError(what, where=where, remedy=how) from error
        tell_wait(failure.symptom, wait)
        time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def quiet_library(name: str) -> None:
    """Turn off the log lines of a library, except that waits are told in our way."""
    logger = logging.getLogger(name)
    if not os.environ.get(_VERBOSITY[name]) and not os.environ.get("HF_DEBUG"):
        logger.handlers[:] = [_WaitNotes()]
        logger.propagate = False


class _WaitNotes(logging.Handler):
    """Tells of the times for which a library waits."""

    def emit(self, record: logging.LogRecord) -> None:
        if match := _WAIT.search(record.getMessage()):
            why = "too many requests" if match[1].startswith("Rate") else "no answer"
            tell_wait(why, float(match[2]))


def tell_wait(why: str, seconds: float, *, who: str = "Hugging Face") -> None:
    """Tell of a wait for somebody, unless one for the same reason was told a moment ago."""
    now = time.monotonic()
    display = _DISPLAYS[-1]
    if display and (why not in _told or now >= _told[why] + _TELL_EVERY):
        _told[why] = now + seconds
        display.note(f"{who}: {why}; trying again in {format_seconds(seconds)}")


class _Failure:
    """The error of a library with all its causes, and what the Hub answered, if it did."""

    def __init__(self, error: BaseException) -> None:
        self.causes: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in self.causes:
            self.causes.append(cause)
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        answers = (getattr(cause, "response", None) for cause in self.causes)
        self._answer: Any = next((answer for answer in answers if answer is not None), None)
        self.status: int | None = self._answer.status_code if self._answer is not None else None
        # The outermost one: what lies behind it belongs to several classes.
        self.network = self.cause(*_UNREACHABLE, *_PASSING)
        names = {kind.__name__ for kind in type(self.network).__mro__}
        self.unreachable = bool(names & _UNREACHABLE)

    def cause(self, *names: str) -> BaseException | None:
        """The first of the errors that belongs to a class of one of these names."""
        for error in self.causes:
            if any(kind.__name__ in names for kind in type(error).__mro__):
                return error
        return None

    def wait(self, attempt: int) -> float | None:
        """Seconds to wait before the next attempt; None if another would fail as well."""
        if self.status is None:
            return float(attempt) if self.network and not self.unreachable else None
        if self.status != _BUSY and self.status < 500:
            return None
        headers = self._answer.headers
        stated = f"{headers.get('RateLimit', '')};t={headers.get('Retry-After', '')}"
        match = _SECONDS.search(stated)
        wait = float(match[1]) if match else 2.0**attempt
        return wait if wait <= _LONGEST_WAIT else None

    @property
    def symptom(self) -> str:
        if self.status == _BUSY:
            return "too many requests"
        return f"status {self.status}" if self.status else "the connection broke"

    def raise_storage_error(self) -> None:
        """Raise if the disk refused, which has nothing to do with the Hub."""
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
        for error in self.causes:
            what = ""
            if isinstance(error, Warning):
                what = f"the disk is too small: {' '.join(str(error).split())}"
            elif isinstance(error, OSError):
                try:
                    with suppress(OSError), storage_errors(cache):
                        raise error
                except UserError as refused:
                    what = refused.problems[0].what
            if what:
                raise UserError(
                    what, where=cache, remedy=_LARGER_DISK, exit=Exit.STORAGE
                ) from error


def _explain_repository(
    failure: _Failure, repository: HubRepository, *, remedy: str
) -> tuple[str, str] | None:
    """What is wrong and the remedy, if the Hub has no such repository or revision, or not for this
    user."""
    name, it = repository.name, f"the {repository.kind} {repository.name!r}"
    if failure.cause("GatedRepoError"):
        if failure.status == 403:
            return (
                f"{it} is gated, and your account has no access to it yet",
                f"ask for access at {repository.page}; `hf auth whoami` tells who you are there",
            )
        return (
            f"{it} is gated: you must accept its licence first",
            f"accept it at {repository.page}, then {_LOG_IN}",
        )
    if failure.cause("RepositoryNotFoundError"):
        return (
            f"there is no {repository.kind} {name!r} on Hugging Face, or it is private",
            f"{remedy}; for a private one, {_LOG_IN}",
        )
    if failure.cause("RevisionNotFoundError"):
        return (
            f"{it} has no revision {repository.revision!r}{_revisions(repository)}",
            f"give a branch, a tag or a whole commit, such as {name}@main",
        )
    return None


def _explain_server(failure: _Failure, *, tried: str) -> tuple[str, str] | None:
    """What is wrong and the remedy, if the Hub does not serve this user now."""
    if failure.status == 401:
        return (
            "Hugging Face does not accept your token",
            "log in again: `hf auth login`, or correct or unset HF_TOKEN",
        )
    if failure.status == _BUSY:
        return (
            f"Hugging Face has had too many requests from here: {tried}",
            "wait five minutes, then run the same command again; who is logged in (`hf auth "
            "login`) may ask more often",
        )
    if failure.status is not None and failure.status >= 500:
        return (
            f"Hugging Face answers with status {failure.status}: {tried}",
            "run the same command again later; https://status.huggingface.co tells of failures",
        )
    return None


def _explain_network(
    failure: _Failure, repository: HubRepository, *, tried: str
) -> tuple[str, str] | None:
    """What is wrong and the remedy, if the Hub was not reached and the cache does not have it
    all."""
    from huggingface_hub import constants

    elsewhere = repository.copy_remedy
    if incomplete := failure.cause("IncompleteSnapshotError"):
        match = _MISSING.search(str(incomplete))
        missing = f" ({match[1]})" if match else ""
        return (
            f"the cache holds only a part of {str(repository)!r}: files are missing{missing}",
            f"run the same command with network; without one, {elsewhere}",
        )
    absent = f"the {repository.kind} {str(repository)!r} is not in the cache"
    if repository.kind == "model":
        # It may have been meant as a folder, such as runs/first.
        absent = f"there is no folder {str(repository)!r} here, {absent}"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{absent}, and HF_HUB_OFFLINE is set",
            f"unset HF_HUB_OFFLINE; without network, {elsewhere}",
        )
    if failure.network is None:
        return None
    if failure.unreachable:
        return (
            f"{absent}, and {hub_endpoint()} cannot be reached: {first_line(failure.network)}",
            f"check the network; without one, {elsewhere}",
        )
    return (
        f"the connection to Hugging Face breaks: {first_line(failure.network)}; {tried}",
        "check the network, then run the same command again: whole files are kept",
    )


def first_line(error: BaseException) -> str:
    """What an error of a library says, in brief."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _revisions(repository: HubRepository) -> str:
    """The branches and tags that there are, if the Hub tells."""
    from huggingface_hub import HfApi

    with suppress(Exception):
        refs: Any = HfApi().list_repo_refs(repository.name, repo_type=repository.kind)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
        shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
        return f"; it has: {shown}"
    return ""
