"""`doctor --cluster`: checks that run on several processes, started like `train`.

without a launcher     starts one process for each GPU (`--processes` changes the number), or two on
                       a machine without GPUs, and waits for them
under a launcher       runs as one of its processes
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
"""The names in `bench/cluster/runner.py`, known here without importing torch."""
_GRACE = 30.0
"""Seconds that the other processes get after one is lost: rank 0 still reports its findings."""
_CPU_PROCESSES = 2
"""Default number of processes on a machine without GPUs."""
MIN_TIMEOUT = 5.0
"""Shortest time limit in seconds."""


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
    def checks(self) -> tuple[str, ...]:
        """The names of the checks to run."""
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


def parse_timeout(text: str, option: str) -> float:
    """A time limit in seconds."""
    seconds = parse_seconds(text)
    if seconds < MIN_TIMEOUT:
        remedy = f"give at least {MIN_TIMEOUT:.0f}s: a busy process may need that long"
        raise UserError(f"{text} is too short", where=option, remedy=remedy, exit=Exit.USAGE)
    return seconds


def check_cluster(options: ClusterOptions, *, supervised: bool) -> int:
    """Run the checks as one of several processes, or start them all; returns the exit status."""
    checks = options.checks
    if options.json is not None:
        require_place(options.json)
    if not options.folder.is_dir():
        what, remedy = "there is no such folder", "name one that exists on all nodes"
        raise UserError(what, where=f"--folder {options.folder}", remedy=remedy)
    place = ProcessInfo.current()
    if not supervised and place.world == 1:
        return _launch(options)
    if place.address is None:
        raise UserError(
            f"started as one of {place.world} processes without a rendezvous address",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="start it like `train`, with torchrun, srun or mpiexec, or set both variables",
        )
    from gristmill.bench.cluster.runner import CheckRunner

    with ProgressLine("doctor", quiet=place.rank != 0) as line:

        def write_document(document: Mapping[str, Any]) -> None:
            if options.json is not None:
                write_json(options.json, document)
            _clear(line)

        runner = CheckRunner(
            options.folder,
            device=options.device,
            start_timeout=options.start_timeout,
            timeout=options.timeout,
            checks=checks,
            on_finding=show_finding,
            on_progress=line.update,
            on_document=write_document,
            # `_launch` reads the status in the document; a process that exits with it looks failed.
            exit_by_findings=not (supervised and options.processes is not None),
        )
        return runner.run(place)


def show_finding(finding: Finding) -> None:
    """Print one finding."""
    state = "ok     " if finding.good else "PROBLEM"
    typer.echo(f"{state}  {finding.name:<18} {finding.what}")
    if finding.remedy:
        typer.echo(f"{'':>28}{finding.remedy}")


def _clear(line: ProgressLine) -> None:
    """Clear the progress line now: the process may exit before the line is closed."""
    if line in ProgressLine.shown:
        line.update(1, 1, "done")


def _launch(options: ClusterOptions) -> int:
    """Run all processes on this machine; returns the exit status of their findings."""
    processes = options.processes or _default_processes(options.device)
    require_gpus(options.device, processes=processes)
    folder = Path(tempfile.mkdtemp(prefix="gristmill-doctor-"))
    document = options.json or folder / "doctor.json"
    arguments = [f"--processes={processes}", f"--json={document}", f"--folder={options.folder}"]
    arguments += [f"--only={name}" for name in options.only]
    arguments += [f"--skip={name}" for name in options.skip]
    arguments += [f"--device={options.device}", f"--start-timeout={options.start_timeout:g}s"]
    arguments += [] if options.timeout is None else [f"--timeout={options.timeout:g}s"]
    command = (sys.executable, "-m", "gristmill", "doctor", "--cluster", *arguments)
    status = supervise(Job(command, processes, RunFolder(folder)), grace=_GRACE)
    if status == Exit.DONE:
        status = int(read_json(document)["exit"])
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _default_processes(device: str) -> int:
    gpus = None if device == "cpu" else visible_gpus()
    return gpus or _CPU_PROCESSES
