"""Checks that token files are as they were written, and do not change while a run reads them.

Damaged ids that still lie inside the vocabulary would go unnoticed in training, so every start
compares all files of its token sets with the checksums in their manifests:

    up to 128 MiB   before the first step
    more            in a thread of low priority, at most 128 MiB in a second, while training runs

The first damaged file ends the run. With a large set, some steps may have trained on damaged tokens
by then; checking each block before it is used would need a checksum per block, which manifests do
not have. One process per node reads, since nodes may have copies of their own. Sets without a
manifest have no checksums and are not compared.

If a memory-mapped file is truncated, the next read beyond its end kills the process with SIGBUS; if
it is overwritten, the data changes silently. So the size and modification time of every file are
recorded when a set is opened and compared before the reads of each step, at about a microsecond per
file. Sets with many files are checked a few files per step, in turn. A change between the check and
the read can still go unnoticed. Sets in memory need no check.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.tokens.format import COPY_AGAIN, FileFacts, file_of
from gristmill.tokens.store import find_manifest

AT_ONCE = 1 << 27
"""The most bytes that are compared before the first step."""
RATE = 1 << 27
"""The most bytes that are read per second while training runs."""
_PIECE = 1 << 20
_NICE = 19


class ContentCheck:
    """Compares the files of token sets with their manifests, once."""

    def __init__(self, sets: Iterable[str], *, rate: float = RATE) -> None:
        self.files: dict[Path, FileFacts] = {}
        for prefix in map(Path, dict.fromkeys(sets)):
            manifest = find_manifest(prefix)
            for suffix, facts in manifest.files.items() if manifest is not None else ():
                self.files[file_of(prefix, suffix)] = facts
        self.damage: Problem | None = None
        """The problem with the first damaged file."""
        self.in_background = False
        """Whether training runs at the same time."""
        self._rate = rate
        self._stop = threading.Event()
        # It must not keep the process alive.
        self._thread = threading.Thread(target=self._compare, name="content check", daemon=True)

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(facts.bytes for facts in self.files.values())

    @property
    def done(self) -> bool:
        """Whether everything was compared, or damage was found."""
        return not self._thread.is_alive()

    def start(self, *, at_once: int = AT_ONCE) -> None:
        """Start to compare; with little data, wait for the result."""
        self.in_background = self.bytes > at_once
        self._thread.start()
        if not self.in_background:
            self._thread.join()
            self.require_intact()

    def stop(self) -> None:
        """Stop comparing, without waiting for the thread."""
        self._stop.set()

    def require_intact(self) -> None:
        """Refuse to continue if damage was found."""
        if self.damage is not None:
            raise DataError([self.damage])

    def _compare(self) -> None:
        rate = self._rate if self.in_background else float("inf")
        if sys.platform == "linux" and self.in_background:
            # Only on Linux does a priority belong to a single thread.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        started, read, buffer = time.monotonic(), 0, bytearray(_PIECE)
        for path, facts in self.files.items():
            digest = hashlib.sha256()
            try:
                with path.open("rb", buffering=0) as file:
                    while count := file.readinto(buffer):
                        # Neither reading nor hashing holds the GIL.
                        digest.update(memoryview(buffer)[:count])
                        read += count
                        early = started + read / rate - time.monotonic()
                        if self._stop.wait(max(0.0, early)):
                            return
            except OSError as error:
                self.damage = Problem(f"cannot read: {error.strerror}", str(path), COPY_AGAIN)
                return
            if digest.hexdigest() != facts.sha256:
                what = "the content is not what was written: its checksum differs"
                self.damage = Problem(what, str(path), COPY_AGAIN)
                return


FILES_PER_STEP = 16


class TokenFileWatch:
    """Detects changes to the files of a token set."""

    def __init__(self, paths: Iterable[Path]) -> None:
        states = ((path, _size_and_time(path)) for path in paths)
        self.states = {path: state for path, state in states if state is not None}
        self._turns = itertools.cycle(self.states)

    def check(self) -> None:
        """Refuse to continue if one of the next few files changed."""
        count = min(FILES_PER_STEP, len(self.states))
        self._compare(itertools.islice(self._turns, count))

    def check_all(self) -> None:
        """Refuse to continue if any file changed."""
        self._compare(self.states)

    def _compare(self, paths: Iterable[Path]) -> None:
        problems = []
        for path in paths:
            before, now = self.states[path], _size_and_time(path)
            if now == before:
                continue
            if now is None:
                what = "this file of the token set was removed while the run was reading it"
            elif now[0] != before[0]:
                what = f"this file of the token set changed during the run, from {before[0]} bytes "
                what += f"to {now[0]}"
            else:
                what = "this file of the token set was written to during the run"
            remedy = "restore the set; the same command then resumes from the last checkpoint"
            problems.append(Problem(what, where=str(path), remedy=remedy))
        if problems:
            raise UserError(problems, exit=Exit.DATA)


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
