"""The observer: a background thread that samples hosts, finds stragglers and receives requests.

The first process of each host samples the host, and sends the sample with its heartbeat. The
leading process reads the heartbeats of all processes every few seconds:

    heartbeats of all ranks ──> processes.json        the state of each process, for the live page
                            ├─> StragglerDetector     processes that slow the others down
                            └─> SystemRecord          how busy each host is
    requests/               ──> RequestBox            requests made on the live page

Nothing here may delay or end training: a file system that hangs stops this thread only.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.base.errors import UserError
from gristmill.base.files import write_atomic
from gristmill.base.process import ProcessInfo
from gristmill.base.units import parse_seconds
from gristmill.config.schema import RunConfig
from gristmill.data.loader import LoaderEffort
from gristmill.distributed.liveness.heartbeat import Heartbeat
from gristmill.distributed.liveness.stragglers import (
    PARTS,
    STRETCH,
    Pace,
    ProcessPace,
    Straggler,
    StragglerDetector,
)
from gristmill.track.folder import RunFolder
from gristmill.track.records import StragglerRecord
from gristmill.track.requests import RequestBox, read_requests
from gristmill.track.system import SystemSample, SystemSampler
from gristmill.train.tracker import Tracker

EVERY = 1.0
"""Seconds between two reads of heartbeats and samples."""
FILES_EVERY = 3.0
"""Seconds between two accesses to files, which are often on a shared file system."""
STARVATION_EVERY = 60.0
"""Seconds between two checks of how long training waited for data."""
STARVED_FROM = 0.2
"""The share of the time spent waiting for data that causes a warning."""


class RunObserver:
    """Observes a run while it trains. `monitor` has the heartbeats of all processes, if there are
    several. Only the process that `leads` writes anything."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        place: ProcessInfo,
        *,
        gpus: int | None,
        stage: int,
        leads: bool,
    ) -> None:
        self.folder, self.place, self.leads = folder, place, leads
        self.pace, self.requests = Pace(stage=stage), RequestBox()
        self.sampler: SystemSampler | None = None
        if config.track.system and place.local_rank == 0:
            interval = parse_seconds(config.track.system)
            self.sampler = SystemSampler(interval, folder.path, gpus=gpus, host=place.host)
        self.effort = LoaderEffort()
        """Of the loader of this process."""
        self._detector = StragglerDetector()
        self._starvation = _Starvation()
        self._hot = set[str]()
        """Hosts whose GPUs are throttled by heat."""
        self._monitor: Any = None
        self._tracker: Tracker | None = None
        self._recorded: dict[str, Mapping[str, Any]] = {}
        """The sample of each host that was recorded last."""
        self._joules: dict[str, float] = {}
        self._files_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def facts(self) -> dict[str, Any]:
        """Facts about this process for its heartbeats."""
        sample = None if self.sampler is None else self.sampler.latest()
        return {
            "stage": self.pace.stage,
            "pace": self.pace.notes,
            "loader": self.effort.as_dict(),
            "system": None if sample is None else sample.as_dict(),
        }

    def joules(self) -> float | None:
        """Energy of all hosts since this process began to sample; None if no host measures it."""
        return sum(self._joules.values()) if self._joules else None

    def start(self, monitor: Any, tracker: Tracker) -> None:
        """Start, or continue after a rollback, with records going to `tracker`."""
        self._tracker = tracker
        if self.sampler is not None:
            self.sampler.start()
        if self._thread is None and self.leads:
            self._monitor = monitor
            self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Record the last sample, and stop observing."""
        self.stop()
        self._try_to_look()

    def stop(self) -> None:
        """End the threads, without waiting for one that hangs in a file system or driver."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(EVERY)
        if self.sampler is not None:
            self.sampler.stop()

    def _run(self) -> None:
        while not self._stopping.wait(EVERY):
            self._try_to_look()

    def _try_to_look(self) -> None:
        # A full or missing disk is reported by code that depends on it.
        if self.leads:
            with contextlib.suppress(OSError, UserError):
                self._look()

    def _look(self) -> None:
        heartbeats: Sequence[Heartbeat] = () if self._monitor is None else self._monitor.everyone
        tracker = self._tracker
        if tracker is None or self.folder.is_taken_away:
            return
        own = None if self.sampler is None else self.sampler.latest()
        samples = [] if own is None else [own.as_dict()]
        samples += [
            one.facts["system"]
            for one in heartbeats
            if one.rank != self.place.rank and one.facts.get("system")
        ]
        self._record_systems(samples, tracker)
        starved = self._starvation.look(self.pace, self.effort)
        if starved is not None:
            tracker.say(starved, level="warning")
        if heartbeats:
            facts = {one.rank: one.facts for one in heartbeats}
            for change in self._detector.compare(_paces(heartbeats)):
                self._tell(change, facts, samples, tracker)
        if time.monotonic() - self._files_at >= FILES_EVERY:
            self._files_at = time.monotonic()
            self._look_at_files(heartbeats, tracker)

    def _look_at_files(self, heartbeats: Sequence[Heartbeat], tracker: Tracker) -> None:
        """Write the states of all processes, and read requests to the run."""
        if heartbeats:
            self._write_processes(heartbeats)
        read_requests(
            self.folder.requests,
            self.requests,
            refuse=lambda why: tracker.say(why, level="warning"),
        )

    def _record_systems(self, samples: Sequence[Mapping[str, Any]], tracker: Tracker) -> None:
        """Record every sample once."""
        for values in samples:
            sample = SystemSample.from_dict(values)
            if sample is None or self._recorded.get(sample.host) == values:
                continue
            self._recorded[sample.host] = values
            if sample.joules is not None:
                self._joules[sample.host] = sample.joules
            tracker.write(sample.record(tracker.clock()))
            self._note_heat(sample, tracker)

    def _note_heat(self, sample: SystemSample, tracker: Tracker) -> None:
        hot = "thermal" in (sample.gpu_throttled or "")
        if hot and sample.host not in self._hot:
            facts = [
                f"{sample.gpu_celsius:.0f} °C" if sample.gpu_celsius is not None else "",
                f"{sample.gpu_mhz:.0f} MHz" if sample.gpu_mhz is not None else "",
            ]
            told = ", ".join(fact for fact in facts if fact)
            tracker.say(
                f"a GPU of {sample.host} is throttled by heat" + (f": {told}" if told else ""),
                level="warning",
            )
        (self._hot.add if hot else self._hot.discard)(sample.host)

    def _tell(
        self,
        slow: Straggler,
        facts: Mapping[int, Mapping[str, Any]],
        samples: Sequence[Mapping[str, Any]],
        tracker: Tracker,
    ) -> None:
        system = next((one for one in samples if one.get("host") == slow.host), {})
        loader = facts[slow.rank].get("loader") or {}
        now = tracker.clock()
        tracker.write(
            StragglerRecord(
                step=max(now.steps, slow.step),
                samples=now.samples,
                tokens=now.tokens,
                time=time.time(),
                rank=slow.rank,
                host=slow.host,
                phase=slow.part,
                ratio=round(slow.ratio, 3),
                seconds=slow.seconds,
                cause=None if slow.over else cause_of(slow.part, loader=loader, system=system),
                over=slow.over,
            )
        )

    def _write_processes(self, heartbeats: Sequence[Heartbeat]) -> None:
        processes = [_process(one) for one in sorted(heartbeats, key=lambda one: one.rank)]
        content = {"written": time.time(), "processes": processes}
        write_atomic(self.folder.processes, json.dumps(content) + "\n")


def _paces(heartbeats: Sequence[Heartbeat]) -> list[ProcessPace]:
    return [
        ProcessPace(
            one.rank,
            one.host,
            one.facts.get("stage", 0),
            [tuple(note) for note in one.facts.get("pace", ())],
            # The process that hosts the store has no network link to it.
            one.facts.get("link") if one.rank else None,
        )
        for one in heartbeats
        if one.state == "running"
    ]


def _process(heartbeat: Heartbeat) -> dict[str, Any]:
    """The facts about a process that the live page shows."""
    notes = heartbeat.facts.get("pace") or []
    known: dict[str, Any] = {"step_seconds": None, "parts": None}
    if len(notes) > 1:
        steps = notes[-1][0] - notes[0][0]
        whole, *parts = (
            (last - first) / max(steps, STRETCH)
            for first, last in zip(notes[0][1:], notes[-1][1:], strict=True)
        )
        busy = dict(zip(PARTS, parts, strict=True))
        known = {"step_seconds": whole, "parts": {**busy, "wait": max(0.0, whole - sum(parts))}}
    return {
        "rank": heartbeat.rank,
        "host": heartbeat.host,
        "phase": heartbeat.phase,
        "step": heartbeat.step,
        "state": heartbeat.state,
        "seconds": heartbeat.seconds,
        "silence": round(heartbeat.silence, 1),
        **known,
    }


def cause_of(part: str, *, loader: Mapping[str, float], system: Mapping[str, Any]) -> str | None:
    """The probable cause of a process being slow in a part of a step, if measurements show one."""
    throttled = system.get("gpu_throttled") or ""
    if part == "link":
        return "its network link is slow"
    if part == "data":
        return _loader_trouble(loader)
    if "thermal" in throttled:
        return "a GPU of its host is throttled by heat"
    return f"a GPU of its host is throttled ({throttled})" if throttled else None


def _loader_trouble(effort: Mapping[str, float]) -> str | None:
    """The activity that a loader spends most of its time on."""
    if not any(effort.values()):
        return None
    return {
        "computing": "its loader computes for too long",
        "queued": "its loader lacks a core",
        "blocked": "its storage is slow",
    }[max(effort, key=lambda name: effort[name])]


class _Starvation:
    """Checks whether training waits for data, and warns when that begins."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._before = (0.0, 0.0)
        self._effort: Mapping[str, float] = {}
        self._told = False

    def look(self, pace: Pace, effort: LoaderEffort) -> str | None:
        """The warning, if there is one; to be called now and then."""
        now = time.monotonic()
        if now - self._since < STARVATION_EVERY:
            return None
        self._since = now
        (seconds, waited), before, self._before = pace.waiting, self._before, pace.waiting
        known, last, self._effort = effort.as_dict(), self._effort, effort.as_dict()
        passed = seconds - before[0]
        share = (waited - before[1]) / passed if passed > 0 else 0.0
        starved = share >= STARVED_FROM
        told, self._told = self._told, starved
        if not starved or told:
            return None
        spent = {name: value - last.get(name, 0.0) for name, value in known.items()}
        why = _loader_trouble(spent)
        return f"{share:.0%} of the time training waits for data" + (f": {why}" if why else "")
