"""The settings of a run about its records: where they go, and alerts when something goes wrong.

[track.wandb]                [alert]
project = "my-project"       url = "env:SLACK_URL"
                             no_progress = "10m"
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from gristmill.base.units import Duration, parse_seconds
from gristmill.config.settings import Interval, Settings

_UNITS = {
    **{name: 1000**power for power, name in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))},
    **{name: 1024**power for power, name in enumerate(("KIB", "MIB", "GIB", "TIB", "PIB"), 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")
_VARIABLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_LONG_WORD = re.compile(r"[A-Za-z0-9_-]{16,}")
"""A part of an address that looks like a password."""
_ALERT = re.compile(r"^\[alert\]\n(?:(?!\[).*\n?)*", re.MULTILINE)
_URL_LINE = re.compile(r"^(url *= *)(\".*\")$", re.MULTILINE)


def parse_bytes(text: str) -> int:
    """Read a size on disk: "500 MB", "10 GB" (powers of 1000), "10 GiB" (of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError('must be a size such as "10 GB", "500 MB" or "1 TiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def url_variable(url: str) -> str | None:
    """The environment variable that holds an address which is written as "env:NAME"."""
    match = _VARIABLE.fullmatch(url)
    return None if match is None else match[1]


def check_address(url: str) -> None:
    """Refuse what nothing can be posted to. The message does not repeat the address."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname is not None
        valid = known and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("must be an address that begins with http:// or https://")


def looks_secret(url: str) -> bool:
    """Whether an address holds what looks like a password or a token."""
    if url_variable(url) is not None:
        return False
    parts = urlsplit(url)
    named = parts.username is not None or parts.password is not None or bool(parts.query)
    return named or any(_LONG_WORD.fullmatch(word) for word in parts.path.split("/"))


def without_address(text: str) -> str:
    """The text of a run file as others may see it: without the address in [alert]."""

    def hide(match: re.Match[str]) -> str:
        kept = match[2].startswith('"env:')
        return match[0] if kept else f'{match[1]}"(not shown)"'

    return _ALERT.sub(lambda table: _URL_LINE.sub(hide, table[0]), text)


def _time_or_off(value: Any, *, least: float) -> Any:
    if value is False:
        return value
    examples = 'must be a time such as "15s" or "10m", or false'
    if not isinstance(value, str):
        raise ValueError(examples)
    try:
        seconds = parse_seconds(value)
    except Exception as error:
        raise ValueError(examples) from error
    if seconds < least:
        raise ValueError(f'must be at least "{least:g}s"')
    return value


def _size_or_off(value: Any) -> Any:
    if value is False:
        return value
    if not isinstance(value, str):
        raise ValueError('must be a size such as "10 GB", or false')
    if parse_bytes(value) <= 0:
        raise ValueError("must be more than 0")
    return value


def _command(value: Any) -> Any:
    words = value if isinstance(value, list | tuple) else [value]
    if not words or not all(isinstance(word, str) for word in words):
        raise ValueError('must be a line for the shell, or a list such as ["notify", "me"]')
    if not words[0].strip() or any("\0" in word for word in words):
        raise ValueError("must name a command")
    return value if isinstance(value, str) else tuple(value)


def _url(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError('must be an address, or "env:NAME" for an environment variable')
    if value.startswith("env:"):
        if url_variable(value) is None:
            raise ValueError('must name an environment variable after "env:"')
    else:
        check_address(value)
    return value


class WandbConfig(Settings):
    """Weights & Biases."""

    project: str
    """Name of the project."""
    entity: str | None = None
    """User or team that the project belongs to; W&B's default if not given."""
    mode: Literal["online", "offline"] = "online"
    """offline writes files to be sent later with `wandb sync`. WANDB_MODE takes precedence, as all
    environment variables of W&B do."""


class TrackioConfig(Settings):
    """trackio, which keeps its projects on this machine or in a Space on Hugging Face."""

    project: Annotated[str, Field(pattern=r"\S")]
    """Name of the project."""
    space: str | None = None
    """Space on Hugging Face to log to, such as "me/curves"; without it, or TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL, everything stays on this machine."""


class TrackConfig(Settings):
    """Where metrics are logged, besides metrics.jsonl and train.log."""

    every: Interval = Duration.parse("1 steps")
    """Interval between the records of steps."""
    log_format: Literal["gristmill", "megatron", "decentralized"] = "gristmill"
    """Format of the lines on standard output: our own, Megatron-LM's for each record, or that of
    decentralized GPT-2 training for each validation, for scripts that parse them."""
    system: Annotated[
        str | Literal[False], BeforeValidator(lambda value: _time_or_off(value, least=1))
    ] = "15s"
    """How often each host records its use of CPU, memory, disk, network and GPUs; false for
    never."""
    sources: bool = True
    """Record the loss of each source with every step, and how much of it was read, where the
    training text has several."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run folder."""
    wandb: WandbConfig | None = None
    """Report to Weights & Biases."""
    trackio: TrackioConfig | None = None
    """Report to trackio."""


class AlertConfig(Settings):
    """Alerts when the run needs attention: at most one for each reason and start of the run."""

    command: Annotated[str | tuple[str, ...], BeforeValidator(_command)] | None = None
    """Command to run: a line for the shell, or a list of words that no shell reads. It gets the
    facts as JSON on standard input and in variables such as GRISTMILL_ALERT_MESSAGE."""
    url: Annotated[str, BeforeValidator(_url)] | None = None
    """Address to post the facts to as JSON; "env:NAME" takes it from an environment variable. The
    key `text` has the message, as Slack and others expect it."""
    loss_above: float | None = None
    """Alert when the training loss is above this in three recorded steps in a row, after it has
    been below."""
    no_progress: Annotated[
        str | Literal[False], BeforeValidator(lambda value: _time_or_off(value, least=1))
    ] = "10m"
    """Alert when no step is done for this long; false for never. Before the first step, and during
    validation, evaluation and saving, an hour longer."""
    disk_below: Annotated[str | Literal[False], BeforeValidator(_size_or_off)] = "10 GB"
    """Alert when the file system of the run folder has less room than this; false for never."""
    diverged: bool = True
    """Alert when the run ends because it has diverged."""
    rank_lost: bool = True
    """Alert when the run ends because another process was lost or hung."""
    failed: bool = True
    """Alert when the run ends by any other error."""
    straggler: bool = False
    """Alert when one process is much slower than the others."""
    done: bool = True
    """Alert when the run is complete."""
