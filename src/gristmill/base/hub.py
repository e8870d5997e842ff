"""The Hugging Face Hub: names, one way to call its libraries, and what their errors mean.

    NAME             openai-community/gpt2; some old ones have no owner: gpt2
    NAME@REVISION    the same at a branch, a tag or a commit

`ask_hub` calls a library. What may pass (too many requests, a failing server, a cut connection) is
tried again; anything else becomes one error that says what is wrong and what to do. The libraries
print nothing: their bars and log lines would break ours, so waits are told and bytes are shown
through the `DownloadDisplay` of the command line. A user who sets HF_HUB_VERBOSITY,
DATASETS_VERBOSITY or TRANSFORMERS_VERBOSITY gets the log lines back.
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

from gristmill.base.errors import DataError, Exit, Problem, UserError
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
    def download_command(self) -> str:
        """The command that downloads what is wanted of it into the cache."""
        revision = f" --revision {self.revision}" if self.revision else ""
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        wanted = "".join(f" --include {shlex.quote(pattern)}" for pattern in self.files)
        return f"hf download {self.name}{revision}{kind}{wanted}"

    @property
    def download_remedy(self) -> str:
        """What to do where there is network, so that the cache has what is wanted of it."""
        whole = ""
        if self.config and not self.files:
            whole = f" (this is all of it; --include takes only the files of {self.config!r})"
        return f"run `{self.download_command}`{whole}"

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


def parse_repository(spec: str, *, kind: RepositoryKind = "model") -> HubRepository | None:
    """Parse NAME or NAME@REVISION; None if this cannot be the name of a repository."""
    found = _SPEC.fullmatch(spec)
    return HubRepository(found["name"], found["revision"], kind) if found else None


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
            causes = _causes(error)
            wait = _wait(causes, attempt)
            if wait is None or attempt == _ATTEMPTS:
                _raise_storage_error(causes)
                times = f"{attempt} time{'s' * (attempt > 1)}"
                tried = f"tried {times} in {format_seconds(time.monotonic() - started)}"
                what, how = _explain(causes, repository, tried=tried, remedy=remedy)
                raise DataError(what, where=where, remedy=how) from error
        _tell_wait(_symptom(causes), wait)
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
        if found := _WAIT.search(record.getMessage()):
            why = "too many requests" if found[1].startswith("Rate") else "no answer"
            _tell_wait(why, float(found[2]))


def _tell_wait(why: str, seconds: float) -> None:
    """Tell of a wait, unless one for the same reason was told a moment ago."""
    now = time.monotonic()
    display = _DISPLAYS[-1]
    if display and (why not in _told or now >= _told[why] + _TELL_EVERY):
        _told[why] = now + seconds
        display.note(f"Hugging Face: {why}; trying again in {format_seconds(seconds)}")


def _causes(error: BaseException) -> list[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    found: list[BaseException] = []
    next_one: BaseException | None = error
    while next_one is not None and next_one not in found:
        found.append(next_one)
        hidden = None if next_one.__suppress_context__ else next_one.__context__
        next_one = next_one.__cause__ or hidden
    return found


def _of_class(causes: list[BaseException], names: set[str]) -> BaseException | None:
    """The first of the errors that belongs to one of these classes."""
    return next((e for e in causes if names & {kind.__name__ for kind in type(e).__mro__}), None)


def _network_error(causes: list[BaseException]) -> BaseException | None:
    """The outermost error of the network; what lies behind it belongs to several classes."""
    return _of_class(causes, _UNREACHABLE | _PASSING)


def _is_unreachable(error: BaseException) -> bool:
    return _of_class([error], _UNREACHABLE) is not None


def _status(causes: list[BaseException]) -> int | None:
    """The HTTP status in an answer of the Hub."""
    answers = (getattr(error, "response", None) for error in causes)
    return next((answer.status_code for answer in answers if answer is not None), None)


def _wait(causes: list[BaseException], attempt: int) -> float | None:
    """Seconds to wait before the next attempt; None if another would fail as well."""
    broken = _network_error(causes)
    if (status := _status(causes)) is None:
        return float(attempt) if broken and not _is_unreachable(broken) else None
    if status != _BUSY and status < 500:
        return None
    answers = (getattr(error, "response", None) for error in causes)
    headers = next(answer.headers for answer in answers if answer is not None)
    found = _SECONDS.search(f"{headers.get('RateLimit', '')};t={headers.get('Retry-After', '')}")
    wait = float(found[1]) if found else 2.0**attempt
    return wait if wait <= _LONGEST_WAIT else None


def _symptom(causes: list[BaseException]) -> str:
    status = _status(causes)
    if status == _BUSY:
        return "too many requests"
    return f"status {status}" if status else "the connection broke"


def _raise_storage_error(causes: list[BaseException]) -> None:
    """Raise if the disk refused, which has nothing to do with the Hub."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    remedy = "make room, or set HF_HOME to a folder on a larger disk"
    for error in causes:
        if isinstance(error, Warning):
            what = f"the disk is too small: {' '.join(str(error).split())}"
            raise UserError(what, where=cache, remedy=remedy, exit=Exit.STORAGE) from error
        if isinstance(error, OSError) and error.errno is not None:
            try:
                with storage_errors(cache):
                    raise error
            except UserError as refused:
                refused.problems[0] = Problem(refused.problems[0].what, str(cache), remedy)
                raise
            except OSError:
                continue


class _Answer(NamedTuple):
    """What is wrong, and what to do."""

    what: str
    remedy: str


def _explain(
    causes: list[BaseException], repository: HubRepository, *, tried: str, remedy: str
) -> _Answer:
    return (
        _explain_repository(causes, repository, remedy=remedy)
        or _explain_server(causes, tried=tried)
        or _explain_network(causes, repository, tried=tried)
        or _Answer(
            f"the {repository.kind} {str(repository)!r} cannot be had from Hugging Face: "
            f"{_first_line(causes[0])}",
            remedy,
        )
    )


def _explain_repository(
    causes: list[BaseException], repository: HubRepository, *, remedy: str
) -> _Answer | None:
    """The Hub has no such repository or revision, or not for this user."""
    name, it = repository.name, f"the {repository.kind} {repository.name!r}"
    log_in = "log in: `hf auth login`, or set HF_TOKEN"
    if _of_class(causes, {"GatedRepoError"}):
        if _status(causes) == 403:
            return _Answer(
                f"{it} is gated, and your account has no access to it yet",
                f"ask for access at {repository.page}; `hf auth whoami` tells who you are there",
            )
        return _Answer(
            f"{it} is gated: you must accept its licence first",
            f"accept it at {repository.page}, then {log_in}",
        )
    if _of_class(causes, {"RepositoryNotFoundError"}):
        return _Answer(
            f"there is no {repository.kind} {name!r} on Hugging Face, or it is private",
            f"{remedy}; for a private one, {log_in}",
        )
    if _of_class(causes, {"RevisionNotFoundError"}):
        return _Answer(
            f"{it} has no revision {repository.revision!r}{_revisions(repository)}",
            f"give a branch, a tag or a whole commit, such as {name}@main",
        )
    return None


def _explain_server(causes: list[BaseException], *, tried: str) -> _Answer | None:
    """The Hub does not serve this user now."""
    status = _status(causes)
    if status == 401:
        return _Answer(
            "Hugging Face does not accept your token",
            "log in again: `hf auth login`, or correct or unset HF_TOKEN",
        )
    if status == _BUSY:
        return _Answer(
            f"Hugging Face has had too many requests from here: {tried}",
            "wait five minutes, then run the same command again; who is logged in (`hf auth "
            "login`) may ask more often",
        )
    if status is not None and status >= 500:
        return _Answer(
            f"Hugging Face answers with status {status}: {tried}",
            "run the same command again later; https://status.huggingface.co tells of failures",
        )
    return None


def _explain_network(
    causes: list[BaseException], repository: HubRepository, *, tried: str
) -> _Answer | None:
    """The Hub was not reached, and the cache does not have it all."""
    from huggingface_hub import constants

    absent = f"the {repository.kind} {str(repository)!r} is not in the cache"
    if repository.kind == "model":
        # It may have been meant as a folder, such as runs/first.
        absent = f"there is no folder {str(repository)!r} here, {absent}"
    elsewhere = repository.copy_remedy
    if part := _of_class(causes, {"IncompleteSnapshotError"}):
        found = _MISSING.search(str(part))
        missing = f" ({found[1]})" if found else ""
        return _Answer(
            f"the cache holds only a part of {str(repository)!r}: files are missing{missing}",
            f"run the same command with network; without one, {elsewhere}",
        )
    if constants.HF_HUB_OFFLINE:
        return _Answer(
            f"{absent}, and HF_HUB_OFFLINE is set",
            f"unset HF_HUB_OFFLINE; without network, {elsewhere}",
        )
    error = _network_error(causes)
    if error is None:
        return None
    if _is_unreachable(error):
        return _Answer(
            f"{absent}, and {hub_endpoint()} cannot be reached: {_first_line(error)}",
            f"check the network; without one, {elsewhere}",
        )
    return _Answer(
        f"the connection to Hugging Face breaks: {_first_line(error)}; {tried}",
        "check the network, then run the same command again: whole files are kept",
    )


def _first_line(error: BaseException) -> str:
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
