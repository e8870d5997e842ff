"""The model that a run's adapters belong to: which one it is, and where it is now.

The checkpoints of a run with adapters do not hold the weights that they adapt. `base` in their
state.json says what these are:

    start       as the run file names the model: a run folder, a Hugging Face folder or a name
    folder      where that was, from the root of the file system
    relative    the same, from the run's folder; null for a name, whose folder is in a cache
    checkpoint  of a run, which of its checkpoints; null for a Hugging Face folder
    sha256      of a checkpoint, that of its manifest; otherwise of the names and SHA-256 of all
                files of weights

Whoever opens such a run looks for the model where the run file says it is now, and where it was,
and takes only the very same weights.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import sha256_file, sha256_text
from gristmill.checkpoint.layout import MANIFEST, CheckpointFolder
from gristmill.checkpoint.state_file import read_state
from gristmill.hub.downloads import model_folder


@dataclass(frozen=True)
class AdapterBase:
    """Which weights adapters belong to."""

    start: str
    folder: str
    relative: str | None
    checkpoint: str | None
    sha256: str

    @classmethod
    def of(cls, value: Any, *, where: Path) -> AdapterBase:
        """From a value of a JSON file."""
        names = [field.name for field in fields(cls)]
        if isinstance(value, dict) and sorted(value) == sorted(names):
            base = cls(**value)
            texts = [base.start, base.folder, base.sha256]
            texts += [base.relative or "", base.checkpoint or ""]
            if all(isinstance(text, str) for text in texts) and "/" not in texts[-1]:
                return base
        raise DataError("`base` does not say which model the adapters belong to", where=where)

    @classmethod
    def at(cls, start: str, folder: Path, *, checkpoint: Path | None, run: Path) -> AdapterBase:
        """The weights that a run finds in a folder, which may be large: all of them are read."""
        name = None if checkpoint is None else checkpoint.name
        sha256 = _weights_sha256(folder, name)
        return cls(start=start, checkpoint=name, sha256=sha256, **_place(start, folder, run))

    def fault(self, folder: Path) -> str | None:
        """Why a folder is not this model, if it is not."""
        if not folder.is_dir():
            return "is not there"
        if self.checkpoint is not None and not self.path(folder).is_dir():
            return f"has no {self.checkpoint} (any more)"
        try:
            same = _weights_sha256(folder, self.checkpoint) == self.sha256
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None if same else "holds other weights now"

    def path(self, folder: Path) -> Path:
        """The folder of the weights themselves: of a run, that of the checkpoint."""
        return folder if self.checkpoint is None else folder / "checkpoints" / self.checkpoint

    def moved_to(self, start: str, folder: Path, *, run: Path) -> AdapterBase:
        """The same model where a run file now says that it is; refuses another one."""
        fault = self.fault(folder)
        if fault is not None:
            raise UserError(
                f"{fault}; the adapters of this run belong to {self._named}",
                where=str(folder),
                remedy="put that back, or name the place where it is now with model.start "
                "(model.hf of a Hugging Face model); for another start give the run another name, "
                "or use --fresh, which moves the old run aside",
                exit=Exit.DATA,
            )
        return replace(self, start=start, **_place(start, folder, run))

    def find(self, run: Path) -> Path:
        """The folder of the model of a run's adapters; refuses any that is not the same."""
        problems = []
        for place in self._places(run):
            fault = self.fault(place)
            if fault is None:
                return place
            problems.append(Problem(fault, str(place)))
        if self.relative is None:
            place = model_folder(self.start, where="MODEL")
            fault = self.fault(place)
            if fault is None:
                return place
            problems.append(Problem(fault, self.start))
        what = f"this run holds adapters only, and their model was not found: {self._named}"
        remedy = (
            "put it back where it was, or name its new place: "
            f"`gristmill train {run} model.start=PLACE` (model.hf=PLACE of a Hugging Face model) "
            "checks and notes it, and trains no step if the run is done"
        )
        last = Problem(problems[-1].what, problems[-1].where, remedy)
        raise UserError([Problem(what, str(run)), *problems[:-1], last], exit=Exit.DATA)

    @property
    def _named(self) -> str:
        of_run = "" if self.checkpoint is None else f"{self.checkpoint} of "
        return f"{of_run}{self.start}"

    def _places(self, run: Path) -> Iterator[Path]:
        """Where to look, each place once."""
        named = _start_of(run)
        places = [Path(self.folder)]
        if self.relative is not None:
            places.append(run / self.relative)
        if named is not None and (self.relative is not None or Path(named).exists()):
            places.insert(0, Path(named))
        yield from dict.fromkeys(place.resolve() for place in places)


def _place(start: str, folder: Path, run: Path) -> dict[str, Any]:
    place = folder.resolve()
    relative = os.path.relpath(place, run.resolve()) if Path(start).exists() else None
    return {"folder": str(place), "relative": relative}


def _start_of(run: Path) -> str | None:
    """What the run file of a run names as its start."""
    try:
        model = tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))["model"]
        named = model.get("hf") if model.get("init") == "pretrained" else model.get("start")
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return named if isinstance(named, str) else None


def _weights_sha256(folder: Path, checkpoint: str | None) -> str:
    if checkpoint is not None:
        return sha256_file(folder / "checkpoints" / checkpoint / MANIFEST)
    lines = []
    for file in sorted(folder.glob("*.safetensors")):
        stat = file.stat()
        lines.append(f"{_file_sha256(file, stat.st_size, stat.st_mtime_ns)} {file.name}\n")
    return sha256_text("".join(lines))


@cache
def _file_sha256(file: Path, size: int, changed: int) -> str:
    """The SHA-256 of a file that may be large and is looked at more than once; the other arguments
    tell whether it is still the same."""
    return sha256_file(file)


def saved_base(checkpoints: CheckpointFolder) -> AdapterBase | None:
    """The model that the adapters of a run's checkpoints belong to; None if there are none."""
    for path in reversed(checkpoints.committed()):
        try:
            value = read_state(path).get("base")
            if value is not None:
                return AdapterBase.of(value, where=path)
        except UserError:
            continue  # damaged: the search for a checkpoint to resume from will say so
    return None
