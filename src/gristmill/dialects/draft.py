"""A translation in the making: which options were given, and what has become of each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.base.errors import Problem, on_one_line
from gristmill.dialects.table import Dialect
from gristmill.dialects.words import GivenOption, names_script

_GRAD_SCALER = {"initial": 65536.0, "window": 2000, "hysteresis": 1}


@dataclass(frozen=True)
class TranslatedSetting:
    """A setting, or an option of our own command, and where it comes from."""

    path: str
    value: Any
    source: str
    """The other program's options, as they were written."""
    asked: bool = True
    """Whether the user wrote one of them; false for what the other program does by itself."""


@dataclass(frozen=True)
class Remark:
    """What the user should know about an option."""

    option: str
    text: str

    def __str__(self) -> str:
        return f"{self.option}: {self.text}"


@dataclass(frozen=True)
class Preparation:
    """A command of ours that makes what a run reads."""

    words: tuple[str, ...]
    makes: tuple[str, ...]
    """The token sets that it makes, by prefix."""

    @property
    def command(self) -> str:
        """The command, for a shell."""
        return on_one_line(shlex.join(["gristmill", *self.words]))


class TranslationDraft:
    """Collects what becomes of the options of one command; every option given is accounted for."""

    def __init__(
        self,
        dialect: Dialect,
        given: Sequence[GivenOption],
        *,
        words: Sequence[str] = (),
        launcher: Sequence[str] = (),
    ) -> None:
        self.dialect = dialect
        self.words, self.launcher = words, launcher
        """The command, behind the name of the script, and what starts the script."""
        # As in argparse, the last one counts.
        self.options = {option.name: option for option in given}
        self.settings: list[TranslatedSetting] = []
        self.changed: list[Remark] = []
        self.ignored: list[Remark] = []
        self.problems: list[Problem] = []
        self.first: list[Preparation] = []
        self._accounted: set[str] = set()

    @property
    def script(self) -> str | None:
        """The script, as it was written, if it was."""
        return self.launcher[-1] if self.launcher else None

    def runs(self, script: str) -> bool:
        """Whether the command starts this script of the program."""
        return self.script is not None and names_script(self.script, script)

    def given(self, name: str) -> bool:
        """Whether the user wrote an option."""
        assert name in self.dialect.options, f"{self.dialect.program} has no {name}"
        return name in self.options

    def get(self, name: str) -> Any:
        """The value of an option, or its default."""
        return self.options[name].value if self.given(name) else self.dialect.options[name].default

    def choice(self, name: str) -> Any:
        """Our value for that of an option with choices; None if it has none."""
        choices = self.dialect.options[name].choices
        assert choices is not None
        return choices.get(self.get(name))

    def only_one(self, *names: str) -> str | None:
        """Which of several options that exclude one another is given; more than one is refused."""
        given = [name for name in names if self.given(name)]
        if len(given) > 1:
            self.refuse(f"{' and '.join(given)} exclude one another", given[-1], "leave one out")
            self.account(*given)
        return given[0] if given else None

    def set(self, path: str, value: Any, *names: str) -> None:
        """Set a setting because of some options."""
        written = [self.written(name) for name in names if self.given(name)]
        source = " ".join(written) or f"default of {' and '.join(names)}"
        self.account(*names)
        self.settings = [setting for setting in self.settings if setting.path != path]
        self.settings.append(TranslatedSetting(path, value, source, asked=bool(written)))

    def take(self, path: str, name: str) -> None:
        """Set a setting to the value of an option, or to its default."""
        self.set(path, self.get(name), name)

    def set_table(self, table: str, values: Mapping[str, Any], *names: str) -> None:
        """Set several settings of a table because of the same options."""
        for key, value in values.items():
            self.set(f"{table}.{key}", value, *names)

    def set_compute(self, kind: str, name: str) -> None:
        """Set the number format; fp16 with the loss scale of torch's GradScaler."""
        self.set("precision.compute", kind, name)
        if kind == "fp16":
            self.set_table("precision.loss_scale", _GRAD_SCALER, name)

    def fix(self, path: str, value: Any, because: str) -> None:
        """Set a setting that no option decides."""
        self.settings.append(TranslatedSetting(path, value, because, asked=False))

    def change(self, name: str, text: str) -> None:
        """Note that an option is taken, but not quite as the other program takes it."""
        self.changed.append(Remark(self.written(name), text))
        self.account(name)

    def changed_once(self, name: str, text: str) -> None:
        """The same, if the option is given at all."""
        if self.given(name):
            self.change(name, text)

    def ignore(self, name: str, why: str) -> None:
        """Note that an option has no effect on the result."""
        self.ignored.append(Remark(self.written(name), why))
        self.account(name)

    def ignore_given(self, why: str, *names: str) -> None:
        """The same of those of some options that are given."""
        for name in filter(self.given, names):
            self.ignore(name, why)

    def refuse(self, what: str, name: str, instead: str) -> None:
        """Note that an option cannot be taken."""
        self.problems.append(Problem(what, self.written(name), instead))
        self.account(name)

    def account(self, *names: str) -> None:
        """Note that options have had their effect."""
        self._accounted.update(names)

    def written(self, name: str) -> str:
        """An option as the user wrote it, or its name."""
        return self.options[name].written if name in self.options else name

    @property
    def left_over(self) -> list[str]:
        """Options given that nothing has looked at."""
        return [name for name in self.options if name not in self._accounted]


def run_name(text: str, otherwise: str) -> str:
    """A text as the name of a run, without what such names cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100] or otherwise
