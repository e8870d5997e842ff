"""The text of a new run file: the settings that were chosen, with a comment where each comes from.

    # where it comes from, the commands to go on with, what to expect
    name   = "stories"
    preset = "modern-nano"

    [data]
    ...

Settings that were asked for are put in last, so they look as if they had been written by hand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli_w

from gristmill.base.units import described_span, format_bytes, format_count
from gristmill.plan.new_run import GOOD_EPOCHS, MOST_EPOCHS, TOKENS_OF_EACH, NewRun

_WIDTH = 98
SCHEMA_FILE = "gristmill.schema.json"
"""The JSON Schema that editors find beside a run file."""
_NEARLY = 0.9
_WHOLE = 100
_NEARLY_ALL = 1.1
"""Times `MOST_EPOCHS` above which the text is read too often; rounding alone is not told of."""
_FEW = TOKENS_OF_EACH / 2
"""Tokens for each parameter below which a run is called short."""


def file_text(
    run: NewRun, *, made: str, facts: Sequence[str], commands: Sequence[str], schema: bool
) -> str:
    """The file, but for the settings that were asked for. `made` is the command that makes it,
    `facts` are sentences about the data, `commands` those to go on with."""
    lines = [f"#:schema ./{SCHEMA_FILE}"] if schema else []
    lines += _comment(f"Made by `{made}`. {' '.join(facts)}")
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
    """What the run will take on this machine, in sentences."""
    machine, plan = run.goal.machine, run.plan
    speed, memory = format_count(plan.step.tokens_per_second), format_bytes(run.memory)
    each = " on each device" if machine.count > 1 else ""
    yield (
        f"Expected on {machine.described}: {described_span(run.seconds)} of training and "
        f"validation at {speed} tokens/s and {memory} of memory{each}, with micro-batches of "
        f"{plan.micro_batch} in {run.precision}. {machine.source}"
    )
    share, size = run.tokens / run.parameters, format_count(run.parameters)
    yield (
        f"The model reads {_short(share)} tokens for each of the {size} parameters in its matrix "
        f"products; {TOKENS_OF_EACH} are usual."
    )
    if share < _FEW:
        yield _short_of(run)
    if run.epochs is not None and run.epochs > _NEARLY_ALL * MOST_EPOCHS:
        yield (
            f"It reads the text {_short(run.epochs)} times, and learns little more from it after "
            f"{MOST_EPOCHS}: give more text, or train for fewer tokens."
        )


def _short_of(run: NewRun) -> str:
    """What would make more of a model's size."""
    wanted, kept = TOKENS_OF_EACH * run.parameters, run.training_tokens
    if kept is not None and run.tokens > _NEARLY * GOOD_EPOCHS * kept:
        more = format_count(wanted / GOOD_EPOCHS)
        return f"More text would make it better: {more} tokens are enough for this size."
    seconds = wanted / run.plan.step.tokens_per_second
    return f"A longer run would make it better: the usual amount takes {described_span(seconds)}."


def _short(number: float) -> str:
    """Two digits, or all before the point."""
    return f"{number:,.0f}" if number >= _WHOLE else f"{number:.2g}"


def _notes(run: NewRun) -> Mapping[str, Mapping[str, str]]:
    """What is said of a key, by table."""
    resolved, epochs = run.resolved, run.epochs
    read = "" if epochs is None else f"; reads the text {_short(epochs)} times"
    tokens = format_count(resolved.tokens_per_step)
    held = None if run.data.tokens is None else run.data.tokens - (run.training_tokens or 0)
    share = "" if not held else f"; the latter about {format_count(held)} tokens"
    return {
        "": {"preset": f"{format_count(run.parameters)} parameters in matrix products"},
        "data": {
            "split": f"training and validation{share}",
            "sequence": "shorter than the preset's, since the text is short",
        },
        "train": {
            "until": f"{resolved.steps:,} steps{read}",
            "batch": f"samples of {resolved.sequence} tokens: {tokens} tokens per step",
            "recompute": "saves memory; the run does not fit without it",
        },
        "optim": {
            "lr": "the peak rate, as GPT-3's nearest size has it",
            "momentum_warmup": "a share of the run, which is shorter than the preset's warm-up",
        },
        "sample": {"every": "a text that the model writes"},
    }


def _table(values: Mapping[str, Any], notes: Mapping[str, str]) -> Iterator[str]:
    """Keys aligned; a comment behind its value, or above it if both are long."""
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
