"""`new`: a run file that fits this machine and this text, and the commands to go on with."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import write_atomic
from gristmill.base.units import Duration, Unit
from gristmill.cli.new_data import NewData, find_data
from gristmill.cli.options import AsJson
from gristmill.cli.planning import parse_hours
from gristmill.config.load import load_text, parse_override
from gristmill.config.rules import config_warnings
from gristmill.hub.downloads import settings_folder
from gristmill.plan.machine import Machine, find_machine
from gristmill.plan.new_file import SCHEMA_FILE, expected, file_text
from gristmill.plan.new_run import NewRun, RunGoal, choose_run
from gristmill.plan.run_file import with_settings
from gristmill.track.folder import RunFolder

_SETTING = re.compile(r"[a-z][a-z_0-9]*(\.[a-z][a-z_0-9]*)*=")
_TOP = ("name", "preset", "folder")
"""Settings above all tables."""
_ON_GPU, _ON_PROCESSOR = 3 * 3600.0, 1800.0
"""Seconds of a run for which nobody says how long it may take."""


def new(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE|A.B=C",
            help="Text as `prepare` takes it, or the name of a token set; then settings for the "
            "file.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="RUN.toml", help="The run file; NAME.toml if not given."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The size, of `gristmill config --presets`; the largest that gets enough text and "
            "time if not given.",
        ),
    ] = None,
    hours: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help='Time for training, such as "8" hours or "20m"; 3 hours on a GPU and half an hour '
            "on a processor if not given.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help='Tokens to train on, such as "2B", in place of a time.'),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="NAME",
            help="As `prepare -t` takes it; chosen by the size of model and text if not given.",
        ),
    ] = None,
    json_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="The key or column that holds the text, as `prepare` takes it; text if not given.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help='Plan for another machine, with such devices: "h100-80gb"; this machine\'s if not '
            "given.",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many of --gpu; one if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run file that fits this machine and your text, and say what to do next.

    Without a source, the size follows from the time alone. Nothing is downloaded or prepared.
    """
    sources, settings = _sorted(words or [])
    top = {name: value for name in _TOP if (value := _taken(settings, name)) is not None}
    preset = _one_of(preset, top.pop("preset", None), "--preset")
    limits = _limits(hours, tokens)
    _require_free_choice(settings, limits)
    data = find_data(sources, tokenizer, json_key)
    name = top.pop("name", data.name)
    file = output or Path(f"{name}.toml")
    _require_free(file, force=force)
    machine = find_machine(gpu=gpu, gpus=gpus)
    if not limits:
        limits["seconds"] = _ON_GPU if machine.is_gpu else _ON_PROCESSOR
    goal = RunGoal(
        name,
        data.paths,
        machine,
        text=" ".join(data.sources) or None,
        validation=data.validation,
        preset=preset,
        top=tuple(top.items()),
        words=tuple(settings),
        samples=data.has_tokenizer,
        **limits,
    )
    run = choose_run(goal, data.facts, find_model=settings_folder)
    commands = _commands(run, data, file)
    options = {"-o": output, "--preset": preset, "--hours": hours, "--tokens": tokens}
    more = {"-t": tokenizer, "--json-key": json_key, "--gpu": gpu, "--gpus": gpus}
    made = _command(words or [], {**options, **more})
    text = _text(run, data, file, made=made, commands=commands)
    write_atomic(file, text)
    doubts = config_warnings(run.config, run.resolved)
    if as_json:
        typer.echo(json.dumps(_as_json(run, data, file, commands, doubts), indent=2))
        return
    for sentence in (*data.told(run), *expected(run)):
        typer.echo(sentence)
    for doubt in doubts:
        typer.echo(f"warning: {doubt}", err=True)
    _tell_of_old_run(run, file)
    typer.echo(f"\nWrote {file}, with the preset {run.config.preset}. Next:\n")
    typer.echo("".join(f"  {command}\n" for command in commands), nl=False)


def _command(words: Sequence[str], options: Mapping[str, object]) -> str:
    """The command as it was typed."""
    given = [part for key, value in options.items() if value for part in (key, str(value))]
    return shlex.join(["gristmill", "new", *words, *given])


def _sorted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Sources and settings; a file whose name has an equals sign is a source."""
    settings = [word for word in words if _SETTING.match(word) and not Path(word).exists()]
    return [word for word in words if word not in settings], settings


def _taken(settings: list[str], key: str) -> str | None:
    """The value of a setting above all tables, which leaves the list."""
    found = [word for word in settings if word.startswith(f"{key}=")]
    for word in found:
        settings.remove(word)
    return str(parse_override(found[-1])[(key,)]) if found else None


def _one_of(option: str | None, setting: str | None, name: str) -> str | None:
    if option is not None and setting is not None and option != setting:
        what = f"{option!r} and {setting!r} are given"
        raise UserError(what, where=name, remedy="leave one of them out", exit=Exit.USAGE)
    return option or setting


def _limits(hours: str | None, tokens: str | None) -> dict[str, Any]:
    """How long, in seconds or in tokens; nothing if neither was asked for."""
    if hours is not None and tokens is not None:
        what, remedy = "time and tokens are given, and each decides the other", "leave one out"
        raise UserError(what, where="--tokens", remedy=remedy, exit=Exit.USAGE)
    if hours is not None:
        seconds = parse_hours(hours, where="--hours")
        if seconds <= 0:
            raise UserError("no time to train", where="--hours", exit=Exit.USAGE)
        return {"seconds": seconds}
    if tokens is None:
        return {}
    text = tokens.removesuffix("tokens").strip()
    try:
        amount = Duration.parse(f"{text} {Unit.TOKENS.value}").amount
    except UserError as error:
        what, remedy = f"{tokens!r} is not an amount", 'write one such as "500M" or "2B"'
        raise UserError(what, where="--tokens", remedy=remedy, exit=Exit.USAGE) from error
    if amount < 1:
        raise UserError("no tokens to train on", where="--tokens", exit=Exit.USAGE)
    return {"tokens": amount}


def _require_free_choice(settings: Sequence[str], limits: Mapping[str, Any]) -> None:
    """Refuse settings that say otherwise what the source and the options say."""
    for word in settings:
        key = word.partition("=")[0]
        if key == "data.paths":
            what, remedy = "the source decides it", "name the token set as the source"
        elif key == "train.until" and limits:
            what, remedy = "--hours and --tokens decide it too", "leave one of them out"
        else:
            continue
        raise UserError(what, where=f"command line {word!r}", remedy=remedy, exit=Exit.USAGE)


def _require_free(file: Path, *, force: bool) -> None:
    """Refuse to replace a file, and a place where none can be written."""
    where = str(file)
    if file.is_dir():
        raise UserError("is a folder", where=where, remedy="name a file in it: -o FOLDER/RUN.toml")
    if file.exists() and not force:
        remedy = "choose another name with -o, or replace it with --force"
        raise UserError("there is such a file already", where=where, remedy=remedy)
    if not file.parent.is_dir():
        raise UserError(f"there is no folder {file.parent}", where=where)


def _commands(run: NewRun, data: NewData, file: Path) -> list[str]:
    """What to do next, in order."""
    train = ["gristmill", "train", str(file)]
    count = run.goal.machine.count
    several = ["--processes", str(count)] if count > 1 else []
    return [*data.prepare(run), shlex.join([*train, *several])]


def _text(run: NewRun, data: NewData, file: Path, *, made: str, commands: Sequence[str]) -> str:
    """The whole file, which loads to the settings that were planned."""
    schema = (file.parent / SCHEMA_FILE).is_file()
    told = list(data.told(run))
    text = file_text(run, made=made, facts=told, commands=commands, schema=schema)
    words = {
        ".".join(path): value
        for word in run.goal.words
        for path, value in parse_override(word).items()
    }
    text = with_settings(text, words, where=file) if words else text
    load_text(text, place=str(file), find_model=settings_folder)
    return text


def _tell_of_old_run(run: NewRun, file: Path) -> None:
    folder = Path(run.config.folder or f"runs/{run.config.name}")
    if RunFolder(folder).path.exists():
        remedy = f"train it into another: gristmill train {file} folder=runs/OTHER"
        typer.echo(f"note: {folder} holds a run already; {remedy}", err=True)


def _as_json(
    run: NewRun, data: NewData, file: Path, commands: Sequence[str], doubts: Sequence[str]
) -> dict[str, Any]:
    return {
        "file": str(file),
        "preset": run.config.preset,
        "parameters_multiplied": run.parameters,
        "machine": _machine_json(run.goal.machine),
        "data": {"paths": data.paths, "tokens": run.data.tokens, "vocab": run.data.vocab},
        "tokens": run.tokens,
        "steps": run.resolved.steps,
        "epochs": run.epochs,
        "seconds": run.seconds,
        "tokens_per_second": run.plan.step.tokens_per_second,
        "memory_bytes": run.memory,
        "commands": list(commands),
        "warnings": list(doubts),
    }


def _machine_json(machine: Machine) -> dict[str, Any]:
    return {
        "device": machine.hardware.name,
        "count": machine.count,
        "described": machine.described,
        "source": machine.source,
    }
