"""Why a run ends, in words: who failed, who is silent, who is behind.

A process that dies takes its peers' collectives down with it, and what these raise tells nothing of
the cause. Such errors are known by their kind and by their words.
"""

from __future__ import annotations

import re

import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_seconds
from gristmill.parallel.signs import Silent, Summary

_WIDTH = 500
_OF_OTHERS = re.compile(
    r"gloo|nccl|connection|connect to|broken pipe|reset by peer|timed? ?out|socket", re.IGNORECASE
)
"""In messages of errors that another process may have caused."""


def named(error: BaseException) -> str:
    """An error as the others are told of it."""
    text, kind = str(error), type(error).__name__
    if isinstance(error, UserError):
        return text
    return f"{kind}: {text}" if text else kind


def may_be_of_others(error: BaseException) -> bool:
    """Whether an error looks like one that another process has caused."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, UserError) and seen.exit is Exit.PEER:
            return True
        if isinstance(seen, RuntimeError) and _OF_OTHERS.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def words_of_end(summary: Summary) -> str | None:
    """Whoever failed; where none did, who ended without a word; where none did, what one says that
    ended because of another."""
    for sign in summary.failed:
        return f"{sign.who} failed {sign.where}: {sign.what}"
    for sign in summary.gone:
        return f"{sign.who} has ended without a word; it was last heard of {sign.where}"
    for sign in summary.lost:
        return sign.what
    return None


def words_of_silence(silent: Silent) -> str:
    """A process that froze or died without a word."""
    seconds, sign = format_seconds(silent.seconds), silent.sign
    return f"{sign.who} has given no sign of life for {seconds}; it was last heard of {sign.where}"


def words_of_waiting(summary: Summary) -> str:
    """Why the process of a summary may have been in one phase for too long."""
    me = summary.by
    words = f"{me.who} has waited {format_seconds(me.seconds)} {me.where}"
    if summary.absent:
        return f"{words} for rank {', '.join(map(str, summary.absent))}, which never came"
    if any(sign.rank == me.rank for sign in summary.behind):
        return f"{words}, and is behind all others"
    if summary.behind:
        return f"{words}, and behind is {' and '.join(map(str, summary.behind))}"
    return f"{words}, and no process is behind"


def in_one_line(text: str) -> str:
    """A reason as a sign holds it."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}…"
