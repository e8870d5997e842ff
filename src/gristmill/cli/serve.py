"""`serve`: models behind OpenAI's interface."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill.base.errors import UserError
from gristmill.cli.models import Device
from gristmill.cli.options import PrecisionName, PrecisionOption
from gristmill.cli.server_log import tell


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Run folders, checkpoints, Hugging Face folders or names on the Hub; NAME=MODEL "
            "chooses what clients call it.",
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen; one that other machines can reach needs --api-key-file.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="0 takes a free one.")
    ] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="API keys, one on each line; clients must send one of them."
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Texts that a model continues at once, as far as memory allows.",
            show_default="64",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Tokens of a prompt and its answer, if fewer than the model's own.",
            show_default="the model's own",
        ),
    ] = None,
    loaded: Annotated[
        int, typer.Option(metavar="N", min=1, help="Models in memory; others wait for their turn.")
    ] = 2,
    queue: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Texts that may wait for a slot; more are refused with 429."
        ),
    ] = 256,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="For one request.")
    ] = 600,
    drain: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="For running requests to end, after TERM."),
    ] = 30,
    max_body: Annotated[
        int, typer.Option(metavar="BYTES", min=1024, help="Largest body of a request.")
    ] = 4 * 2**20,
    precision: PrecisionOption = PrecisionName.AUTO,
    device: Device = "auto",
    template: Annotated[
        str | None,
        typer.Option(
            metavar="plain|chatml|FILE",
            help="How a conversation becomes text; the model's own if not given.",
        ),
    ] = None,
) -> None:
    """Serve models over HTTP with OpenAI's interface, and a page to talk to them.

    A run folder's newer checkpoints take over as they are saved. TERM finishes what runs.
    """
    from gristmill.serve.served import LoadOptions
    from gristmill.serve.server import ServerOptions
    from gristmill.serve.server import serve as run_server
    from gristmill.web.service import RequestLimits

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"{device!r} is not auto, cpu, cuda or mps", where="--device")
    load = LoadOptions(device, precision.value, slots, context, template, queue)
    options = ServerOptions(
        host=host,
        port=port,
        api_key_file=api_key_file,
        most_loaded=loaded,
        drain=drain,
        limits=RequestLimits(body=max_body, seconds=timeout),
        load=load,
    )
    run_server(models, options, log=tell)
