"""How far each part of a preparation is, from the files beside it alone.

    .NAME.part-2-of-8.prepared.json   done (`PartRecord`)
    .NAME.part-2-of-8.prepare.lock    who works on it
    .NAME.part-2-of-8.prepare.json    how far it was when it was saved last
    NAME.part-2-of-8.log              what it printed, if `--engine` runs the parts
    .NAME.parts-of-8.json             what `--engine` has to remember (`PartsState`)

So it does not matter who runs the parts. The lock names a process and its host. If the host is this
one, the process is looked up; elsewhere, a part runs if it was saved a moment ago.

The record of a finished part says which command made it, from which text, and how much it is. It is
written once the files of the part are in place. So the same command, given again, knows that the
part is done, or that its sources have changed since.
"""

from __future__ import annotations

import enum
import glob
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import read_json, sha256_text, write_json
from gristmill.base.locks import OutputLock
from gristmill.text.prepare.dedup_request import (
    dedup_folder,
    role_of,
    signed_divisions,
    signed_file,
)
from gristmill.text.prepare.journal import (
    Cursor,
    JournalGeneration,
    SetCounts,
    SpanId,
    journal_file,
)
from gristmill.text.prepare.ledger import Ledger
from gristmill.text.prepare.outputs import PreparedKey, PreparedSet
from gristmill.text.prepare.request import PartNumber, PrepareRequest, split_name
from gristmill.text.prepare.signing import SignedPart
from gristmill.text.sources.source import UNREADABLE, OnDamage, SkipReason
from gristmill.tokens.format import LEDGER_FILE, file_of, is_manifest, read_manifest, size_problems
from gristmill.tokens.store import find_manifest


@dataclass(frozen=True)
class PartRecord:
    """What made a finished part, and how much it is."""

    request: Mapping[str, Any]
    """`PrepareRequest.as_json`."""
    spans: str
    """Changes with the text that the part was made from."""
    counts: SetCounts
    """The sum over all its sets."""
    dropped: bool
    """Whether any faulty line was dropped."""
    damaged: bool
    """Whether a damaged file was left out."""
    manifests: Sequence[str]
    """The manifests of all its sets, as seen from the folder of the record."""

    def files_there(self, name: Path) -> bool:
        """Whether nobody has removed the part since."""
        return all((name.parent / manifest).is_file() for manifest in self.manifests)

    def same_request(self, request: PrepareRequest, asked: Mapping[str, Any]) -> bool:
        """Whether this command made the part; if another did and it is there, that is an error."""
        differing = [key for key in asked if self.request.get(key) != asked[key]]
        if differing and _in_place(request):
            raise UserError(
                "a different command made this part of a token set: it differs in: "
                + ", ".join(differing),
                where=str(request.name),
                remedy="give the same command, use another name, or start over with --overwrite",
                exit=Exit.REFUSED,
            )
        return not differing

    def holds(self, request: PrepareRequest, ids: Sequence[SpanId]) -> bool:
        """Whether the part is what the same command would make now."""
        allowed = not (self.dropped and request.strict) and not (
            self.damaged and request.on_damage is OnDamage.STOP
        )
        return allowed and self.spans == _digest(ids) and _in_place(request)


def record_file(name: Path) -> Path:
    """Where the record of a part is."""
    return name.with_name(f".{name.name}.prepared.json")


def read_record(name: Path) -> PartRecord | None:
    """The record of a part, if there is one that can be read."""
    try:
        value = read_json(record_file(name))
        return PartRecord(**{**value, "counts": SetCounts(**value["counts"])})
    except (UserError, KeyError, TypeError):
        return None


def write_record(
    name: Path, asked: Mapping[str, Any], ids: Sequence[SpanId], keys: Sequence[PreparedKey]
) -> None:
    """Record that a part is done."""
    infos = [prepared.info for key in keys for prepared in key.sets]
    counts = SetCounts(
        sum(info.tokens for info in infos),
        sum(info.documents for info in infos),
        sum(info.text_bytes or 0 for info in infos),
    )
    record = PartRecord(
        request=asked,
        spans=_digest(ids),
        counts=counts,
        dropped=any(reason in UNREADABLE for key in keys for reason in key.ledger.dropped),
        damaged=any(SkipReason.DAMAGED_FILE in key.ledger.skipped for key in keys),
        manifests=[
            os.path.relpath(file_of(prepared.prefix, ".json"), name.parent)
            for key in keys
            for prepared in key.sets
        ],
    )
    write_json(record_file(name), asdict(record))


def prepared_keys(request: PrepareRequest) -> tuple[PreparedKey, ...]:
    """What an earlier process has made."""
    prepared = []
    for key in request.options.keys:
        prefixes = [request.prefix(key, split) for split in request.splits]
        sets = tuple(PreparedSet(prefix, read_manifest(prefix).info) for prefix in prefixes)
        ledger_file = file_of(request.prefix(key, None), LEDGER_FILE)
        ledger = Ledger.from_json(read_json(ledger_file))
        prepared.append(PreparedKey(key, ledger, ledger_file, sets))
    return tuple(prepared)


def _digest(ids: Sequence[SpanId]) -> str:
    return sha256_text("\n".join(id.fingerprint for id in ids))


def _in_place(request: PrepareRequest) -> bool:
    """Whether all sets of a part are there as a whole."""
    for key in request.options.keys:
        if not file_of(request.prefix(key, None), LEDGER_FILE).is_file():
            return False
        for split in request.splits:
            prefix = request.prefix(key, split)
            try:
                manifest = find_manifest(prefix)
            except UserError:
                return False
            if manifest is None or size_problems(prefix, manifest):
                return False
    return True


_FRESH = 60.0
"""Seconds since a part was saved during which it is taken to run."""


class PartState(enum.StrEnum):
    """Where a part is."""

    DONE = "done"
    SIGNED = "signed"
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
        last = (
            JournalGeneration.from_json(read_json(path)["generations"][0])
            if path.exists()
            else None
        )
    except (UserError, KeyError, TypeError, IndexError):
        return None
    if last is None:
        return None
    sets = [saved_set for column in last.columns for saved_set in column["sets"]]
    counts = SetCounts(
        sum(saved_set["writer"]["tokens"] for saved_set in sets),
        sum(saved_set["writer"]["documents"] for saved_set in sets),
        sum(saved_set["text_bytes"] for saved_set in sets),
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
        counts = " and ".join(str(count) for count in sorted(divisions))
        raise UserError(
            f"this was divided into parts more than once: into {counts}",
            where=str(output),
            remedy="say which is meant: --parts",
        )
    of = of or next(iter(divisions), None)
    if of is None:
        if not finished_sets(output):
            raise DataError(
                "there are no parts of a token set here, and no finished one",
                where=output,
                remedy="give the name that prepare was given with -o",
            )
        return []
    state = PartsState.open(name, of)
    statuses = [_status(name, PartNumber(number, of), state) for number in range(1, of + 1)]
    removed = all(status.state is PartState.MISSING for status in statuses)
    return [] if removed and finished_sets(output) else statuses


def finished_sets(output: Path) -> list[Path]:
    """The sets of a preparation that are there as a whole."""
    pattern = glob.escape(str(output)).replace("{split}", "*")
    manifests = [path for ending in (".json", "_*.json") for path in glob.glob(pattern + ending)]
    return [
        Path(path.removesuffix(".json"))
        for path in sorted(manifests)
        if not re.search(r"\.part-\d+-of-\d+\.json$", path) and is_manifest(Path(path))
    ]


def _divisions(name: Path) -> set[int]:
    """Into how many parts a preparation was divided."""
    part = r"\.part-\d+-of-(\d+)\.(?:prepared\.json|prepare\.json|prepare\.lock|log)"
    pattern = re.compile(rf"\.?{re.escape(name.name)}(?:{part}|\.parts-of-(\d+)\.json)")
    names = os.listdir(name.parent) if name.parent.is_dir() else []
    matches = [match for file in names if (match := pattern.fullmatch(file))]
    return {int(match[1] or match[2]) for match in matches} | signed_divisions(name)


def _status(whole: Path, part: PartNumber, state: PartsState) -> PartStatus:
    name = whole.with_name(whole.name + part.suffix)
    log = log_file(name) if log_file(name).is_file() else None
    saved, record = saved_counts(name), read_record(name)
    counts = saved[0] if saved else SetCounts()
    if state.merged:
        return PartStatus(part, PartState.DONE, record.counts if record else counts, log=log)
    signing = signed_file(whole, part.number, part.of)
    if holder := _holder(name, signing):
        return PartStatus(part, PartState.RUNNING, counts, holder, log)
    if why := state.failed.get(str(part.number)):
        return PartStatus(part, PartState.FAILED, counts, why, log)
    if saved:
        return PartStatus(part, PartState.INTERRUPTED, counts, log=log)
    if record and record.files_there(name):
        return PartStatus(part, PartState.DONE, record.counts, log=log)
    if SignedPart.load(dedup_folder(whole), role_of(part.number, part.of)):
        return PartStatus(part, PartState.SIGNED, log=log)
    if signing.is_file():
        return PartStatus(part, PartState.INTERRUPTED, log=log)
    return PartStatus(part, PartState.MISSING, log=log)


def _holder(name: Path, signing: Path) -> str | None:
    """Who works on a part, if anybody does."""
    lock = OutputLock(name, purpose="prepare").path
    try:
        holder = lock.read_text().strip()
        files = [path for path in (lock, journal_file(name), signing) if path.exists()]
        newest = max(path.stat().st_mtime for path in files)
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
