"""What a deduplication is asked for, and where its files are.

.NAME.dedup/whole.signed.json         how far the signing of the whole is; with parts, there is
.NAME.dedup/part-3-of-8.signed.json   one for each
.NAME.dedup/of-8.groups.json          all parts are grouped
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.text.dedup.signatures import SignatureSettings
from gristmill.tokens.store import open_tokens

MEMORY = 4 * 1000**3
LEAST_MEMORY = 64 * 1000**2
"""With less, sorting would read and write the same rows over and over."""


@dataclass(frozen=True)
class DedupRequest:
    """How duplicates are found and what is compared."""

    settings: SignatureSettings
    against: tuple[Path, ...] = ()
    """Older token sets: what they contain is dropped."""
    memory: int = MEMORY
    """Bytes that sorting signatures may take."""

    def as_json(self) -> dict[str, Any]:
        """All that decides about what is dropped."""
        older = [[str(prefix), _content(prefix)] for prefix in self.against]
        return {**self.settings.as_json(), "against": older}


def _content(prefix: Path) -> str:
    return open_tokens(prefix).info.fingerprint


def dedup_folder(whole: Path) -> Path:
    """The folder for the preparation of a name."""
    return whole.with_name(f".{whole.name}.dedup")


def role_of(number: int, of: int) -> str:
    """What the names of the files of a part begin with."""
    return "whole" if of == 1 else f"part-{number:0{len(str(of))}d}-of-{of}"


def signed_file(whole: Path, number: int, of: int) -> Path:
    """What tells how far the signing of a part is."""
    return dedup_folder(whole) / f"{role_of(number, of)}.signed.json"


def signed_divisions(whole: Path) -> set[int]:
    """Into how many parts a preparation was divided to be signed."""
    files = dedup_folder(whole).glob("part-*-of-*.signed.json")
    return {int(match[1]) for file in files if (match := re.search(r"-of-(\d+)\.", file.name))}


def groups_file(whole: Path, of: int) -> Path:
    """What tells that all parts are grouped."""
    return dedup_folder(whole) / f"of-{of}.groups.json"
