"""Tables of the options of other programs, for the pages about coming from them.

They are made from the tables that translate, so that they cannot say anything else. To read one
without building the site: python docs/dialects.py megatron
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

from gristmill.dialects.table import Dialect, ForeignOption, OptionFamily, load_table
from gristmill.dialects.translate import RULES

PAGES = {
    "megatron": ("megatron", "megatron-prepare", "megatron-merge"),
    "llm_pytorch": ("llm-pytorch",),
    "decentralized": ("decentralized", "decentralized-prepare"),
    "xla_gpt2": ("xla-gpt2", "xla-gpt2-prepare", "xla-gpt2-generate"),
    "nanogpt": ("nanogpt", "nanogpt-prepare"),
}
"""The tables of each page."""


def option_tables(names: tuple[str, ...]) -> str:
    """The tables of one system, one after the other."""
    return "\n".join(line for name in names for line in _section(load_table(name))) + "\n"


def _section(dialect: Dialect) -> Iterator[str]:
    yield from (f"## `{dialect.program}`", "", dialect.about.strip(), "")
    if dialect.fixed:
        yield from ("| always | because |", "| --- | --- |")
        for path, fixed in dialect.fixed.items():
            yield f"| `{path} = {fixed.value}` | {_cell(fixed.because)} |"
        yield ""
    if not dialect.options:
        return
    yield from ("| option | becomes | notes |", "| --- | --- | --- |")
    for name, option in dialect.options.items():
        names = ", ".join(f"`{one}`" for one in (name, *option.also))
        yield f"| {names} | {_becomes(option)} | {_cell(_notes(option))} |"
    yield ""
    if dialect.families:
        yield from ("| options | | because |", "| --- | --- | --- |")
        yield from map(_family, dialect.families)
        yield ""


def _becomes(option: ForeignOption) -> str:
    if option.to is not None:
        return f"`{option.to}`"
    if option.rule is not None:
        return _cell(str(RULES[option.rule].__doc__).splitlines()[0].rstrip("."))
    return "ignored" if option.ignored is not None else "refused"


def _notes(option: ForeignOption) -> str:
    notes = [option.ignored, option.changed]
    if option.choices is not None:
        notes.append("one of " + ", ".join(f"`{one}`" for one in option.choices))
    if option.refused is not None and option.choices is None:
        harmless = ", ".join(f"`{one}`" if one else "an empty text" for one in option.harmless)
        besides = f" (but {harmless} is ignored)" if harmless else ""
        notes.append(f"{option.refused}: {option.instead}{besides}")
    if option.default is not None:
        notes.append(f"`{option.default}` if not given")
    return "; ".join(note for note in notes if note)


def _family(family: OptionFamily) -> str:
    names = ", ".join(f"`{name}`" for name in family.names)
    if family.ignored is not None:
        return f"| {names} | ignored | {_cell(family.ignored)} |"
    return f"| {names} | refused | {_cell(f'{family.refused}: {family.instead}')} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


TEXTS = {f"<!-- options of {page} -->": partial(option_tables, names)
         for page, names in PAGES.items()}  # fmt: skip
"""What a page may ask for."""


if __name__ == "__main__":
    sys.stdout.write(option_tables(PAGES[sys.argv[1]]))
