"""The stand-in for PBS as tests use it: its commands in PATH, and a folder with its jobs.

The nodes are addresses of this machine, 127.0.0.1 to 127.0.0.4, which resolve everywhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
PROFILE = ("PATH", "HOME", "USER", "LANG", "PYTHONPATH", "HF_HUB_OFFLINE")
"""What stands for the start files of the user's shell; PBS passes nothing else on by itself."""


@dataclass(frozen=True)
class PbsJob:
    """What qstat shows of a job, and its output once it is over."""

    id: str
    state: str
    exit_status: int | None
    attributes: dict[str, Any]
    output: str
    errors: str


class PbsCluster:
    """The commands of PBS, with jobs that run on this machine."""

    def __init__(self, folder: Path, *, kill_delay: float = 120) -> None:
        self.folder = folder
        self.home = folder / "home"
        programs = folder / "bin"
        for one in (folder / "jobs", self.home, programs):
            one.mkdir(parents=True)
        server = Path(__file__).with_name("pbs_server.py")
        for name in ("qsub", "qstat", "qdel", "mpiexec"):
            file = programs / name
            file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{server}" {name} "$@"\n')
            file.chmod(0o755)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "PBS_STANDIN": str(folder)}
        own = {"PATH": path, "HOME": str(self.home)}
        profile = {name: os.environ[name] for name in PROFILE if name in os.environ}
        (folder / "profile.json").write_text(json.dumps(profile | own))
        (folder / "nodes").write_text("".join(f"{node}\n" for node in NODES))
        (folder / "kill_delay").write_text(str(kill_delay))

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the cluster does."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=300, cwd=cwd
        )

    def submit(self, script: Path, *options: str) -> str:
        """Submit a script from its folder; the id of the job."""
        done = self.run("qsub", *options, str(script), cwd=script.parent)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, id: str) -> PbsJob:
        done = self.run("qstat", "-x", "-f", "-F", "json", id)
        assert done.returncode == 0, done.stderr
        attributes = json.loads(done.stdout)["Jobs"][id]
        texts = []
        for name in ("Output_Path", "Error_Path"):
            path = Path(attributes[name].partition(":")[2])
            texts.append(path.read_text() if path.is_file() else "")
        status = attributes.get("Exit_status")
        return PbsJob(id, attributes["job_state"], status, attributes, *texts)

    def wait(self, id: str, state: str = "F", *, timeout: float = 300) -> PbsJob:
        """Wait until a job has this state."""
        deadline = time.monotonic() + timeout
        while (job := self.job(id)).state != state:
            assert job.state != "F" and time.monotonic() < deadline, job
            time.sleep(0.1)
        return job

    def stop(self) -> None:
        """Kill the jobs that are left."""
        (self.folder / "kill_delay").write_text("0")
        for one in (self.folder / "jobs").iterdir():
            (one / "deleted").touch()
        deadline = time.monotonic() + 60
        for one in (self.folder / "jobs").iterdir():
            while json.loads((one / "job.json").read_text())["job_state"] != "F":
                assert time.monotonic() < deadline, f"{one} does not end"
                time.sleep(0.05)
