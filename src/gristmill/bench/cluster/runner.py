"""Runs the checks of a cluster one after another, and collects the findings in a JSON document.

    processes     missing processes, and differences between them
    network       interfaces, MTU, InfiniBand, environment variables
    clocks        clock offsets between nodes
    folder        whether it is shared, whether it can be locked, how fast it is
    devices       slow devices, and devices with errors
    collectives   bandwidth by size, with checked results
    pairs         every pair of nodes

    {"format": 1, "kind": "gristmill doctor --cluster", "gristmill": "…", "when": "…",
     "complete": true, "good": false, "exit": 1, "members": […],
     "checks": {"network": {"seconds": 0.2, "numbers": …, "findings": [
         {"name": "…", "what": "…", "good": true, "remedy": null}]}}}

Every check measures on all processes, and rank 0 judges the measurements alone. The document holds
them under "numbers", in seconds, bytes and bytes per second.
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
from gristmill.bench.cluster.clocks import judge_clocks, measure_clocks
from gristmill.bench.cluster.collectives import judge_collectives, measure_collectives
from gristmill.bench.cluster.devices import judge_devices, measure_devices
from gristmill.bench.cluster.members import CheckContext, Member, join_names, judge_members
from gristmill.bench.cluster.network import judge_network, measure_network
from gristmill.bench.cluster.pairs import judge_pairs, measure_pairs
from gristmill.bench.cluster.shared_folder import judge_folder, measure_folder
from gristmill.bench.cluster.watchdog import CheckWatchdog, LostCheck
from gristmill.bench.finding import PROBLEM, Finding, problem
from gristmill.config.parallel import Mesh, ParallelConfig
from gristmill.config.schema import RuntimeConfig
from gristmill.distributed.device import select_device
from gristmill.distributed.world import close_world, open_world
from gristmill.train.environment import version

FORMAT = 1
KIND = "gristmill doctor --cluster"
_EXIT_PRIORITY = (Exit.DEVICE, Exit.PEER, Exit.STORAGE)
"""Exit statuses that take precedence over others, the most severe first."""


@dataclass(frozen=True)
class Check:
    """A check: a measurement on all processes, and a function that judges the result."""

    measure: Callable[[CheckContext], Any]
    judge: Callable[[Any, Sequence[Member]], Iterable[Finding]]
    seconds: float = 60.0
    """Time limit for a few nodes."""
    seconds_per_node: float = 0.0
    """Added to the time limit for each node."""


CHECKS = {
    "network": Check(measure_network, judge_network),
    "clocks": Check(
        measure_clocks, lambda offsets, members: judge_clocks(offsets), seconds_per_node=0.5
    ),
    "folder": Check(measure_folder, judge_folder, 120.0),
    "devices": Check(measure_devices, judge_devices, 120.0),
    "collectives": Check(measure_collectives, judge_collectives, 300.0, 1.0),
    "pairs": Check(measure_pairs, judge_pairs, 120.0, 2.0),
}


@dataclass
class Report:
    """The findings so far; on rank 0."""

    members: Sequence[Member | None] = ()
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    complete: bool = False

    def add(
        self, check: str, findings: Sequence[Finding], measurements: Any, seconds: float
    ) -> None:
        self.findings += findings
        self.checks[check] = {
            "seconds": round(seconds, 3),
            "findings": [_as_json(finding) for finding in findings],
            "numbers": measurements,
        }

    @property
    def exit(self) -> int:
        """The exit status of the most severe finding."""
        statuses = {finding.exit for finding in self.findings if not finding.good}
        worst = next((status for status in _EXIT_PRIORITY if status in statuses), PROBLEM)
        return int(worst) if statuses else int(Exit.DONE)

    def as_json(self) -> dict[str, Any]:
        members = [None if member is None else member.as_json() for member in self.members]
        return {
            "format": FORMAT,
            "kind": KIND,
            "gristmill": version("gristmill"),
            "when": timestamp(),
            "complete": self.complete,
            "good": self.exit == Exit.DONE,
            "exit": self.exit,
            "members": members,
            "checks": self.checks,
        }


def _as_json(finding: Finding) -> dict[str, Any]:
    return {name: value for name, value in asdict(finding).items() if name != "exit"}


@dataclass(frozen=True)
class CheckRunner:
    """Which checks to run, with which limits, and where the findings go on rank 0."""

    folder: Path
    device: Literal["auto", "cuda", "cpu"] = "auto"
    start_timeout: float = 120.0
    """Seconds in which all processes must join."""
    timeout: float | None = None
    """Time limit of every check in seconds; None leaves each check its own."""
    checks: Collection[str] = tuple(CHECKS)
    on_finding: Callable[[Finding], None] = lambda finding: None
    on_progress: Callable[[int, int, str], None] = lambda done, total, message: None
    on_document: Callable[[Mapping[str, Any]], None] = lambda document: None
    """Receives the document, also if a check did not finish."""
    exit_by_findings: bool = True
    """Whether the exit status reflects the findings; if not, only the document does."""

    def run(self, place: ProcessInfo) -> int:
        """Take part in all checks as one of the processes; returns the exit status."""
        report = Report()
        watchdog = CheckWatchdog(
            place,
            start_timeout=self.start_timeout,
            on_lost=lambda lost: self._record_lost(lost, report),
            peer_exit=self._status(Exit.PEER),
        )
        watchdog.register(Member.of_this_process(place, select_device(self._device_kind)))
        if place.rank == 0:
            members = self._gather_members(watchdog, report)
        else:
            members = watchdog.wait_for_start()
        if members is None:
            watchdog.close()
            return self._status(report.exit if place.rank == 0 else Exit.PEER)
        watchdog.start()
        status = self._run_checks(place, members, watchdog, report)
        watchdog.close()
        close_world()
        return self._status(status)

    @property
    def _device_kind(self) -> Literal["cuda", "cpu"]:
        """The kind of device; collectives on other kinds are not supported."""
        on_gpus = self.device == "auto" and torch.cuda.is_available()
        return "cuda" if on_gpus or self.device == "cuda" else "cpu"

    def _status(self, status: int) -> int:
        return int(status) if self.exit_by_findings else int(Exit.DONE)

    def _record(
        self,
        report: Report,
        check: str,
        findings: Iterable[Finding],
        measurements: Any,
        seconds: float,
    ) -> None:
        findings = list(findings)
        report.add(check, findings, measurements, seconds)
        for finding in findings:
            self.on_finding(finding)

    def _gather_members(self, watchdog: CheckWatchdog, report: Report) -> list[Member] | None:
        """Wait for all processes and compare them; None if the checks cannot start."""
        began = time.monotonic()
        self.on_progress(0, len(self.checks) + 1, "waiting for all processes")
        report.members = watchdog.wait_for_members(seconds=self.start_timeout)
        members = [member for member in report.members if member is not None]
        if len(members) < len(report.members):
            findings = [_missing(report.members, self.start_timeout)]
        else:
            findings = list(judge_members(members))
        self._record(report, "processes", findings, None, time.monotonic() - began)
        # A group cannot be formed without all processes, and NCCL refuses two on one GPU.
        if {"missing", "shared GPU"} & {finding.name for finding in findings}:
            watchdog.abort()
            self.on_document(report.as_json())
            return None
        watchdog.announce_start(members)
        return members

    def _run_checks(
        self,
        place: ProcessInfo,
        members: Sequence[Member],
        watchdog: CheckWatchdog,
        report: Report,
    ) -> int:
        nodes = len({member.host for member in members})
        names = [name for name in CHECKS if name in self.checks]
        watchdog.begin("connect", limit=self.timeout or self.start_timeout)
        try:
            context = self._connect(place, members)
        except Exception as error:  # raised again, once the other processes know
            watchdog.fail("connect", error)
        watchdog.end("connect")
        for done, name in enumerate(names, 1):
            check, began = CHECKS[name], time.monotonic()
            context.report_progress = partial(self.on_progress, done, len(names) + 1)
            context.report_progress(name)
            limit = self.timeout or check.seconds + check.seconds_per_node * nodes
            watchdog.begin(name, limit=limit)
            try:
                measurements = check.measure(context)
                context.control.barrier()
            except Exception as error:
                watchdog.fail(name, error)
            watchdog.end(name)
            if place.rank == 0:
                findings = check.judge(measurements, members)
                self._record(report, name, findings, measurements, time.monotonic() - began)
        report.complete = True
        watchdog.begin("end", limit=self.timeout or self.start_timeout)
        status = int(context.control.broadcast(report.exit))
        watchdog.end("end")
        if place.rank == 0:
            self.on_document(report.as_json())
        return status

    def _connect(self, place: ProcessInfo, members: Sequence[Member]) -> CheckContext:
        """Open the process groups."""
        limits = [
            check.seconds + check.seconds_per_node * len(members) for check in CHECKS.values()
        ]
        limit = self.timeout or max(limits)
        start = self.start_timeout
        parallel = ParallelConfig(timeout=f"{limit:.0f}s", start_timeout=f"{start:.0f}s")
        world = open_world(
            RuntimeConfig(device=self._device_kind),
            mesh=Mesh(dp_replicate=place.world),
            parallel=parallel,
            place=place,
        )
        return CheckContext(world, world.control_group("doctor"), members, self.folder)

    def _record_lost(self, lost: LostCheck, report: Report) -> int:
        """Record a check that did not finish, and pass on the document with earlier findings."""
        members = [member for member in report.members if member is not None]
        self._record(report, lost.check, [lost.finding(members)], None, lost.limit)
        self.on_document(report.as_json())
        return self._status(report.exit)


def _missing(members: Sequence[Member | None], seconds: float) -> Finding:
    absent = [rank for rank, member in enumerate(members) if member is None]
    hosts = list(dict.fromkeys(member.host for member in members if member is not None))
    what = f"rank {join_names(absent)} of {len(members)} did not join within {seconds:.0f} seconds"
    what += f"; the others are on {join_names(hosts)}"
    remedy = "check that they were started and can reach MASTER_ADDR:MASTER_PORT from their nodes"
    return problem("missing", what, remedy, exit=Exit.PEER)
