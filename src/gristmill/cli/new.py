"""`new`: writes a run file that fits this machine and text, and prints the next commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
_TOP_LEVEL = ("name", "preset", "folder")
"""Settings above the first table of a file."""
_GPU_SECONDS, _CPU_SECONDS = 3 * 3600.0, 1800.0
"""Default time for the whole command."""


def new(
    arguments: Annotated[
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
            help="The preset (see `gristmill config --presets`); if not given, the largest that "
            "text and time suffice for.",
        ),
    ] = None,
    hours: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help='Time for the whole of `train`, such as "8" hours or "20m"; 3 hours on a GPU and '
            "half an hour on a CPU if not given.",
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
    sources, settings = _split_arguments(arguments or [])
    top_level = {
        key: value for key in _TOP_LEVEL if (value := _pop_setting(settings, key)) is not None
    }
    preset = _option_or_setting(preset, top_level.pop("preset", None), "--preset")
    limits = _limits(hours, tokens)
    _refuse_conflicts(settings, limits)
    data = find_data(sources, tokenizer, json_key)
    name = top_level.pop("name", data.name)
    file = output or Path(f"{name}.toml")
    _require_writable(file, force=force)
    machine = find_machine(gpu=gpu, gpus=gpus)
    if not limits:
        limits["seconds"] = _GPU_SECONDS if machine.is_gpu else _CPU_SECONDS
    goal = RunGoal(
        name,
        data.paths,
        machine,
        source=" ".join(data.sources) or None,
        validation=data.validation,
        preset=preset,
        top_level=tuple(top_level.items()),
        overrides=tuple(settings),
        has_tokenizer=data.has_tokenizer,
        **limits,
    )
    run = choose_run(goal, data.facts, find_model=settings_folder)
    commands = _commands(run, data, file)
    options: dict[str, object] = {
        "-o": output,
        "--preset": preset,
        "--hours": hours,
        "--tokens": tokens,
    }
    options |= {"-t": tokenizer, "--json-key": json_key, "--gpu": gpu, "--gpus": gpus}
    command_line = _command_line(arguments or [], options)
    text = _text(run, data, file, command_line=command_line, commands=commands)
    write_atomic(file, text)
    warnings = config_warnings(run.config, run.resolved)
    if as_json:
        typer.echo(json.dumps(_as_json(run, data, file, commands, warnings), indent=2))
        return
    for sentence in (*data.summary(run), *expected(run)):
        typer.echo(sentence)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    _note_existing_run(run, file)
    typer.echo(f"\nWrote {file}, with the preset {run.config.preset}. Next:\n")
    typer.echo("".join(f"  {command}\n" for command in commands), nl=False)


def _command_line(arguments: Sequence[str], options: Mapping[str, object]) -> str:
    """The command as the user could have typed it."""
    given = [part for key, value in options.items() if value for part in (key, str(value))]
    return shlex.join(["gristmill", "new", *arguments, *given])


def _split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Sources and settings; an existing file whose name has an equals sign is a source."""
    settings = [
        argument
        for argument in arguments
        if _SETTING.match(argument) and not Path(argument).exists()
    ]
    return [argument for argument in arguments if argument not in settings], settings


def _pop_setting(settings: list[str], key: str) -> str | None:
    """Remove a top-level setting from the list; returns its value."""
    matches = [setting for setting in settings if setting.startswith(f"{key}=")]
    for setting in matches:
        settings.remove(setting)
    return str(parse_override(matches[-1])[(key,)]) if matches else None


def _option_or_setting(option: str | None, setting: str | None, name: str) -> str | None:
    if option is not None and setting is not None and option != setting:
        what = f"both {option!r} and {setting!r} are given"
        raise UserError(what, where=name, remedy="leave one of them out", exit=Exit.USAGE)
    return option or setting


def _limits(hours: str | None, tokens: str | None) -> dict[str, Any]:
    """The training time in seconds or the number of tokens; empty if neither is given."""
    if hours is not None and tokens is not None:
        what, remedy = "time and tokens are both given, and each decides the other", "omit one"
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
        what, remedy = f"{tokens!r} is not an amount", 'write an amount such as "500M" or "2B"'
        raise UserError(what, where="--tokens", remedy=remedy, exit=Exit.USAGE) from error
    if amount < 1:
        raise UserError("no tokens to train on", where="--tokens", exit=Exit.USAGE)
    return {"tokens": amount}


def _refuse_conflicts(settings: Sequence[str], limits: Mapping[str, Any]) -> None:
    """Refuse settings that the source and the options already decide."""
    for setting in settings:
        key = setting.partition("=")[0]
        if key == "data.paths":
            what, remedy = "the source decides it", "name the token set as the source"
        elif key == "train.until" and limits:
            what, remedy = "--hours and --tokens decide it too", "leave one of them out"
        else:
            continue
        raise UserError(what, where=f"command line {setting!r}", remedy=remedy, exit=Exit.USAGE)


def _require_writable(file: Path, *, force: bool) -> None:
    """Refuse an existing file, and a path that cannot be written."""
    where = str(file)
    if file.is_dir():
        raise UserError(
            "this is a folder", where=where, remedy="name a file in it: -o FOLDER/RUN.toml"
        )
    if file.exists() and not force:
        remedy = "choose another name with -o, or replace it with --force"
        raise UserError("this file already exists", where=where, remedy=remedy)
    if not file.parent.is_dir():
        raise UserError(f"there is no folder {file.parent}", where=where)


def _commands(run: NewRun, data: NewData, file: Path) -> list[str]:
    """The next commands, in order."""
    train = ["gristmill", "train", str(file)]
    count = run.goal.machine.count
    processes = ["--processes", str(count)] if count > 1 else []
    return [*data.prepare(run), shlex.join([*train, *processes])]


def _text(
    run: NewRun, data: NewData, file: Path, *, command_line: str, commands: Sequence[str]
) -> str:
    """The complete file; checks that it loads."""
    schema = (file.parent / SCHEMA_FILE).is_file()
    facts = list(data.summary(run))
    text = file_text(run, command_line=command_line, facts=facts, commands=commands, schema=schema)
    overrides = {
        ".".join(path): value
        for override in run.goal.overrides
        for path, value in parse_override(override).items()
    }
    text = with_settings(text, overrides, where=file) if overrides else text
    load_text(text, place=str(file), find_model=settings_folder)
    return text


def _note_existing_run(run: NewRun, file: Path) -> None:
    folder = Path(run.config.folder or f"runs/{run.config.name}")
    if RunFolder(folder).path.exists():
        remedy = f"train into another folder: gristmill train {file} folder=runs/OTHER"
        typer.echo(f"note: {folder} already holds a run; {remedy}", err=True)


def _as_json(
    run: NewRun, data: NewData, file: Path, commands: Sequence[str], warnings: Sequence[str]
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
        "training_seconds": run.training_seconds,
        "overhead_seconds": asdict(run.overhead),
        "tokens_per_second": run.plan.step.tokens_per_second,
        "memory_bytes": run.memory,
        "commands": list(commands),
        "warnings": list(warnings),
    }


def _machine_json(machine: Machine) -> dict[str, Any]:
    return {
        "device": machine.hardware.name,
        "count": machine.count,
        "described": machine.described,
        "source": machine.source,
    }
