"""What the groups of `faults.py` share: commands in children, faults in file operations, verdicts.

A command runs in a fork of this process, which has imported everything and computes nothing itself:
that takes 0.3 s, where a new interpreter would import for seconds. It is the whole command line
otherwise, from its arguments to its exit status.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gristmill.base.errors import Exit
from gristmill.base.exits import exit_on_stop_signals

PATIENCE = 120.0
"""Seconds after which a child hangs."""

POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

CLEAR = {int(status) for status in Exit} - {int(Exit.INTERNAL)} | {130}
"""Exit statuses that say what happened."""

TIMED = {"time", "tokens_per_second", "step_seconds", "tflops", "tflops_causal", "memory_bytes"}
TIMED |= {"data_wait", "sync_wait", "seconds"}


@dataclass(frozen=True)
class Verdict:
    """What became of one fault; the texts are empty where all is well."""

    fault: str
    noticed: bool = True
    """The program said something, or there was nothing to notice: it went on where it was."""
    lost: str = ""
    """Something good that is gone."""
    different: str = ""
    """Bits that differ from an undisturbed run's."""
    unclear: str = ""
    """A traceback, a status that is not documented, a hang."""

    @property
    def bad(self) -> bool:
        return bool(self.lost or self.different or self.unclear) or not self.noticed


class Group(Protocol):
    """One kind of faults."""

    name: str
    count: int
    """How many are tried unless asked otherwise."""

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        """Inject faults in an empty folder, one after the other."""
        ...


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    code: int
    """Its status; minus the signal that killed it."""
    output: str
    hangs: bool = False

    @property
    def unclear(self) -> str:
        if self.hangs:
            return f"hangs: {self._last}"
        if "Traceback (most recent call last)" in self.output or self.code not in CLEAR:
            return f"status {self.code}: {self._last}"
        return ""

    @property
    def _last(self) -> str:
        lines = self.output.strip().splitlines() or [""]
        return lines[-1][:300]


def gristmill(
    folder: Path,
    *words: str,
    before: Callable[[], None] | None = None,
    after: float | None = None,
    send: signal.Signals = signal.SIGKILL,
) -> Ended:
    """Run a command in a folder. `before` is called in the child; `after` so many seconds a signal
    is sent."""
    log = folder / ".output"
    # A signal waits until the child is where a new interpreter would be.
    signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
    pid = os.fork()
    if pid == 0:
        _be_child(folder, log, words, before)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)
    hangs = False
    started = time.monotonic()
    status: int | None = None
    while status is None:
        done, found = os.waitpid(pid, os.WNOHANG)
        if done:
            status = found
            break
        spent = time.monotonic() - started
        if after is not None and spent >= after:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, send)
            after = None
        if spent > PATIENCE:
            hangs = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return Ended(os.waitstatus_to_exitcode(status), log.read_text(errors="replace"), hangs)


def _be_child(
    folder: Path,
    log: Path,
    words: Sequence[str],
    before: Callable[[], None] | None,
) -> None:
    code = 70
    try:
        os.chdir(folder)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        for number in POLITE:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
        if words[:1] == ("train",):
            exit_on_stop_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)
        sys.argv = ["gristmill", *words]
        if before is not None:
            before()
        from gristmill.__main__ import main

        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# ------------------------------------------------------------------ faults in file operations

OPERATIONS = ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "ftruncate", "link")
WRITES = ("open", "fsync", "rename", "replace", "mkdir")


@dataclass
class Operations:
    """Counts file operations below the current folder, and lets something happen at one of them.
    Only the process that installs it is concerned, not its children."""

    names: Sequence[str] = OPERATIONS
    at: int = -1
    act: Callable[[str, Any], None] | None = None
    report: Path | None = None
    """Where the number of operations is written at each."""

    def install(self) -> None:
        self.seen, self.pid = 0, os.getpid()
        for name in self.names:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if os.getpid() == self.pid and not self._is_read(name, args):
                number, self.seen = self.seen, self.seen + 1
                if self.report is not None:
                    report = real if name == "open" else _OPEN
                    handle = report(str(self.report), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                    os.write(handle, str(self.seen).encode())
                    os.close(handle)
                if number == self.at and self.act is not None:
                    self.act(name, args[0] if args else None)
            return real(*args, **more)

        return call

    @staticmethod
    def _is_read(name: str, args: Sequence[Any]) -> bool:
        if name == "open":
            writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
            return len(args) < 2 or not int(args[1]) & writes
        return False


_OPEN = os.open


def die(name: str, path: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(number: int) -> Callable[[str, Any], None]:
    def act(name: str, path: Any) -> None:
        where = path if isinstance(path, str | os.PathLike) else None
        raise OSError(number, os.strerror(number), where)

    return act


ERRORS = {"no space": errno.ENOSPC, "quota": errno.EDQUOT, "I/O error": errno.EIO}


def count_operations(folder: Path, *words: str, names: Sequence[str] = OPERATIONS) -> int:
    """How many operations a command makes."""
    report = folder / ".operations"
    ended = gristmill(folder, *words, before=Operations(names, report=report).install)
    assert ended.code == 0, ended.output
    return int(report.read_text())


# ------------------------------------------------------------------ damage


def flip(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return ""
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} flipped"


def cut(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    size = rng.choice([0, 1, len(content) // 2, max(0, len(content) - 1)])
    path.write_bytes(content[:size])
    return f"cut to {size} bytes"


def extend(path: Path, rng: random.Random) -> str:
    more = rng.randrange(1, 100)
    path.write_bytes(path.read_bytes() + rng.randbytes(more))
    return f"{more} bytes added"


def garbage(path: Path, rng: random.Random) -> str:
    path.write_bytes(rng.randbytes(path.stat().st_size))
    return "other bytes of the same length"


def remove(path: Path, rng: random.Random) -> str:
    path.unlink()
    return "removed"


def swap_blocks(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    middle = len(content) // 2 // 8 * 8
    path.write_bytes(content[middle : 2 * middle] + content[:middle] + content[2 * middle :])
    return "halves swapped"


DAMAGE = (flip, flip, flip, cut, extend, garbage, remove, swap_blocks)


# ------------------------------------------------------------------ comparing


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def weights_of(run: Path) -> list[str]:
    """The bits of weights and optimizer state in a run's newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    return [newest.name, *(sha256(file) for file in sorted(newest.glob("*.safetensors")))]


def history_of(run: Path) -> list[dict[str, Any]]:
    """All numbers of a run that must not depend on what happened to it."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in TIMED}
        for line in lines
        if line["kind"] != "event"
    ]


def difference(run: Path, reference: Path, *, history: bool = True) -> str:
    """How a finished run differs from the undisturbed one."""
    if weights_of(run) != weights_of(reference):
        return "other weights"
    if history and history_of(run) != history_of(reference):
        return "other losses"
    return ""


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def fresh(path: Path) -> Path:
    """An empty folder, whatever was there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
