"""The page of a token set, drawn from the values that `tokens inspect` finds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from gristmill.base.files import write_atomic
from gristmill.report.page import STYLES as COMMON
from gristmill.report.page import whole_page

SCRIPTS = ("elements.js", "page_theme.js", "numbers.js", "tokens.js")
STYLES = (*COMMON, "tokens.css")


def write_tokens_page(statistics: Mapping[str, Any], output: Path) -> Path:
    """Write the page; returns its path."""
    made = datetime.now().astimezone().isoformat(timespec="minutes")
    content = {**statistics, "made": made}
    output.parent.mkdir(parents=True, exist_ok=True)
    title = str(statistics["name"])
    write_atomic(output, whole_page(content, title=title, scripts=SCRIPTS, styles=STYLES))
    return output
