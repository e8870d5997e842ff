"""Tables of other programs: what each of their options means here.

A table is a TOML file in `tables/`. Its head says how the program is called and how its options are
written; then comes one row for each option:

    "--lr-decay-iters" = { value = "int", rule = "learning_rate" }
    "--adam-beta2"     = { value = "float", to = "optim.beta2", default = 0.999 }
    "--num-workers"    = { value = "int", ignored = "batches are read ahead in any case" }
    "--zarr"           = { refused = "…", instead = "…" }

An option is taken (`to` or `rule`), ignored because, or refused because; there is no fourth way. A
row may be named for an environment variable, such as PJRT_DEVICE, which is then taken from the part
of a command that starts the program.
Options that share a reason may share a row, by their names or by a pattern:

    [[families]]
    names = ["--moe-*", "--expert-tensor-parallel-size"]
    ignored = "only mixtures of experts use it"
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import tomllib
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gristmill.base.errors import Exit, UserError
from gristmill.config.settings import Settings

_NAME = re.compile(r"-{0,2}[A-Za-z][\w.-]*")
Texts = Annotated[tuple[str, ...], Field(strict=False)]


class ForeignOption(Settings):
    """One option of another program."""

    value: Literal["flag", "int", "float", "text", "bool", "words"] = "flag"
    """What is written behind it: nothing for a flag; any number of words that nobody reads."""
    count: Annotated[int, Field(ge=2)] | Literal["any"] | None = None
    """How many values there are; one if not given."""
    also: Texts = ()
    """Other names of the same option."""
    default: Any = None
    """What the program takes if the option is not given, where that is not our default too."""
    to: str | None = None
    """The setting it becomes, or the option or ARGUMENT of our command."""
    convert: Literal["steps", "samples", "tokens", "minutes", "seconds", "negate"] | None = None
    """How the value changes on the way."""
    becomes: Any = None
    """Our value, whatever theirs is."""
    choices: dict[str, Any] | None = None
    """Our value for each of theirs."""
    rule: str | None = None
    """The function of `RULES` in `translate.py` that takes it together with other options."""
    changed: str | None = None
    """What differs from the other program although the option is taken."""
    ignored: str | None = None
    """Why it has no effect on the result."""
    refused: str | None = None
    """Why it is not taken; with `choices`, why other values are not."""
    instead: str | None = None
    """What to do about a refused option."""
    harmless: Annotated[tuple[Any, ...], Field(strict=False)] = ()
    """Values of a refused option that ask for what is done in any case."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [self.to, self.rule, self.ignored, None if self.choices else self.refused]
        if sum(way is not None for way in ways) != 1:
            raise ValueError("an option is taken, ignored or refused, and only one of these")
        if (self.refused is None) != (self.instead is None):
            raise ValueError("whoever is refused is told what to do instead")
        return self


class OptionFamily(Settings):
    """Options of another program that are ignored or refused for the same reason."""

    names: Texts
    """Their names; `*` stands for any rest of a name."""
    ignored: str | None = None
    refused: str | None = None
    instead: str | None = None

    def has(self, name: str) -> bool:
        """Whether an option is one of these."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)

    @property
    def option(self) -> ForeignOption:
        """The row of each of them."""
        return ForeignOption(
            value="words", ignored=self.ignored, refused=self.refused, instead=self.instead
        )


class FixedSetting(Settings):
    """A setting that is always the same in runs of another program."""

    value: Any
    because: str


class Dialect(Settings):
    """How one program is called."""

    title: str
    """The system, as its users call it."""
    program: str
    """The script."""
    scripts: Texts = ()
    """Files and modules that are this program. What stands before such a name starts it. The end of
    a path, such as data/openwebtext/prepare.py, tells scripts of the same name apart."""
    verb: Literal["train", "prepare", "generate", "tokens merge"] = "train"
    """The command that does the same here."""
    syntax: Literal["argparse", "configurator", "toml"] = "argparse"
    """How options are written: `--a b`, `--a=b` and Python files as nanoGPT takes them, or TOML."""
    options: dict[str, ForeignOption]
    families: Annotated[tuple[OptionFamily, ...], Field(strict=False)] = ()
    """Options that share a row."""
    fixed: dict[str, FixedSetting] = Field(default={})
    """Settings of every run, by path."""
    rules: Texts = ()
    """Functions of `RULES` that are called even if none of their options is given."""
    about: str = ""
    """What a newcomer should know, for the page about this dialect."""

    def option(self, name: str) -> ForeignOption:
        """The row of an option, its own or that of its family."""
        if name in self.options:
            return self.options[name]
        return next(family.option for family in self.families if family.has(name))

    def resolve(self, name: str) -> list[str]:
        """The options that a written name may stand for; argparse takes any unique beginning."""
        if name in self.options:
            return [name]
        if names := [known for known, option in self.options.items() if name in option.also]:
            return names
        if not _NAME.fullmatch(name):
            return []
        if any(family.has(name) for family in self.families):
            return [name]
        if self.syntax != "argparse" or not name.startswith("--") or len(name) < 3:
            return []
        known = (*self.options, *self._in_families)
        return [whole for whole in known if whole.startswith(name)]

    def nearest(self, name: str) -> list[str]:
        """The options whose names are most like this one."""
        others = [other for option in self.options.values() for other in option.also]
        known = [*self.options, *others, *self._in_families]
        return difflib.get_close_matches(name, known, n=2, cutoff=0.6)

    @property
    def _in_families(self) -> list[str]:
        """The options of families that are known by their whole names."""
        return [name for family in self.families for name in family.names if "*" not in name]


def table_names() -> list[str]:
    """All tables, such as megatron and megatron-prepare."""
    folder = resources.files("gristmill.dialects") / "tables"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


def dialect_names(verb: str) -> list[str]:
    """The dialects that a command understands."""
    names = [name for name in table_names() if load_table(name).verb == verb]
    return [name.removesuffix(f"-{verb}") for name in names]


@cache
def load_table(name: str) -> Dialect:
    """One table."""
    if name not in table_names():
        near = difflib.get_close_matches(name, table_names(), n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(table_names())}"
        raise UserError(f"there is no dialect {name!r}", remedy=remedy, exit=Exit.USAGE)
    file = resources.files("gristmill.dialects") / "tables" / f"{name}.toml"
    return Dialect.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))


def load_dialect(name: str, verb: str) -> Dialect:
    """The table of a dialect for one of our commands."""
    table = name if verb == "train" else f"{name}-{verb}"
    if table in table_names() and load_table(table).verb == verb:
        return load_table(table)
    known = ", ".join(dialect_names(verb))
    what = f"`gristmill {verb}` knows no dialect {name!r}"
    raise UserError(what, where="--dialect", remedy=f"one of {known}", exit=Exit.USAGE)
