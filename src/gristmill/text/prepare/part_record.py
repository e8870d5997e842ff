"""The record of a finished part: which command made it, from which text, and how much it is.

    .NAME.part-2-of-8.prepared.json

It is written once the files of the part are in place. So the same command, given again, knows that
the part is done, or that its sources have changed since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, sha256_text, write_sealed_json
from gristmill.text.prepare.ledger import Ledger
from gristmill.text.prepare.outputs import PreparedKey, PreparedSet
from gristmill.text.prepare.records import SetCounts, SpanId
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.sources.source import OnDamage, SkipReason
from gristmill.tokens.format import LEDGER_FILE, file_of, read_manifest, size_problems
from gristmill.tokens.store import find_manifest


@dataclass(frozen=True)
class PartRecord:
    """What made a finished part, and how much it is."""

    request: Mapping[str, Any]
    """`PrepareRequest.as_json`."""
    spans: str
    """Changes with the text that the part was made from."""
    counts: SetCounts
    """Of all its sets together."""
    dropped: bool
    """Whether any line was dropped."""
    damaged: bool
    """Whether a damaged file was left out."""

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
        return PartRecord(
            value["request"],
            value["spans"],
            SetCounts(**value["counts"]),
            value["dropped"],
            value["damaged"],
        )
    except (UserError, KeyError, TypeError):
        return None


def write_record(
    name: Path, asked: Mapping[str, Any], ids: Sequence[SpanId], keys: Sequence[PreparedKey]
) -> None:
    """Record that a part is done."""
    infos = [made.info for key in keys for made in key.sets]
    counts = SetCounts(
        sum(info.tokens for info in infos),
        sum(info.documents for info in infos),
        sum(info.text_bytes or 0 for info in infos),
    )
    value = {
        "request": dict(asked),
        "spans": _digest(ids),
        "counts": asdict(counts),
        "dropped": any(key.ledger.dropped for key in keys),
        "damaged": any(SkipReason.DAMAGED_FILE in key.ledger.skipped for key in keys),
    }
    write_sealed_json(record_file(name), value)


def prepared_keys(request: PrepareRequest) -> tuple[PreparedKey, ...]:
    """What an earlier process has made."""
    found = []
    for key in request.options.keys:
        prefixes = [request.prefix(key, split) for split in request.splits]
        sets = tuple(PreparedSet(prefix, read_manifest(prefix).info) for prefix in prefixes)
        ledger_file = file_of(request.prefix(key, None), LEDGER_FILE)
        ledger = Ledger.from_json(read_json(ledger_file))
        found.append(PreparedKey(key, ledger, ledger_file, sets))
    return tuple(found)


def _digest(ids: Sequence[SpanId]) -> str:
    return sha256_text("\n".join(one.fingerprint for one in ids))


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
