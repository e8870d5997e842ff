"""Tracking services that a run can report to: TensorBoard, Weights & Biases and trackio.

Each is a sink of records, and comes with an extra of the same name. Numbers have the names that
`scalars` gives them.
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gristmill.base.errors import UserError, optional, printable
from gristmill.base.files import storage_errors, write_atomic
from gristmill.track.records import EventRecord, Record, SampleRecord, StragglerRecord
from gristmill.track.sinks import scalars, straggler_event


class TensorBoardSink:
    """Writes event files that TensorBoard reads, with its own writer and without torch."""

    def __init__(self, folder: Path) -> None:
        def module(name: str) -> Any:
            return optional(name, extra="tensorboard", purpose="logging to TensorBoard")

        self._event = module("tensorboard.compat.proto.event_pb2")
        self._summary = module("tensorboard.compat.proto.summary_pb2").Summary
        self._tensor = module("tensorboard.compat.proto.tensor_pb2").TensorProto
        self._text = module("tensorboard.plugins.text.metadata").create_summary_metadata("", "")
        writer = module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        with storage_errors(folder):
            self._writer = writer(str(folder))
        self._started = False

    def write(self, record: Record) -> None:
        if not self._started:
            # Tells TensorBoard to drop the steps that a resumed run repeats.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(record, session_log=start)
            self._started = True
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in scalars(record).items()
        ]
        if isinstance(record, SampleRecord):
            values.append(self._text_value("sample", record.prompt + record.text))
        if isinstance(record, StragglerRecord):
            record = straggler_event(record)
        if isinstance(record, EventRecord):
            values.append(self._text_value(record.level, record.text))
        self._add(record, summary=self._summary(value=values))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, record: Record, **content: Any) -> None:
        event = self._event.Event(wall_time=record.time, step=record.step, **content)
        self._writer.add_event(event)

    def _text_value(self, tag: str, text: str) -> Any:
        # TensorBoard renders Markdown; text indented by four is shown verbatim.
        literal = "\n".join(f"    {part}" for part in text.split("\n"))
        tensor = self._tensor(dtype="DT_STRING", string_val=[literal.encode(errors="replace")])
        tensor.tensor_shape.dim.add(size=1)
        return self._summary.Value(tag=tag, tensor=tensor, metadata=self._text)


WandbMode: TypeAlias = Literal["online", "offline", "disabled"]
_WANDB_MODES: Mapping[str, WandbMode] = {
    "online": "online",
    "offline": "offline",
    "disabled": "disabled",
    "dryrun": "offline",
    "run": "online",
}
"""What WANDB_MODE may say; the last two are its old names."""
_WANDB_VARIABLES = {
    "dir": "WANDB_DIR",
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "name": "WANDB_NAME",
    "id": "WANDB_RUN_ID",
}
"""The environment variable that W&B takes each of these from; all others it takes in any case."""


def wandb_mode(mode: Literal["online", "offline"]) -> WandbMode:
    """The mode of W&B: that of WANDB_MODE, or else that of the run file."""
    given = os.environ.get("WANDB_MODE")
    if not given:
        return mode
    if given.lower() not in _WANDB_MODES:
        raise UserError(
            f"{printable(given)!r} is no mode of Weights & Biases",
            where="environment WANDB_MODE",
            remedy="give online, offline or disabled, or unset it: track.wandb.mode holds then",
        )
    return _WANDB_MODES[given.lower()]


class WandbSink:
    """Writes to Weights & Biases, or to a folder for `wandb sync` to send later.

    Environment variables of W&B take precedence over the run file: they are about this start.

    The first record opens the W&B run, inside the guard of the sink, so that an unreachable service
    does not keep training from starting. Events are left out: W&B has no place for them but alerts,
    which send mail.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        mode: WandbMode,
        settings: Mapping[str, Any],
        run_id: str,
        entity: str | None = None,
    ) -> None:
        self._wandb = optional("wandb", extra="wandb", purpose="logging to Weights & Biases")
        # A login prompt in the middle of a run would wait for an answer forever.
        if mode == "online" and not self._wandb.login(prompt=False, verify=False):
            raise UserError(
                "not logged in to Weights & Biases",
                where="track.wandb",
                remedy='run `wandb login`, or set track.wandb.mode = "offline" (WANDB_MODE=offline '
                "does the same) and send the files later with `wandb sync`",
            )
        waits = {"init_timeout": 30, "finish_timeout": 120}
        ours = {"dir": str(folder), "project": project, "name": name, "id": run_id}
        if entity is not None:
            ours["entity"] = entity
        self._options = {
            **{
                key: value
                for key, value in ours.items()
                if not os.environ.get(_WANDB_VARIABLES[key])
            },
            "resume": "allow",
            "mode": mode,
            "config": dict(settings),
            "settings": {"console": "off", "silent": mode == "offline", **waits},
        }
        self._run: Any = None

    def write(self, record: Record) -> None:
        if self._run is None:
            self._run = self._wandb.init(**self._options)
        values: dict[str, Any] = dict(scalars(record))
        if isinstance(record, SampleRecord):
            text = f"<pre>{html.escape(record.prompt)}<b>{html.escape(record.text)}</b></pre>"
            values["sample"] = self._wandb.Html(text)
        if values:
            self._run.log(values, step=record.step)

    def flush(self) -> None:
        """Nothing: W&B sends on its own, and waiting for it would hold up training."""

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class TrackioSink:
    """Writes to trackio: to its folder on this machine, or to a Space or server of its own.

    trackio finds a run by its name. A file in the run folder tells whether this run has been there
    before, so that it is continued, and a new run of the same name is not.

    The first record opens the run, as for W&B. What trackio prints goes to standard error, since
    scripts may read the output of a run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        settings: Mapping[str, Any],
        space: str | None = None,
    ) -> None:
        self._trackio = optional("trackio", extra="trackio", purpose="logging to trackio")
        self._known = folder / "trackio-id.txt"
        self._options = {
            "project": project,
            "name": name,
            "space_id": space,
            "config": dict(settings),
            # The system metrics of a run are in its records.
            "auto_log_cpu": False,
            "auto_log_gpu": False,
            "embed": False,
        }
        self._run: Any = None

    def write(self, record: Record) -> None:
        if self._run is None:
            resume = "allow" if self._known.is_file() else "never"
            # trackio ends the run of its context once more when the program exits.
            own = contextvars.copy_context()
            with contextlib.redirect_stdout(sys.stderr):
                self._run = own.run(self._trackio.init, **self._options, resume=resume)
            write_atomic(self._known, str(self._run.id))
        values: dict[str, Any] = dict(scalars(record))
        if isinstance(record, SampleRecord):
            text = record.prompt + record.text
            # A fence of Markdown must be longer than any in the text.
            fence = "`" * (3 + max(map(len, re.findall("`+", text)), default=0))
            values["sample"] = self._trackio.Markdown(f"{fence}\n{text}\n{fence}")
        if values:
            self._run.log(values, step=record.step)

    def flush(self) -> None:
        """Nothing: trackio writes in the background."""

    def close(self) -> None:
        if self._run is not None:
            with contextlib.redirect_stdout(sys.stderr):
                self._run.finish()
