"""Which sets are merged, and what is merged beside their ids.

Sets are named by their prefixes, or by a glob over prefixes ("books.part-*"), which is sorted with
numbers in their order. Parts of a preparation, known by their names, must be there one and all: a
part left out would not be missed by anyone later. Their ledgers are merged along with them.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, write_json
from gristmill.text.prepare.ledger import ledger_from_json, merged_ledger
from gristmill.text.prepare.parts import PartNumber
from gristmill.tokens.format import file_of, is_manifest

_PART = re.compile(r"(.*)\.part-(\d+)-of-(\d+)")
_LEDGER = ".ledger.json"


def find_sets(names: Sequence[Path]) -> list[Path]:
    """The prefixes that names and globs stand for; parts must be complete."""
    found = [prefix for name in names for prefix in _expanded(name)]
    _refuse_missing(found)
    return found


def _expanded(name: Path) -> list[Path]:
    if not glob.has_magic(str(name)) or file_of(name, ".json").is_file():
        return [name]
    manifests = [path for path in glob.glob(f"{name}.json") if is_manifest(Path(path))]
    if not manifests:
        raise UserError("no token set matches", where=str(name), exit=Exit.DATA)
    prefixes = [path.removesuffix(".json") for path in manifests]
    return [Path(prefix) for prefix in sorted(prefixes, key=_by_number)]


def _by_number(text: str) -> list[tuple[int, str]]:
    pieces = re.split(r"(\d+)", text)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]


def _refuse_missing(prefixes: Sequence[Path]) -> None:
    groups: dict[tuple[str, int], list[int]] = {}
    for prefix in prefixes:
        match = _PART.fullmatch(str(prefix))
        if match:
            groups.setdefault((match[1], int(match[3])), []).append(int(match[2]))
    for (whole, of), numbers in groups.items():
        if numbers == list(range(1, of + 1)):
            continue
        missing = [number for number in range(1, of + 1) if number not in numbers]
        what = "the parts are not in their order, or one is given twice"
        if missing:
            names = ", ".join(PartNumber(number, of).suffix for number in missing[:5])
            what = f"{len(missing)} of {of} parts are not given: {names}"
        raise UserError(
            what,
            where=whole,
            remedy=f'prepare what is missing, and give all parts: "{whole}.part-*-of-{of}"',
            exit=Exit.DATA,
        )


def merge_ledgers(prefixes: Sequence[Path], output: Path) -> None:
    """Write the account of all sets beside the merged one, if each has one."""
    files = [file_of(prefix, _LEDGER) for prefix in prefixes]
    if all(file.is_file() for file in files):
        ledgers = [ledger_from_json(read_json(file)) for file in files]
        write_json(file_of(output, _LEDGER), merged_ledger(ledgers).as_json())
