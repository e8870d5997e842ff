"""`doctor --cluster`: the checks of several processes, started as `train` is.

alone on a machine     starts a process for each GPU (`--processes` for another number), and
                       waits for them; on a machine without GPUs, two on the processor
under a launcher       is one of its processes
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, write_json
from gristmill.base.process import ProcessInfo
from gristmill.base.units import parse_seconds
from gristmill.cli.options import require_place
from gristmill.cli.progress import ProgressLine
from gristmill.launch.processes import Job, supervise
from gristmill.launch.starting import require_gpus, visible_gpus
from gristmill.track.folder import RunFolder

if TYPE_CHECKING:
    from gristmill.bench.finding import Finding

CHECKS = ("network", "clocks", "folder", "devices", "collectives", "pairs")
"""Those of `bench/cluster`, without importing torch."""
_GRACE = 30.0
"""Seconds that the others have, when a process is lost, to say so: rank 0 still writes what was
found."""
_ON_CPU = 2
"""Processes on a machine without GPUs, if nobody says how many."""


LEAST = 5.0
"""Seconds for which processes wait for each other at least."""


@dataclass(frozen=True)
class ClusterOptions:
    """The options of `doctor --cluster`."""

    processes: int | None
    folder: Path
    json: Path | None
    only: Sequence[str]
    skip: Sequence[str]
    device: Literal["auto", "cuda", "cpu"]
    start_timeout: float
    timeout: float | None

    @property
    def chosen(self) -> tuple[str, ...]:
        """The checks to make."""
        for option, names in (("--only", self.only), ("--skip", self.skip)):
            for name in names:
                if name not in CHECKS:
                    raise UserError(
                        f"there is no check {name!r}",
                        where=option,
                        remedy=f"checks are: {', '.join(CHECKS)}",
                        exit=Exit.USAGE,
                    )
        return tuple(
            name
            for name in CHECKS
            if (not self.only or name in self.only) and name not in self.skip
        )


def parse_patience(text: str, option: str) -> float:
    """Seconds for which one process waits for another."""
    seconds = parse_seconds(text)
    if seconds < LEAST:
        remedy = f"give at least {LEAST:.0f}s: a busy process may be late"
        raise UserError(f"{text} is too short", where=option, remedy=remedy, exit=Exit.USAGE)
    return seconds


def examine_cluster(options: ClusterOptions, *, supervised: bool) -> int:
    """Make the checks as one of several processes, or start these; returns the exit status."""
    chosen = options.chosen
    if options.json is not None:
        require_place(options.json)
    if not options.folder.is_dir():
        what, remedy = "there is no such folder", "name one that exists on all nodes"
        raise UserError(what, where=f"--folder {options.folder}", remedy=remedy)
    place = ProcessInfo.current()
    if not supervised and place.world == 1:
        return _start(options)
    if place.address is None:
        raise UserError(
            f"started as one of {place.world} processes without a rendezvous address",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="start as `train` is started, with torchrun, srun or mpiexec; or set both",
        )
    from gristmill.bench.cluster.examination import Examination

    with ProgressLine("doctor", quiet=place.rank != 0) as line:

        def finish(document: Mapping[str, Any]) -> None:
            if options.json is not None:
                write_json(options.json, document)
            _hide(line)

        examination = Examination(
            options.folder,
            device=options.device,
            start=options.start_timeout,
            limit=options.timeout,
            chosen=chosen,
            show=show_finding,
            progress=line.update,
            finish=finish,
            # Whoever started all of them reads the document: no process has failed.
            tells_status=not (supervised and options.processes is not None),
        )
        return examination.run(place)


def show_finding(finding: Finding) -> None:
    """Print one finding."""
    state = "ok     " if finding.good else "PROBLEM"
    typer.echo(f"{state}  {finding.name:<18} {finding.what}")
    if finding.remedy:
        typer.echo(f"{'':>28}{finding.remedy}")


def _hide(line: ProgressLine) -> None:
    """Leave the terminal as it was: the process may end before the line is closed."""
    if line in ProgressLine.shown:
        line.update(1, 1, "done")


def _start(options: ClusterOptions) -> int:
    """Start all processes on this machine, and see what they found."""
    processes = options.processes or _processes_here(options.device)
    require_gpus(options.device, processes=processes)
    folder = Path(tempfile.mkdtemp(prefix="gristmill-doctor-"))
    document = options.json or folder / "doctor.json"
    words = [f"--processes={processes}", f"--json={document}", f"--folder={options.folder}"]
    words += [f"--only={name}" for name in options.only]
    words += [f"--skip={name}" for name in options.skip]
    words += [f"--device={options.device}", f"--start-timeout={options.start_timeout:g}s"]
    words += [] if options.timeout is None else [f"--timeout={options.timeout:g}s"]
    command = (sys.executable, "-m", "gristmill", "doctor", "--cluster", *words)
    status = supervise(Job(command, processes, RunFolder(folder)), grace=_GRACE)
    if status == Exit.DONE:
        status = int(read_json(document)["exit"])
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _processes_here(device: str) -> int:
    gpus = None if device == "cpu" else visible_gpus()
    return gpus or _ON_CPU
