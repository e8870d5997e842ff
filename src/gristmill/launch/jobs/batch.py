"""A job on a cluster: what it runs, the files that describe it, and what is known of it later.

    RUN/job/
    ├── run.toml        the settings as submitted: editing the run file later changes nothing
    ├── train.sbatch    the job, as a person could have written it
    └── job.json        launcher, ids and logs, for `gristmill launch status`, `logs` and `cancel`

A launcher is one module and one row of `submit.py`. It knows nothing of training: a job is words
to run, and the `[launch]` table says where.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import jinja2
from markupsafe import Markup as _Quoted

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import read_json, storage_errors, write_atomic, write_json
from gristmill.config.launch import LaunchConfig, LauncherName

RECORD = "job.json"
_VERSION = 1

Phase = Literal["waiting", "running", "ended", "unknown"]


@dataclass(frozen=True)
class ArrayTask:
    """One task of an array of jobs."""

    words: Sequence[str]
    """The last words of its command."""
    run: Path | None = None
    """The run folder, if it trains."""
    log: Path | None = None
    """A file that its output is appended to; that of the job if not given."""


@dataclass(frozen=True)
class BatchJob:
    """What a launcher is asked to run."""

    name: str
    command: Sequence[str]
    """The words that every process runs; for an array, those that all of its tasks begin with."""
    launch: LaunchConfig
    folder: Path
    """Where the files of the job go: RUN/job."""
    logs: Path
    """The folder of its logs."""
    work: Path
    """The folder it runs in."""
    run: Path | None = None
    """The run folder, if the command trains."""
    settings: str | None = None
    """The text of the run file in the folder, for nodes that cannot see it."""
    array: Mapping[int, ArrayTask] | None = None
    """For an array: its tasks by their numbers."""
    at_once: int | None = None
    """How many tasks of an array may run at the same time."""
    after: Sequence[str] = ()
    """Ids of jobs that have to succeed first."""
    elastic: bool = False
    """Whether the others continue when a process is lost."""


@dataclass(frozen=True)
class TaskRecord:
    """A task of an array that was submitted: one run of a sweep."""

    run: str
    """Its run folder."""
    id: str
    logs: Sequence[str]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobRecord:
    """A job that was submitted."""

    launcher: LauncherName
    id: str
    logs: Sequence[str]
    """Where its output goes, relative to the folder of the run or absolute; `*` for parts of the
    name that only the scheduler knows."""
    submitted: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the launcher needs to find it again."""
    earlier: Sequence[str] = field(default_factory=list)
    """Ids of jobs that this folder was submitted as before."""
    tasks: Sequence[TaskRecord] = field(default_factory=list)
    """The runs of a sweep, each of which has a record of its own besides."""


@dataclass(frozen=True)
class BatchState:
    """What a scheduler says of a job."""

    phase: Phase
    text: str
    """In the scheduler's own words."""
    exit: int | None = None
    """The exit status, if it has ended and the scheduler knows it."""

    @property
    def active(self) -> bool:
        return self.phase in ("waiting", "running")


class Launcher(Protocol):
    """A way to start a job and to find out about it."""

    unused: Collection[str]
    """Settings of `[launch]` that do nothing here."""
    lacks: Collection[str] = ()
    """Options of `gristmill launch` that cannot be had here."""

    def problems(self, launch: LaunchConfig) -> Iterable[Problem]:
        """What else is wrong with `[launch]`."""

    def files(self, job: BatchJob) -> dict[str, str]:
        """The files that describe the job, by name; the first is the one that is submitted."""

    def submit(self, job: BatchJob, file: Path) -> JobRecord:
        """Submit what `files` described."""

    def state(self, record: JobRecord) -> BatchState:
        """What became of the job."""

    def cancel(self, record: JobRecord) -> None:
        """End the job politely: its processes are asked to save first."""

    def output(self, record: JobRecord) -> Sequence[str] | None:
        """The command that prints the job's output, where it is in no file."""
        return None


def has_no_effect(launch: LaunchConfig, names: Iterable[str], where: str) -> list[Problem]:
    """The settings among some that were given and do nothing."""
    return [
        Problem(f"has no effect {where}", f"launch.{name}", f"add launch.{name}=unset")
        for name in names
        if getattr(launch, name) != LaunchConfig.model_fields[name].get_default()
    ]


def write_files(job: BatchJob, files: Mapping[str, str]) -> Path:
    """Put the files of a job into its folder; returns the one to submit."""
    with storage_errors(job.folder):
        job.folder.mkdir(parents=True, exist_ok=True)
        job.logs.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(job.folder / name, text)
    return job.folder / next(iter(files))


class UncertainError(UserError):
    """A scheduler did not say whether it has taken a job."""


@contextlib.contextmanager
def files_of_submission(job: BatchJob, files: Mapping[str, str]) -> Iterator[Path]:
    """The files of a job, in its folder; if the job is refused meanwhile, all is as before."""
    folders = [
        missing
        for folder in (job.folder, job.logs)
        for missing in (folder, *folder.parents)
        if not missing.exists()
    ]
    before = {name: _content(job.folder / name) for name in files}
    try:
        yield write_files(job, files)
    except UncertainError:
        raise
    except UserError:
        for name, content in before.items():
            if content is not None:
                write_atomic(job.folder / name, content)
            else:
                (job.folder / name).unlink(missing_ok=True)
        for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
            # Somebody may have put something there meanwhile.
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _content(file: Path) -> bytes | None:
    with storage_errors(file):
        return file.read_bytes() if file.is_file() else None


def write_record(folder: Path, record: JobRecord) -> None:
    """Note which job this folder was submitted as."""
    write_json(folder / RECORD, {"version": _VERSION, **asdict(record)})


def read_record(folder: Path) -> JobRecord | None:
    """The job that this folder was submitted as; None if it was not."""
    file = folder / RECORD
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        if content.pop("version") == _VERSION:
            tasks = [TaskRecord(**task) for task in content.pop("tasks", ())]
            return JobRecord(**content, tasks=tasks)
    except (KeyError, TypeError, AttributeError):
        pass
    raise DataError(
        "this is not what this version of `gristmill launch` writes",
        where=file,
        remedy="look for the job with the scheduler's own commands, and remove the file",
    )


def run_scheduler(words: Sequence[str], *, needs: str, timeout: float = 60.0) -> str:
    """What a command of a scheduler prints; `needs` says where the command is found."""
    result = try_scheduler(words, needs=needs, timeout=timeout)
    if result.returncode:
        said = " ".join((result.stderr or result.stdout).split()) or "it gave no reason"
        raise UserError(
            f"{words[0]} ended with {result.returncode}: {said}",
            where=shlex.join(words),
            remedy="mend what it complains about; nothing was submitted or changed",
            exit=Exit.CONFIG,
        )
    return result.stdout


def try_scheduler(
    words: Sequence[str], *, needs: str, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """As `run_scheduler`; an exit status other than 0 is up to the caller."""
    if shutil.which(words[0]) is None:
        raise UserError(
            f"{words[0]} is not installed here",
            where="command line",
            remedy=f"run this {needs}, or write the job with --dry-run and submit it there",
        )
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UncertainError(
            f"{words[0]} did not answer within {timeout:.0f} seconds",
            where=shlex.join(words),
            remedy="the scheduler may be down; try again later",
            exit=Exit.PEER,
        ) from None


def container_words(job: BatchJob) -> list[str]:
    """The words before a command that run it in the job's image; none without one, or where the
    scheduler does it itself."""
    launch = job.launch
    if not launch.container or launch.container_runtime == "pyxis":
        return []
    inside = [str(path) for path in dict.fromkeys((job.work, job.folder.parent))]
    binds = [word for path in (*inside, *launch.mounts) for word in ("--bind", path)]
    devices = ["--nv"] if launch.gpus_per_node else []
    return ["apptainer", "exec", *devices, *binds, "--pwd", str(job.work), launch.container]


# ------------------------------------------------------------------ job files from templates
#
# No value in them can be read as a command. A template is Jinja in `templates/`. Whatever it puts
# out has to say how it is quoted, by a filter:
#
#     {{ value | sh }}          one word of shell
#     {{ words | words }}       several words of shell
#     {{ value | directive }}   the value of an #SBATCH or #PBS line
#     {{ value | yaml }}        a value in YAML (JSON, which is YAML)
#     {{ text | lines(4) }}     lines of text in YAML, indented by so many spaces
#     {{ value | comment }}     the rest of a line that is a comment
#     {{ line | program }}      a line of shell as the user wrote it: `launch.setup`, nothing else
#
# Numbers need none. Text without a filter is an error, so a template that forgets one does not
# render, whatever the value is.

_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def render(template: str, **values: Any) -> str:
    """The text of a template."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gristmill.launch.jobs"),
        finalize=_refuse_unquoted,
        # With it, what a macro puts out counts as quoted; nothing else is left to escape.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sh": _sh,
        "words": _words,
        "directive": _directive,
        "yaml": _yaml,
        "lines": _lines,
        "comment": lambda value: _Quoted(_CONTROL.sub(" ", str(value))),
        "program": _Quoted,
    }
    return environment


def _refuse_unquoted(value: Any) -> Any:
    if isinstance(value, _Quoted) or type(value) is int:
        return value
    if value is None or isinstance(value, jinja2.Undefined):
        raise AssertionError("a template puts out a value that is not there")
    raise AssertionError(f"a template puts out {value!r} without saying how it is quoted")


def _sh(value: str | Path | int) -> _Quoted:
    if "\0" in str(value):
        raise _unprintable(value)
    return _Quoted(shlex.quote(str(value)))


def _words(values: Sequence[str | Path]) -> _Quoted:
    return _Quoted(" ".join(_sh(value) for value in values))


def _directive(value: str | Path | int) -> _Quoted:
    """Schedulers read such lines themselves, and the shell takes them for comments."""
    text = str(value)
    if _CONTROL.search(text):
        raise _unprintable(value)
    if not re.search(r"""[\s"'#\\]""", text):
        return _Quoted(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return _Quoted(f'"{escaped}"')


def _yaml(value: Any) -> _Quoted:
    """JSON writes rare letters as two halves, which YAML does not join; and YAML wants more of the
    unprintable ones escaped than JSON does."""
    text = json.dumps(value, ensure_ascii=False)
    return _Quoted(_UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def _lines(text: str, spaces: int) -> _Quoted:
    """Several lines of text in YAML, indented, as a person would write them."""
    # One line break at the end is what YAML keeps.
    plain = re.fullmatch(r"[^ \n](.*[^\n])?\n", text, re.DOTALL)
    if not plain or not all(line.isprintable() for line in text.split("\n")):
        return _yaml(text)
    indented = (f"{' ' * spaces}{line}" if line else "" for line in text.split("\n"))
    return _Quoted("|\n" + "\n".join(indented).rstrip("\n"))


def _unprintable(value: Any) -> UserError:
    return UserError(
        "this has a line break or another control character, which no job script can hold",
        where=repr(str(value)),
        remedy="use another name",
    )
