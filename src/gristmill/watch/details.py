"""What one run has to show beside its curves, and how the settings of several differ.

Everything is read from the run folder when it is asked for. Files may be missing, damaged, or of
another version: what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.config.track import without_address
from gristmill.report.page import newest_results, planned_of
from gristmill.report.plots import RunDigest
from gristmill.watch.regular import is_regular, read_regular
from gristmill.watch.run import LIMITS, WatchedRun

_STEP = re.compile(r"step-(\d{8,})")
_MOST_TEXT = 1 << 20
"""Bytes of the settings that are shown."""
_MOST_LOG = 1 << 20
"""Bytes at the end of the log that are looked at."""
_MOST_SAMPLES = 1 << 22


def run_details(run: WatchedRun) -> dict[str, Any]:
    """All about a run but its curves."""
    folder, time, environment = run.folder, run.run_time(), run.json(run.folder.environment)
    with run.lock:
        digest = run.digest
        shown = {
            "row": run.row,
            "summary": {**digest.summary(), "planned": planned_of(environment)},
            "events": digest.events(),
            "samples": digest.newest_samples(),
            "sample_steps": [place.step for place in digest.sample_places.all()],
            "stragglers": digest.stragglers(),
            "damaged": run.damaged,
        }
    processes = run.json(folder.path / "processes.json")
    shown |= {
        "environment": environment,
        "settings": _settings_text(folder.settings),
        "evaluations": _evaluations(folder.evals),
        "checkpoints": list_checkpoints(folder.checkpoints),
        "processes": processes if isinstance(processes.get("processes"), list) else None,
        "time": None
        if time is None
        else {
            "wall": time.wall,
            "parts": dict(time.parts),
            "goodput": time.goodput,
            "kwh": time.kwh,
            "attempts": time.attempts,
        },
    }
    return dict(finite_only(shown))


def finite_only(value: Any) -> Any:
    """The same as JSON can say it: numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite_only(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_only(item) for item in value]
    if isinstance(value, str):
        # JSON can spell half of a surrogate pair, but no bytes can.
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    return value


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    try:
        files = list(folder.glob("*.json"))
    except OSError:
        return []
    return newest_results(folder, warn=lambda text: None) if all(map(is_regular, files)) else []


def _settings_text(path: Path) -> str:
    try:
        return without_address(read_regular(path, most=_MOST_TEXT).decode(errors="replace"))
    except OSError:
        return ""


def list_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The committed checkpoints of a run, the newest last."""
    best: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(read_regular(folder / "best.json"))
        best = value.get("step") if isinstance(value, dict) else None
    found = []
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    for entry in entries:
        match = _STEP.fullmatch(entry.name)
        if match is None or not entry.is_dir():
            continue
        step = int(match[1])
        with contextlib.suppress(OSError):
            found.append(
                {
                    "step": step,
                    "bytes": _size_of(Path(entry.path)),
                    "time": entry.stat().st_mtime,
                    "best": step == best,
                }
            )
    return sorted(found, key=lambda one: one["step"])


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# ------------------------------------------------------------------ texts


def log_tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log."""
    try:
        data = read_regular(path, most=_MOST_LOG, end=True)
    except OSError:
        return []
    if len(data) == _MOST_LOG:  # it may begin in the middle of a line
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", errors="replace").splitlines()[-lines:]


def samples_of(run: WatchedRun, step: int) -> list[dict[str, str]]:
    """The texts that a run wrote at a step, or at the last one before it whose place is known."""
    with run.lock:
        places = [one for one in run.digest.sample_places.all() if one.step <= step]
        offset = run.follower.offset
        newest = {sample["step"]: sample["texts"] for sample in run.digest.newest_samples()}
    if step in newest:
        return list(newest[step])
    if not places:
        return []
    begin = places[-1].offset
    data = run.follower.part(begin, min(offset, begin + _MOST_SAMPLES)) or b""
    digest = RunDigest(limits=LIMITS)
    with contextlib.suppress(ValueError):
        # Samples of a step follow each other; what comes after them is not needed.
        digest.add_lines(_until_other_step(data, places[-1].step))
    return next((one["texts"] for one in digest.newest_samples()), [])


def _until_other_step(data: bytes, step: int) -> bytes:
    kept = list[bytes]()
    for line in data.split(b"\n")[:-1]:
        value: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
        if kept and not (isinstance(value, dict) and value.get("step") == step):
            break
        kept.append(line + b"\n")
    return b"".join(kept) or b"\n"


# ------------------------------------------------------------------ settings


def compared_settings(runs: Sequence[WatchedRun], *, every: bool) -> list[dict[str, Any]]:
    """The settings that differ between runs, or all of them, each with its value in every run; null
    where a run does not have it."""
    tables = [_flat(run.settings()) for run in runs]
    names = sorted({name for table in tables for name in table})
    rows = [{"setting": name, "values": [table.get(name) for table in tables]} for name in names]
    return [row for row in rows if every or len(set(row["values"])) > 1]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            flat[f"{prefix}{key}"] = value
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False, default=str)
    return flat
