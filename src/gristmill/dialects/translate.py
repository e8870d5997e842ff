"""The translator: options of another program -> settings of a run, by its table.

    words, or a file -> GivenOption… -> TranslationDraft -> Translation

Rows of the table do most of it; options that mean something only together are left to a few
functions in `*_rules.py`, which the table names. Nothing is dropped in silence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from gristmill.base.errors import Exit, Problem, UserError, on_one_line
from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig
from gristmill.dialects import (
    gpt2_rules,
    llm_pytorch_rules,
    megatron_data_rules,
    megatron_rules,
    megatron_schedule_rules,
)
from gristmill.dialects.draft import Preparation, Remark, TranslatedSetting, TranslationDraft
from gristmill.dialects.table import Dialect, ForeignOption
from gristmill.dialects.words import (
    GivenOption,
    given_variables,
    other_script,
    read_options,
    split_launcher,
)

CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "steps": lambda amount: f"{amount} steps",
    "samples": lambda amount: f"{amount} samples",
    "tokens": lambda amount: f"{amount} tokens",
    "minutes": lambda amount: f"{amount}m",
    "seconds": lambda amount: f"{amount}s",
    "negate": lambda yes: not yes,
}
"""How values change on the way, by the names that tables use."""
RULES: Mapping[str, Callable[[TranslationDraft], None]] = {
    rule.__name__: rule
    for module in (
        megatron_schedule_rules,
        megatron_rules,
        megatron_data_rules,
        llm_pytorch_rules,
        gpt2_rules,
    )
    for rule in module.RULES
}
"""The functions that tables name, for options that mean something only together."""
_ALIKE = "this is what is done in any case"
_OTHER_MODELS = ("model.start", "model.hf")
"""Settings that name a model, whose sizes a run takes over."""
_TOP = "|".join(info.alias or name for name, info in RunConfig.model_fields.items())
_OVERRIDE = re.compile(rf"([a-z_]+(\.[a-z0-9_]+)+|{_TOP})=.*", re.DOTALL)
_WANDB = re.compile(r"WANDB_[A-Z_]+=")
_WANDB_MODES = {
    "online": "online",
    "offline": "offline",
    "disabled": "disabled",
    "dryrun": "offline",
}
_PLACE = re.compile(r"(?:.*: )?([a-z_0-9]+(?:\.[a-z_0-9]+)*)", re.DOTALL)


@dataclass(frozen=True)
class Translation:
    """What another program's command amounts to here."""

    dialect: Dialect
    command: tuple[str, ...]
    """The words, as typed."""
    settings: tuple[TranslatedSetting, ...]
    changed: tuple[Remark, ...]
    """Options that are taken, but not quite as the other program takes them."""
    ignored: tuple[Remark, ...]
    """Options without effect on the result, and why."""
    first: tuple[Preparation, ...] = ()
    """Commands of ours that have to be run before."""

    @property
    def words(self) -> list[str]:
        """Options and arguments of our command, besides the settings of a run."""
        options: list[str] = []
        arguments: list[str] = []
        for setting in self.settings:
            if self.dialect.verb == "train" and not setting.path.startswith("-"):
                continue
            values = setting.value if isinstance(setting.value, list) else [setting.value]
            if not setting.path.startswith("-"):
                arguments += map(str, values)
            elif isinstance(setting.value, bool):
                options += [setting.path] if setting.value else []
            else:
                options += [f"{setting.path}={value}" for value in values]
        return [*options, "--", *arguments] if arguments else options

    @property
    def defaults(self) -> frozenset[str]:
        """The settings that the user did not ask for."""
        return frozenset(setting.path for setting in self.settings if not setting.asked)

    @property
    def text(self) -> str:
        """The run file, or our command; each line with the options that it comes from."""
        started = split_launcher(self.dialect, self.command)[0]
        program = [] if started else [self.dialect.program]
        typed = on_one_line(" ".join([*program, shlex.join(self.command)])).strip()
        lines = [
            f"# {self.dialect.title}: {typed}",
            *(f"# first: {preparation.command}" for preparation in self.first),
        ]
        if self.dialect.verb == "train":
            own = [
                setting
                for setting in self.settings
                if setting.path.startswith("-") and setting.value
            ]
            lines += [
                f"# with: gristmill train {setting.path} ({setting.source})" for setting in own
            ]
            lines += _run_file(
                [setting for setting in self.settings if not setting.path.startswith("-")]
            )
        else:
            words = ("gristmill", *self.dialect.verb.split(), *self.words)
            lines += ["", " ".join(map(_quoted, words)), ""]
            lines += [f"# {setting.path}: {setting.source}" for setting in self.settings]
        for title, remarks in (("changed", self.changed), ("ignored", self.ignored)):
            if remarks:
                lines += [
                    "",
                    f"# {title}",
                    *(f"#   {on_one_line(str(remark))}" for remark in remarks),
                ]
        return "\n".join(lines) + "\n"

    def check(self) -> None:
        """Refuse settings that no run can have, in terms of the options that they come from. Of a
        model that the run starts from, only a folder on this machine is looked at."""
        if self.dialect.verb != "train":
            return
        named = {
            setting.path: str(setting.value)
            for setting in self.settings
            if setting.path in _OTHER_MODELS
        }
        absent = [path for path, name in named.items() if not Path(name).exists()]
        try:
            load_text(
                self.text,
                [f"{path}=unset" for path in absent],
                place=self.dialect.program,
                defaults=self.defaults,
            )
        except UserError as error:
            # The model that is not here would have given what is missing.
            known = [
                problem
                for problem in error.problems
                if not absent or "model" not in str(problem.where)
            ]
            if known:
                raise self.explain(UserError(known, exit=error.exit)) from error

    def explain(self, error: UserError) -> UserError:
        """An error about settings, in terms of the options that they come from."""
        sources = {setting.path: setting.source for setting in self.settings}
        problems = [self._explained(problem, sources) for problem in error.problems]
        return UserError(problems, exit=error.exit)

    def _explained(self, problem: Problem, sources: Mapping[str, str]) -> Problem:
        match = _PLACE.fullmatch(problem.where or "")
        parts = match[1].split(".") if match else []
        for end in range(len(parts), 0, -1):
            path = ".".join(parts[:end])
            inside = dict.fromkeys(
                source for known, source in sources.items() if f"{known}.".startswith(f"{path}.")
            )
            # All options of a large table would say nothing.
            if path in sources or 0 < len(inside) <= 3:
                where = f"{' '.join(inside)}: {'.'.join(parts)}"
                return Problem(problem.what, where, problem.remedy)
        setting = ".".join(parts)
        named = [name for name, option in self.dialect.options.items() if option.to == setting]
        place = f"{named[0]}: {setting}" if named else problem.where
        return Problem(problem.what, place, problem.remedy)


def split_overrides(dialect: Dialect, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of ours, such as runtime.device=cpu, and the other program's words. Where those may
    be values of options, ours stand at the beginning."""
    if dialect.syntax != "argparse":
        ours = [word for word in words if _OVERRIDE.fullmatch(word)]
        return ours, [word for word in words if not _OVERRIDE.fullmatch(word)]
    count = 0
    while count < len(words) and _OVERRIDE.fullmatch(words[count]):
        count += 1
    return list(words[:count]), list(words[count:])


def translate(dialect: Dialect, words: Sequence[str]) -> Translation:
    """Translate a command; raises one error that lists all options that cannot be taken."""
    launcher, options = split_launcher(dialect, words)
    if other := other_script(dialect, words):
        raise UserError([other], exit=Exit.USAGE)
    variables = given_variables(dialect, launcher)
    given = [*variables, *read_options(dialect, options)]
    draft = TranslationDraft(dialect, given, words=options, launcher=launcher)
    taken = {f"{option.name}={option.value}" for option in variables}
    if left := [word for word in launcher if word not in taken and not _WANDB.match(word)]:
        text = "this starts the other program"
        if dialect.verb == "train":
            text += "; --processes, or `gristmill launch`, starts several processes here"
        draft.ignored.append(Remark(shlex.join(left), text))
    for option in draft.options.values():
        if option.changed is not None:
            draft.changed.append(Remark(option.written, option.changed))
    for path, fixed in dialect.fixed.items():
        draft.fix(path, fixed.value, fixed.because)
    for name in dict.fromkeys((*dialect.options, *draft.options)):
        _take(draft, name, dialect.option(name))
    for rule in dialect.rules:
        RULES[rule](draft)
    _take_wandb(draft, launcher)
    if dialect.syntax == "argparse":
        # Elsewhere, words are meant to replace what a file says.
        _note_repeated(draft, given)
    for name in draft.left_over:
        draft.refuse("has no effect beside the other options", name, "leave it out")
    if draft.problems:
        raise UserError(draft.problems)
    return Translation(
        dialect,
        tuple(words),
        tuple(draft.settings),
        tuple(draft.changed),
        tuple(draft.ignored),
        tuple(draft.first),
    )


def _take(draft: TranslationDraft, name: str, option: ForeignOption) -> None:
    """What the row of an option says by itself."""
    given = name in draft.options
    value = draft.options[name].value if given else option.default
    if value is None:
        return
    if given and option.changed is not None:
        draft.change(name, option.changed)
    if given and option.ignored is not None:
        draft.ignore(name, option.ignored)
    elif given and option.refused is not None and option.choices is None:
        if value in option.harmless:
            draft.ignore(name, _ALIKE)
        else:
            draft.refuse(option.refused, name, option.instead or "")
    elif option.choices is not None:
        if value in option.choices:
            value = option.choices[value]
        else:
            known = ", ".join(option.choices)
            draft.refuse(
                option.refused or "is not known", name, option.instead or f"one of {known}"
            )
            return
    if option.becomes is not None:
        value = option.becomes
    elif option.convert is not None:
        value = CONVERSIONS[option.convert](value)
    if option.to is not None:
        draft.set(option.to, value, name)


def _take_wandb(draft: TranslationDraft, launcher: Sequence[str]) -> None:
    """Variables of Weights & Biases before a command, which hold for every program."""
    logs = any(setting.path == "track.wandb.project" for setting in draft.settings)
    for word in filter(_WANDB.match, launcher):
        name, _, value = word.partition("=")
        mode = _WANDB_MODES.get(value) if name == "WANDB_MODE" else None
        if not logs:
            draft.ignored.append(Remark(word, "nothing is sent to W&B"))
        elif mode == "disabled":
            draft.settings = [
                setting for setting in draft.settings if setting.path != "track.wandb.project"
            ]
            draft.changed.append(Remark(word, "the run has no [track.wandb]"))
        elif mode is not None:
            draft.settings.append(TranslatedSetting("track.wandb.mode", mode, word))
        else:
            text = "W&B reads it from the environment: export it before this command"
            draft.changed.append(Remark(word, text))


def _note_repeated(draft: TranslationDraft, given: Sequence[GivenOption]) -> None:
    for name, last in draft.options.items():
        earlier = [option for option in given if option.name == name and option is not last]
        if any(option.value != last.value for option in earlier):
            draft.change(name, f"given {len(earlier) + 1} times; the last one counts")


# ------------------------------------------------------------------ the run file


def _run_file(settings: Sequence[TranslatedSetting]) -> list[str]:
    """The lines of a run file, in the order of its tables."""
    order = [info.alias or name for name, info in RunConfig.model_fields.items()]
    tables: dict[str, list[TranslatedSetting]] = {}
    for setting in sorted(settings, key=lambda setting: order.index(setting.path.split(".")[0])):
        tables.setdefault(setting.path.rpartition(".")[0], []).append(setting)
    lines: list[str] = []
    # A key of the top must stand before all tables.
    for table in sorted(tables, key=bool):
        lines += ["", *([f"[{table}]"] if table else [])]
        pairs = [(f"{setting.path.rpartition('.')[2]} = {_toml(setting.value)}", setting.source)
                 for setting in tables[table]]  # fmt: skip
        width = min(40, max(len(pair) for pair, _ in pairs))
        lines += [f"{pair:<{width}}  # {on_one_line(source)}" for pair, source in pairs]
    return lines


def _quoted(word: str) -> str:
    """A word for bash, on one line."""
    if word.isprintable():
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    escaped = (letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in plain)
    return f"$'{''.join(escaped)}'"


def _toml(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    text = tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)
