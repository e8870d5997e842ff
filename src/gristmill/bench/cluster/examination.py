"""All checks of a cluster, one after the other, and the document that holds what they found.

    processes     who is there, and what is not alike
    network       interfaces, MTU, InfiniBand, variables
    clocks        how far apart
    folder        is it shared, does it lock, how fast is it
    devices       who is slow, who has errors
    collectives   bandwidth by size, results checked
    pairs         every pair of nodes

    {"format": 1, "kind": "gristmill doctor --cluster", "gristmill": "…", "when": "…",
     "complete": true, "good": false, "exit": 1, "members": […],
     "checks": {"network": {"seconds": 0.2, "numbers": …, "findings": [
         {"name": "…", "what": "…", "good": true, "remedy": null}]}}}

A check measures on all processes and judges on rank 0, from the numbers alone. Its numbers are in
the document, in units of seconds, bytes and bytes a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from gristmill.base.errors import Exit
from gristmill.base.process import ProcessInfo
from gristmill.base.units import timestamp
from gristmill.bench.cluster.attendance import Attendance, Lost
from gristmill.bench.cluster.clocks import judge_clocks, measure_clocks
from gristmill.bench.cluster.collectives import judge_collectives, measure_collectives
from gristmill.bench.cluster.devices import judge_devices, measure_devices
from gristmill.bench.cluster.members import Member, Team, judge_members, named
from gristmill.bench.cluster.network import judge_network, measure_network
from gristmill.bench.cluster.pairs import judge_pairs, measure_pairs
from gristmill.bench.cluster.shared_folder import judge_folder, measure_folder
from gristmill.bench.finding import PROBLEM, Finding, problem
from gristmill.config.parallel import Mesh, ParallelConfig
from gristmill.config.schema import RuntimeConfig
from gristmill.distributed.device import select_device
from gristmill.distributed.world import close_world, open_world
from gristmill.train.environment import version

FORMAT = 1
KIND = "gristmill doctor --cluster"
_WORST = (Exit.DEVICE, Exit.PEER, Exit.STORAGE)
"""Exit statuses that count before others, the worst first."""


@dataclass(frozen=True)
class Check:
    """One check: numbers that all processes measure together, and what they mean."""

    measure: Callable[[Team], Any]
    judge: Callable[[Any, Sequence[Member]], Iterable[Finding]]
    seconds: float = 60.0
    """How long it may take, for a few nodes."""
    each: float = 0.0
    """How much longer for each node."""


CHECKS = {
    "network": Check(measure_network, judge_network),
    "clocks": Check(measure_clocks, lambda found, members: judge_clocks(found), each=0.5),
    "folder": Check(measure_folder, judge_folder, 120.0),
    "devices": Check(measure_devices, judge_devices, 120.0),
    "collectives": Check(measure_collectives, judge_collectives, 300.0, 1.0),
    "pairs": Check(measure_pairs, judge_pairs, 120.0, 2.0),
}


@dataclass
class Report:
    """What was found so far; on rank 0."""

    members: Sequence[Member | None] = ()
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    complete: bool = False

    def add(self, check: str, findings: Sequence[Finding], numbers: Any, seconds: float) -> None:
        self.findings += findings
        self.checks[check] = {
            "seconds": round(seconds, 3),
            "findings": [_as_json(finding) for finding in findings],
            "numbers": numbers,
        }

    @property
    def exit(self) -> int:
        """The status of the worst finding."""
        statuses = {finding.exit for finding in self.findings if not finding.good}
        worst = next((status for status in _WORST if status in statuses), PROBLEM)
        return int(worst) if statuses else int(Exit.DONE)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": KIND,
            "gristmill": version("gristmill"),
            "when": timestamp(),
            "complete": self.complete,
            "good": self.exit == Exit.DONE,
            "exit": self.exit,
            "members": [None if one is None else one.as_json() for one in self.members],
            "checks": self.checks,
        }


def _as_json(finding: Finding) -> dict[str, Any]:
    return {name: value for name, value in asdict(finding).items() if name != "exit"}


@dataclass(frozen=True)
class Examination:
    """What is asked for, and who is told about it on rank 0."""

    folder: Path
    device: Literal["auto", "cuda", "cpu"] = "auto"
    start: float = 120.0
    """Seconds in which all processes must come."""
    limit: float | None = None
    """Seconds for each check, if not its own."""
    chosen: Collection[str] = tuple(CHECKS)
    show: Callable[[Finding], None] = lambda finding: None
    progress: Callable[[int, int, str], None] = lambda done, total, message: None
    finish: Callable[[Mapping[str, Any]], None] = lambda document: None
    """Gets the document, also if a check did not end."""
    tells_status: bool = True
    """Whether the exit status says what was found; if not, only the document does."""

    def run(self, place: ProcessInfo) -> int:
        """Take part in all checks as one of the processes; returns the exit status."""
        report = Report()
        attendance = Attendance(
            place,
            start=self.start,
            on_lost=lambda lost: self._lost(lost, report),
            lost_status=self._status(Exit.PEER),
        )
        attendance.introduce(Member.of_this_process(place, select_device(self._kind)))
        if place.rank == 0:
            members = self._roll_call(attendance, report)
        else:
            members = attendance.await_word()
        if members is None:
            attendance.close()
            return self._status(report.exit if place.rank == 0 else Exit.PEER)
        attendance.watch()
        status = self._check_all(place, members, attendance, report)
        attendance.close()
        close_world()
        return self._status(status)

    @property
    def _kind(self) -> Literal["cuda", "cpu"]:
        """The kind of devices: no others exchange tensors."""
        on_gpus = self.device == "auto" and torch.cuda.is_available()
        return "cuda" if on_gpus or self.device == "cuda" else "cpu"

    def _status(self, status: int) -> int:
        return int(status) if self.tells_status else int(Exit.DONE)

    def _tell(self, report: Report, check: str, findings: Iterable[Finding], *rest: Any) -> None:
        found = list(findings)
        report.add(check, found, *rest)
        for finding in found:
            self.show(finding)

    def _roll_call(self, attendance: Attendance, report: Report) -> list[Member] | None:
        """Wait for all, and see who they are; None if checks cannot begin."""
        began = time.monotonic()
        self.progress(0, len(self.chosen) + 1, "waiting for all processes")
        report.members = attendance.members(seconds=self.start)
        there = [member for member in report.members if member is not None]
        if len(there) < len(report.members):
            findings = [_missing(report.members, self.start)]
        else:
            findings = list(judge_members(there))
        self._tell(report, "processes", findings, None, time.monotonic() - began)
        # NCCL refuses a GPU for two, and nothing can be exchanged with who is not there.
        stops = {"missing", "shared GPU"} & {finding.name for finding in findings}
        if stops:
            attendance.give_up()
            self.finish(report.as_json())
            return None
        attendance.go(there)
        return there

    def _check_all(
        self,
        place: ProcessInfo,
        members: Sequence[Member],
        attendance: Attendance,
        report: Report,
    ) -> int:
        nodes = len({member.host for member in members})
        chosen = [name for name in CHECKS if name in self.chosen]
        attendance.begin("connect", limit=self.limit or self.start)
        try:
            team = self._meet(place, members)
        except Exception as error:  # raised again, once the others know
            attendance.failed("connect", error)
        attendance.end("connect")
        for done, name in enumerate(chosen, 1):
            check, began = CHECKS[name], time.monotonic()
            team.say = partial(self.progress, done, len(chosen) + 1)
            team.say(name)
            attendance.begin(name, limit=self.limit or check.seconds + check.each * nodes)
            try:
                numbers = check.measure(team)
                team.control.barrier()
            except Exception as error:
                attendance.failed(name, error)
            attendance.end(name)
            if place.rank == 0:
                found = check.judge(numbers, members)
                self._tell(report, name, found, numbers, time.monotonic() - began)
        report.complete = True
        attendance.begin("end", limit=self.limit or self.start)
        status = int(team.control.broadcast(report.exit))
        attendance.end("end")
        if place.rank == 0:
            self.finish(report.as_json())
        return status

    def _meet(self, place: ProcessInfo, members: Sequence[Member]) -> Team:
        """Open the process groups of all."""
        limits = [check.seconds + check.each * len(members) for check in CHECKS.values()]
        limit = self.limit or max(limits)
        parallel = ParallelConfig(timeout=f"{limit:.0f}s", start_timeout=f"{self.start:.0f}s")
        world = open_world(
            RuntimeConfig(device=self._kind),
            mesh=Mesh(dp_replicate=place.world),
            parallel=parallel,
            place=place,
        )
        return Team(world, world.control_group("doctor"), members, self.folder)

    def _lost(self, lost: Lost, report: Report) -> int:
        """Tell what was found until a check did not end."""
        members = [member for member in report.members if member is not None]
        self._tell(report, lost.check, [lost.finding(members)], None, lost.limit)
        self.finish(report.as_json())
        return self._status(report.exit)


def _missing(members: Sequence[Member | None], seconds: float) -> Finding:
    absent = [rank for rank, member in enumerate(members) if member is None]
    hosts = list(dict.fromkeys(member.host for member in members if member is not None))
    what = f"rank {named(absent)} of {len(members)} did not come within {seconds:.0f} seconds; "
    what += f"the others are on {named(hosts)}"
    remedy = "see whether they were started, and reach MASTER_ADDR and MASTER_PORT from their nodes"
    return problem("missing", what, remedy, exit=Exit.PEER)
