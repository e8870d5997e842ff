"""What servers say: one line for each event, on the error output."""

from __future__ import annotations

import os

import typer

from gristmill.base.errors import printable
from gristmill.base.units import timestamp


def tell(what: str) -> None:
    """Print an event with its time. A server does not fail because nobody reads them any more."""
    try:
        typer.echo(f"{timestamp()} {printable(what)}", err=True)
    except OSError:
        # Otherwise the unwritten rest would fail again when the program ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
