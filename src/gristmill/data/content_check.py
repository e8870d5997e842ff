"""Token files are compared with the checksums in their manifests while a run trains on them.

Ids that were damaged but still lie inside the vocabulary train without a sign, so every start reads
all files of its token sets once:

    up to 128 MiB   before the first step
    more            in a thread of low priority, at most 128 MiB in a second, while training runs

An intact file is read to its end; the first damaged one ends the run. Until then a large set may
have trained some steps on damaged tokens; to check block by block before each step would need a
checksum for each block, which manifests do not have. One process of each node reads, since nodes
may have copies of their own. Sets without a manifest have no checksums and are not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from gristmill.base.errors import DataError, Problem
from gristmill.tokens.format import COPY_AGAIN, FileFacts, file_of
from gristmill.tokens.store import find_manifest

AT_ONCE = 1 << 27
"""Bytes that are compared before the first step."""
RATE = 1 << 27
"""The most bytes that are read in a second while training runs."""
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
        """What is wrong with the first damaged file."""
        self.in_background = False
        """Whether training runs meanwhile."""
        self._rate = rate
        self._stop = threading.Event()
        # It must not keep a process alive that ends for another reason.
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
        """Begin to compare; if there is little, wait for the result."""
        self.in_background = self.bytes > at_once
        self._thread.start()
        if not self.in_background:
            self._thread.join()
            self.require_intact()

    def stop(self) -> None:
        """Give up comparing, without waiting for it."""
        self._stop.set()

    def require_intact(self) -> None:
        """Refuse to continue if damage was found."""
        if self.damage is not None:
            raise DataError([self.damage])

    def _compare(self) -> None:
        rate = self._rate if self.in_background else float("inf")
        if sys.platform == "linux" and self.in_background:
            # Here, and only here, a priority belongs to a thread.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        started, read, buffer = time.monotonic(), 0, bytearray(_PIECE)
        for path, facts in self.files.items():
            digest = hashlib.sha256()
            try:
                with path.open("rb", buffering=0) as file:
                    while count := file.readinto(buffer):
                        # Neither reading nor hashing holds Python's global lock.
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
