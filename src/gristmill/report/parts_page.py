"""The page of a preparation in parts: which are done, what runs, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from gristmill.base.files import write_atomic
from gristmill.report.page import STYLES as COMMON
from gristmill.report.page import whole_page

SCRIPTS = ("elements.js", "page_theme.js", "numbers.js", "parts.js")
STYLES = (*COMMON, "parts.css")


def write_parts_page(status: Mapping[str, Any], output: Path) -> None:
    """Write the page; it loads itself again every `status["again"]` seconds, if that is given."""
    made = datetime.now().astimezone().isoformat(timespec="seconds")
    output.parent.mkdir(parents=True, exist_ok=True)
    page = whole_page(
        {**status, "made": made}, title=str(status["name"]), scripts=SCRIPTS, styles=STYLES
    )
    write_atomic(output, page)
