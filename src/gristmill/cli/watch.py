"""`watch`: a live page of all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill.cli.server_log import tell


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUNS",
            help="Run folders, and folders that contain some.",
            show_default="runs",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen; one that other machines can reach needs --api-key-file.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="0 takes a free one.")
    ] = 8001,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="API keys, one on each line; the page asks for one of them."
        ),
    ] = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Allow whoever has the printed address to stop a run, to make it save or "
            "validate, and to change its horizon.",
        ),
    ] = False,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Between looks at the files."),
    ] = 1.0,
) -> None:
    """Show all runs on one page while they train: curves, events, samples, time left.

    Runs are found in their folders, also those that begin later, and may train anywhere that writes
    to this disk. Nothing is changed in them, unless --control is given.
    """
    from gristmill.watch.server import WatchOptions
    from gristmill.watch.server import watch as run_server

    options = WatchOptions(
        host=host, port=port, api_key_file=api_key_file, control=control, interval=interval
    )
    run_server(runs or [Path("runs")], options, log=tell)
