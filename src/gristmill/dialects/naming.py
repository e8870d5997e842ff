"""Names of runs, made from whatever another program calls them."""

from __future__ import annotations

import re


def run_name(text: str, otherwise: str) -> str:
    """A text as the name of a run, without what such names cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100] or otherwise
