"""Writes the text of a new run file: the chosen settings, with comments on where they come from.

    # the command that wrote it, the next commands, the expected duration
    name   = "stories"
    preset = "modern-nano"

    [data]
    ...

The caller adds the user's own settings afterwards, without comments.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli_w

from gristmill.base.units import described_span, format_bytes, format_count
from gristmill.plan.new_run import GOOD_EPOCHS, MAX_EPOCHS, TOKENS_PER_PARAMETER, NewRun

_WIDTH = 98
SCHEMA_FILE = "gristmill.schema.json"
"""The JSON Schema that editors find beside a run file."""
_NEARLY = 0.9
_OVER = 1.02
"""Say that a run takes longer than asked for above this multiple; rounding alone may exceed it."""
_WHOLE = 100
_EPOCHS_MARGIN = 1.1
"""Warn of too many epochs above this multiple of `MAX_EPOCHS`; rounding alone may exceed it."""
_SHORT = TOKENS_PER_PARAMETER / 2
"""Tokens per parameter below which a run is called short."""


def file_text(
    run: NewRun, *, command_line: str, facts: Sequence[str], commands: Sequence[str], schema: bool
) -> str:
    """The file, without the user's overrides. `command_line` is the command that writes it, `facts`
    are sentences about the data, and `commands` come next."""
    lines = [f"#:schema ./{SCHEMA_FILE}"] if schema else []
    lines += _comment(f"Written by `{command_line}`. {' '.join(facts)}")
    lines += ["#", *(f"#   {command}" for command in commands), "#"]
    lines += _comment(" ".join(expected(run)))
    notes = _notes(run)
    top = {key: value for key, value in run.settings.items() if not isinstance(value, dict)}
    lines += _table(top, notes.get("", {}))
    for name, table in run.settings.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *_table(table, notes.get(name, {}))]
    return "\n".join(lines) + "\n"


def expected(run: NewRun) -> Iterator[str]:
    """Time, speed and memory of the run on this machine, in sentences."""
    machine, plan = run.goal.machine, run.plan
    speed, memory = format_count(plan.step.tokens_per_second), format_bytes(run.memory)
    each = " on each device" if machine.count > 1 else ""
    yield (
        f"Expected on {machine.described}: {described_span(run.seconds)} from the command to its "
        f"end, {described_span(run.training_seconds)} of it training, at {speed} tokens/s and "
        f"{memory} of memory{each}, with micro-batches of {plan.micro_batch} in {run.precision}. "
        f"{machine.source}"
    )
    if run.goal.seconds is not None and not run.has_own_horizon:
        yield from _about_time(run, run.goal.seconds)
    share, size = run.tokens / run.parameters, format_count(run.parameters)
    yield (
        f"The model reads {_digits(share)} tokens for each of the {size} parameters in its matrix "
        f"products; {TOKENS_PER_PARAMETER} are usual."
    )
    if share < _SHORT:
        yield _advice(run)
    if run.epochs is not None and run.epochs > _EPOCHS_MARGIN * MAX_EPOCHS:
        yield (
            f"It reads the text {_digits(run.epochs)} times, and learns little more from it after "
            f"{MAX_EPOCHS}: give more text, or train for fewer tokens."
        )


def _about_time(run: NewRun, there: float) -> Iterator[str]:
    """That the start alone takes too long for the time, or that the text is too small for it."""
    if run.seconds > _OVER * there:
        yield (
            f"That is more than the {described_span(there)} there are: start, samples and "
            f"checkpoints alone take {described_span(run.overhead.total)}."
        )
    elif _is_limited_by_text(run) and run.seconds < _NEARLY * there:
        yield (
            f"That leaves {described_span(there - run.seconds)} of {described_span(there)} over, "
            f"since the text is small and a model learns little from reading it more than "
            f"{GOOD_EPOCHS} times: more text would use the rest."
        )


def _is_limited_by_text(run: NewRun) -> bool:
    """Whether it reads the text as often as is worth while."""
    available = run.training_tokens
    return available is not None and run.tokens > _NEARLY * GOOD_EPOCHS * available


def _advice(run: NewRun) -> str:
    """How to give a model of this size more tokens."""
    wanted = TOKENS_PER_PARAMETER * run.parameters
    if _is_limited_by_text(run):
        tokens = format_count(wanted / GOOD_EPOCHS)
        return f"More text would improve it: {tokens} tokens are enough for this size."
    seconds = wanted / run.plan.step.tokens_per_second
    return f"A longer run would improve it: the usual token count takes {described_span(seconds)}."


def _digits(number: float) -> str:
    """Two significant digits, or all digits of the integer part."""
    return f"{number:,.0f}" if number >= _WHOLE else f"{number:.2g}"


def _notes(run: NewRun) -> Mapping[str, Mapping[str, str]]:
    """Comments on the keys, by table."""
    resolved, epochs = run.resolved, run.epochs
    read = "" if epochs is None else f"; reads the text {_digits(epochs)} times"
    tokens = format_count(resolved.tokens_per_step)
    held_out = None if run.data.tokens is None else run.data.tokens - (run.training_tokens or 0)
    share = "" if not held_out else f"; the latter about {format_count(held_out)} tokens"
    return {
        "": {"preset": f"{format_count(run.parameters)} parameters in matrix products"},
        "data": {
            "split": f"training and validation{share}",
            "sequence": "shorter than the preset's, since the text is short",
        },
        "train": {
            "until": f"{resolved.steps:,} steps{read}",
            "batch": f"samples of {resolved.sequence} tokens: {tokens} tokens per step",
            "recompute": "saves memory; the run would not fit without it",
        },
        "optim": {
            "lr": "the peak learning rate of the nearest size of GPT-3",
            "momentum_warmup": "a share of the run, as the preset's warm-up is longer than the run",
        },
        "sample": {"every": "a text sample from the model"},
    }


def _table(values: Mapping[str, Any], notes: Mapping[str, str]) -> Iterator[str]:
    """Aligned keys; a comment follows its value, or precedes it if the line is too long."""
    width = max(map(len, values), default=0)
    for key, value in values.items():
        line = f"{key.ljust(width)} = {tomli_w.dumps({'v': value})[4:].strip()}"
        note = notes.get(key)
        if note is None:
            yield line
        elif len(line) + len(note) + 4 <= _WIDTH:
            yield f"{line}  # {note}"
        else:
            yield from (*_comment(note), line)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
