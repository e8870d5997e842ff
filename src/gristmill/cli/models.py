"""`generate` and `export`: what to do with a model.

`generate --chat`: a model answers, once or as long as somebody asks.

`import`: weights of other programs.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gristmill.base.errors import UserError, printable
from gristmill.base.files import read_json
from gristmill.base.units import format_bytes, format_count
from gristmill.cli.dialects import DialectCommand, DialectName
from gristmill.cli.options import PrecisionName, PrecisionOption, command_options
from gristmill.cli.progress import ProgressLine
from gristmill.text.tokenizers.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from gristmill.export.adapter import ExportedAdapter
    from gristmill.export.folder import Exported
    from gristmill.export.gguf import ExportedFile
    from gristmill.generate.text import ChatGenerator
    from gristmill.model import Model


class Gelu(enum.StrEnum):
    """The two functions of that name."""

    EXACT = "gelu"
    TANH = "gelu_tanh"


def import_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="nanoGPT's ckpt.pt; or the folder of a Megatron-LM checkpoint, or of all of a "
            "run's, of which the newest is taken.",
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder for the model.")
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE|FOLDER",
            help="The tokenizer that the model was trained with, such as gpt2: generate, evaluate "
            "and export need it, a start of training does not.",
        ),
    ] = None,
    activation: Annotated[
        Gelu | None,
        typer.Option(
            help="Of nanoGPT, whose files do not say it: gelu, or gelu_tanh if it was trained with "
            "a version before the middle of 2023.",
            show_default="gelu",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is in FOLDER.")
    ] = False,
) -> None:
    """Make a model folder from a checkpoint of nanoGPT, Megatron-LM or Megatron-DeepSpeed.

    Runs nothing that is in the files. The folder can be model.start of a run.
    """
    from gristmill.foreign.folder import import_model, open_checkpoint

    chosen = None if tokenizer is None else open_tokenizer(tokenizer)
    with ProgressLine("opening") as line:
        line.update(0, None, str(source))
        model = open_checkpoint(source, activation=None if activation is None else activation.value)
    with ProgressLine("importing") as line:

        def show(done: int, total: int) -> None:
            line.update(done, total, f"{format_bytes(done)} of {format_bytes(total)}")

        done = import_model(model, folder, tokenizer=chosen, overwrite=overwrite, progress=show)
    for note in model.notes:
        typer.echo(f"warning: {note}", err=True)
    size = f"{format_bytes(done.bytes)} in {done.files} file{'s' if done.files > 1 else ''}"
    typer.echo(
        f"{folder}: imported {model.origin} of {model.program}, "
        f"{format_count(done.parameters)} parameters, {size}"
    )
    typer.echo(f'start a run from it with model.start="{folder}"')
    if chosen is None:
        typer.echo(
            "note: without --tokenizer, generate, evaluate and export cannot use it", err=True
        )


def converse(
    chat: ChatGenerator, prompt: str | None, *, as_json: bool, options: dict[str, Any]
) -> None:
    """Answer a prompt, that on standard input, or those that are typed one after the other.
    `options` are those of `ChatGenerator.ask`."""
    if prompt is None and _is_terminal():
        typer.echo("Type a message; an empty line or Ctrl-D ends.")
        warned = False
        while line := ask():
            _answer(chat, line, as_json=as_json, options=options)
            if chat.forgotten and not warned:
                warned = True
                note = "note: the conversation is longer than the model's context; the oldest "
                typer.echo(note + "messages are forgotten", err=True)
        return
    if prompt is None or prompt == "-":
        # The line end belongs to the terminal or to echo, not to the message.
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise UserError("there is no message to answer", where="PROMPT")
    _answer(chat, prompt, as_json=as_json, options=options)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _answer(chat: ChatGenerator, question: str, *, as_json: bool, options: dict[str, Any]) -> None:
    answers = chat.ask(question, **options)
    if not as_json and options["samples"] == 1:
        write_text("", answers)
        return
    texts = [""] * options["samples"]
    for number, text in answers:
        texts[number] += text
    for number, text in enumerate(texts, start=1):
        if as_json:
            typer.echo(json.dumps({"prompt": question, "text": text}, ensure_ascii=False))
        else:
            typer.echo(f"--- {number} of {len(texts)}\n{text}")


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run folder, a checkpoint, a Hugging Face folder, or NAME[@REVISION] on the Hub.",
    ),
]
Which = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        help="Of a run folder: latest (the newest that is intact), best or a step.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]


def open_model(name: str, *, checkpoint: str, device: str = "auto") -> Model:
    """The model that a user names; what the user did not ask for, such as an older checkpoint, is
    said on stderr."""
    from gristmill.model import Model

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"{device!r} is not auto, cpu, cuda or mps", where="--device")
    model = Model.open(name, checkpoint=checkpoint, device=device)
    for note in model.notes:
        typer.echo(f"warning: {printable(note)}", err=True)
    return model


@command_options(cls=DialectCommand)
def generate(
    model: ModelName,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; - reads stdin; without one, asks for prompts."),
    ] = None,
    dialect: DialectName = None,
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", help="Stop after this many.", min=1)
    ] = 128,
    samples: Annotated[int, typer.Option(help="Number of continuations.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest p of probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Draw from tokens with this share of the likeliest one's.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Make tokens of the prompt and the text less likely; 1: do not.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtract this from the logits of tokens of the text, -2 to 2.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, times how often they are there.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.", min=0)] = 1337,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text.")] = None,
    regex: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="The text matches the whole of this expression."),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The text is JSON as the schema in this file has it."),
    ] = None,
    cache: Annotated[bool, typer.Option(help="Use a key-value cache.")] = True,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="PROMPT is a message to answer; without one, converse."),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat: a system message before all others.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="plain|chatml|FILE",
            help="With --chat: how a conversation becomes text; the model's own if not given.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per sample.")
    ] = False,
    precision: PrecisionOption = PrecisionName.AUTO,
    checkpoint: Which = "latest",
    device: Device = "auto",
) -> None:
    """Continue a text with a model, or converse with it."""
    from gristmill.generate.sampling import Sampling

    for name, given in (("--system", system), ("--template", template)):
        if given is not None and not chat:
            raise UserError("this is for conversations", where=name, remedy="give --chat too")
    sampling = Sampling(
        temperature,
        top_k,
        top_p,
        seed,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
    )
    schema = None if json_schema is None else read_json(json_schema)
    opened = open_model(model, checkpoint=checkpoint, device=device)
    stops = [text for text in stop or () if text]
    options: dict[str, Any] = {"tokens": tokens, "sampling": sampling, "stop": stops}
    options["constraint"] = opened.constraint(regex=regex, json_schema=schema)
    if chat:
        options |= {"samples": samples}
        conversation = opened.chat(
            system=system, template=template, cache=cache, precision=precision.value
        )
        converse(conversation, prompt, as_json=as_json, options=options)
        return
    generator = opened.text_generator(cache=cache, precision=precision.value)
    if prompt is None and sys.stdin.isatty():
        typer.echo("Type the beginning of a text; an empty line or Ctrl-D ends.")
        while line := ask():
            write_text(line, generator.stream(line, **options))
        return
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    if not as_json and samples == 1:
        write_text(prompt, generator.stream(prompt, **options))
        return
    for number, text in enumerate(generator.texts(prompt, samples=samples, **options), start=1):
        if as_json:
            typer.echo(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
        else:
            typer.echo(f"--- {number} of {samples}\n{prompt}{text}")


def ask() -> str:
    """A line that somebody types; empty at the end."""
    try:
        return input(">> ")
    except EOFError:
        typer.echo("")
        return ""


def write_text(prompt: str, stream: Iterator[tuple[int, str]]) -> None:
    """Print a continuation as it appears."""
    sys.stdout.write(prompt)
    for _, text in stream:
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    # What is said on stderr comes after it.
    sys.stdout.flush()


class ExportCheck(enum.StrEnum):
    """How thoroughly an export is checked."""

    AUTO = "auto"
    TRANSFORMERS = "transformers"
    FILES = "files"


def export(
    model: ModelName,
    place: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|FILE.gguf", help="A new folder, or a new file that ends in .gguf."
        ),
    ],
    checkpoint: Which = "latest",
    check: Annotated[
        ExportCheck,
        typer.Option(
            help="files: all weights read back as they are in MODEL; transformers: its outputs are "
            "the same as well; auto: transformers if the model fits into memory twice."
        ),
    ] = ExportCheck.AUTO,
    code: Annotated[
        bool,
        typer.Option(
            "--code",
            help="Export with the model's own code, which transformers loads with "
            "trust_remote_code=True: for models that none of its classes can be.",
        ),
    ] = False,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter",
            help="Of a run with model.lora, write the adapters alone, for PEFT; without it they "
            "are merged into the model.",
        ),
    ] = False,
) -> None:
    """Write a Hugging Face folder that `transformers` loads, or a GGUF file for llama.cpp.

    Checks what it wrote. The model need not fit into memory.
    """
    with ProgressLine("opening") as line:
        line.update(0, None, model)
        opened = open_model(model, checkpoint=checkpoint)
    with ProgressLine("exporting") as line:

        def show(doing: str, count: int, total: int) -> None:
            line.update(count, total, f"{doing}, {format_bytes(count)} of {format_bytes(total)}")

        written = opened.export(place, code=code, adapter=adapter, check=check.value, progress=show)
    _tell_exported(opened, place, written)
    if code:
        typer.echo(f"{place / 'modeling_gristmill.py'}: load it with trust_remote_code=True")


def _tell_exported(
    model: Model, place: Path, written: Exported | ExportedFile | ExportedAdapter
) -> None:
    """Say what was written, and how it was checked."""
    from gristmill.export.adapter import ExportedAdapter
    from gristmill.export.gguf import ExportedFile

    origin, size = model.stored.origin, format_bytes(written.bytes)
    if isinstance(written, ExportedAdapter):
        modules = f"{written.modules} modules, {size}"
        typer.echo(f"{place}: exported the adapters of {origin}, {modules}")
        typer.echo("checked: added to their base, they give the weights of the merged model")
        for note in written.notes:
            typer.echo(f"note: {note}", err=True)
        return
    read_back = "checked: all weights read back as they are in the source"
    if isinstance(written, ExportedFile):
        typer.echo(f"{place}: exported {origin} as {written.architecture}, {size}")
        typer.echo(read_back)
        return
    for note in written.notes:
        typer.echo(f"warning: {note}", err=True)
    size += f" in {written.files} file{'s' if written.files > 1 else ''}"
    typer.echo(f"{place}: exported {origin} as {written.architecture}, {size}")
    compared = written.skipped
    if written.agreement is not None:
        compared = (
            "transformers' logits differ by at most "
            f"{written.agreement.largest_difference:.1e}, {written.agreement.greedy_tokens} greedy "
            "tokens are the same"
        )
    typer.echo(f"{read_back}; {compared}")
