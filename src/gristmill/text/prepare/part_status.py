"""How far each part of a preparation is, from the files beside it alone.

    .NAME.part-2-of-8.prepared.json   done
    .NAME.part-2-of-8.prepare.lock    who works on it
    .NAME.part-2-of-8.prepare.json    how far it was when it was saved last
    NAME.part-2-of-8.log              what it printed, if `--engine` runs the parts
    .NAME.parts-of-8.json             what `--engine` has to remember (`PartsState`)

So it does not matter who runs the parts. The lock names a process and its host. If the host is this
one, the process is looked up; elsewhere, a part runs if it was saved a moment ago.
"""

from __future__ import annotations

import enum
import glob
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import read_json, write_json
from gristmill.base.locks import OutputLock
from gristmill.text.prepare.journal import Generation, journal_file
from gristmill.text.prepare.part_record import read_record
from gristmill.text.prepare.parts import PartNumber
from gristmill.text.prepare.records import Cursor, SetCounts
from gristmill.text.prepare.request import split_name
from gristmill.tokens.format import is_manifest

_FRESH = 60.0
"""Seconds since a part was saved during which it is taken to run."""


class PartState(enum.StrEnum):
    """Where a part is."""

    DONE = "done"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    MISSING = "missing"


@dataclass(frozen=True)
class PartStatus:
    """How far one part is."""

    part: PartNumber
    state: PartState
    counts: SetCounts = field(default_factory=SetCounts)
    """What was saved so far."""
    what: str | None = None
    """Who works on it, or why it failed."""
    log: Path | None = None


@dataclass
class PartsState:
    """What whoever runs the parts has to remember."""

    path: Path
    engine: str = ""
    jobs: Mapping[str, Any] = field(default_factory=dict)
    """What the engine needs to find its tasks again."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why parts failed for good, by number."""
    merging: bool = False
    """All parts are done, and what stands under the name of the whole may be replaced."""
    merged: bool = False
    """The whole is complete, and the parts may be removed."""

    @classmethod
    def open(cls, name: Path, of: int) -> PartsState:
        """What an earlier process has left, if any."""
        path = name.with_name(f".{name.name}.parts-of-{of}.json")
        return cls(path, **read_json(path)) if path.is_file() else cls(path)

    def save(self) -> None:
        write_json(self.path, {key: value for key, value in asdict(self).items() if key != "path"})


def log_file(name: Path) -> Path:
    """Where a part logs, if it does not write to a terminal."""
    return name.with_name(f"{name.name}.log")


def saved_counts(name: Path) -> tuple[SetCounts, Cursor] | None:
    """How much an unfinished part had done when it was saved last, and what came next."""
    path = journal_file(name)
    try:
        last = Generation.from_json(read_json(path)["generations"][0]) if path.exists() else None
    except (UserError, KeyError, TypeError, IndexError):
        return None
    if last is None:
        return None
    sets = [one for column in last.columns for one in column["sets"]]
    counts = SetCounts(
        sum(one["writer"]["tokens"] for one in sets),
        sum(one["writer"]["documents"] for one in sets),
        sum(one["text_bytes"] for one in sets),
    )
    return counts, last.cursor


def whole_name(output: Path) -> Path:
    """What the names of all parts begin with; see `PrepareRequest.name`."""
    return Path(split_name(str(output), None))


def part_statuses(output: Path, of: int | None = None) -> list[PartStatus]:
    """How far all parts of a preparation are; none are left if they have been merged."""
    name = whole_name(output)
    divisions = _divisions(name)
    if of is None and len(divisions) > 1:
        counts = " and ".join(str(one) for one in sorted(divisions))
        raise UserError(
            f"this was divided into parts more than once: into {counts}",
            where=str(output),
            remedy="say which is meant: --parts",
        )
    of = of or next(iter(divisions), None)
    if of is None or (of not in divisions and finished_sets(output)):
        if not finished_sets(output):
            raise DataError(
                "there are no parts of a token set here, and no finished one",
                where=output,
                remedy="give the name that prepare was given with -o",
            )
        return []
    state = PartsState.open(name, of)
    return [_status(name, PartNumber(number, of), state) for number in range(1, of + 1)]


def finished_sets(output: Path) -> list[Path]:
    """The sets of a preparation that are there as a whole."""
    pattern = glob.escape(str(output)).replace("{split}", "*")
    found = [path for ending in (".json", "_*.json") for path in glob.glob(pattern + ending)]
    return [
        Path(path.removesuffix(".json"))
        for path in sorted(found)
        if not re.search(r"\.part-\d+-of-\d+\.json$", path) and is_manifest(Path(path))
    ]


def _divisions(name: Path) -> set[int]:
    """Into how many parts a preparation was divided."""
    part = r"\.part-\d+-of-(\d+)\.(?:prepared\.json|prepare\.json|prepare\.lock|log)"
    pattern = re.compile(rf"\.?{re.escape(name.name)}(?:{part}|\.parts-of-(\d+)\.json)")
    names = os.listdir(name.parent) if name.parent.is_dir() else []
    found = [match for one in names if (match := pattern.fullmatch(one))]
    return {int(match[1] or match[2]) for match in found}


def _status(whole: Path, part: PartNumber, state: PartsState) -> PartStatus:
    name = whole.with_name(whole.name + part.suffix)
    log = log_file(name) if log_file(name).is_file() else None
    saved, record = saved_counts(name), read_record(name)
    counts = saved[0] if saved else SetCounts()
    if state.merged:
        return PartStatus(part, PartState.DONE, record.counts if record else counts, log=log)
    if holder := _holder(name):
        return PartStatus(part, PartState.RUNNING, counts, holder, log)
    if why := state.failed.get(str(part.number)):
        return PartStatus(part, PartState.FAILED, counts, why, log)
    if saved:
        return PartStatus(part, PartState.INTERRUPTED, counts, log=log)
    if record:
        return PartStatus(part, PartState.DONE, record.counts, log=log)
    return PartStatus(part, PartState.MISSING, log=log)


def _holder(name: Path) -> str | None:
    """Who works on a part, if anybody does."""
    lock = OutputLock(name, purpose="prepare").path
    try:
        holder = lock.read_text().strip()
        newest = max(path.stat().st_mtime for path in (lock, journal_file(name)) if path.exists())
    except (OSError, ValueError):
        return None
    match = re.fullmatch(r"process (\d+) on (\S+)", holder)
    if match and match[2] == socket.gethostname():
        return holder if _alive(int(match[1])) else None
    return holder or "a process" if time.time() - newest < _FRESH else None


def _alive(process: int) -> bool:
    # Not by trying the lock: whoever starts at that moment would be refused it.
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
