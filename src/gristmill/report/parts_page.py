"""The page of a preparation in parts: which are done, what runs, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from gristmill.base.files import write_atomic
from gristmill.report.page import STYLES, whole_page

_SCRIPTS = ("elements.js", "page_theme.js", "numbers.js", "parts.js")


def write_parts_page(status: Mapping[str, Any], output: Path) -> None:
    """Write the page; it loads itself again every `status["again"]` seconds, if that is given."""
    made = datetime.now().astimezone().isoformat(timespec="seconds")
    output.parent.mkdir(parents=True, exist_ok=True)
    styles = (*STYLES, "parts.css")
    page = whole_page(
        {**status, "made": made}, title=str(status["name"]), scripts=_SCRIPTS, styles=styles
    )
    write_atomic(output, page)
