"""Ray: a job of a Ray cluster whose entrypoint is our driver.

    gristmill launch RUN.toml --on ray      submits a Ray Job to the dashboard of the cluster
    launch/ray_driver.py                    runs there: reserves nodes, starts and supervises

The driver reads everything from RUN/job/run.toml: all nodes see the same file system.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, Problem, UserError, optional
from gristmill.base.exits import INTERRUPTED
from gristmill.base.units import parse_seconds, timestamp
from gristmill.config.launch import LaunchConfig
from gristmill.launch.jobs.batch import BatchJob, BatchState, JobRecord, Launcher, Phase, render

DEFAULT = "http://127.0.0.1:8265"
"""The dashboard of a cluster whose head is this machine."""
_PHASES: dict[str, Phase] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "STOPPED": "ended",
    "SUCCEEDED": "ended",
    "FAILED": "ended",
}
_SCRIPT = "train.sh"
_POLL = 1.0
_NOISE = re.compile(r"Running entrypoint for job |Runtime env is |\d{4}-\d\d-\d\d .*\.py:\d+ -- ")
"""How lines begin that Ray adds to the output of a job."""


class Ray(Launcher):
    """Jobs of Ray."""

    unused = (
        *("requeue", "memory", "account", "queue", "qos", "constraint", "reservation", "exclusive"),
        *("filesystems", "options", "mail", "mail_on", "modules", "container"),
        *("container_runtime", "mounts", "starter", "mpi", "hostfile", "kubernetes"),
    )
    lacks = ("--after", "--then", "--sweep")

    def problems(self, launch: LaunchConfig) -> Iterator[Problem]:
        for name, amount in launch.resources.items():
            if not isinstance(amount, int):
                what = f"{name} is {amount!r}, and Ray counts resources"
                yield Problem(what, "launch.resources", "give a number")

    def files(self, job: BatchJob) -> dict[str, str]:
        launch = job.launch
        driver = [job.command[0], "-m", "gristmill.launch.ray_driver", str(job.folder / "run.toml")]
        values = {
            **launch.environment,
            "PYTHONUNBUFFERED": "1",
            # Otherwise Ray kills a job three seconds after it has asked it to stop.
            "RAY_JOB_STOP_WAIT_TIME_S": str(round(parse_seconds(launch.stop_early))),
        }
        described = {
            "entrypoint": shlex.join(["exec", "bash", str(job.folder / _SCRIPT)]),
            "runtime_env": {"env_vars": values},
            "metadata": {"name": job.name, "run": str(job.folder.parent)},
        }
        script = render("ray.sh.jinja", job=job, driver=driver)
        return {"ray.json": json.dumps(described, indent=2) + "\n", _SCRIPT: script}

    def submit(self, job: BatchJob, file: Path) -> JobRecord:
        address = job.launch.address or os.environ.get("RAY_ADDRESS") or DEFAULT
        described = json.loads(file.read_text())
        with _client(address) as client:
            id = client.submit_job(**described)
        return JobRecord("ray", str(id), [], timestamp(), {"address": address})

    def state(self, record: JobRecord) -> BatchState:
        with _client(record.facts["address"]) as client:
            try:
                info = client.get_job_info(record.id)
            except RuntimeError as error:
                if "does not exist" not in str(error):
                    raise
                # Ray forgets its jobs when the cluster is started anew.
                return BatchState("unknown", "Ray no longer knows it, so it has ended")
        status = str(getattr(info.status, "value", info.status))
        phase = _PHASES.get(status, "unknown")
        return BatchState(phase, status, info.driver_exit_code if phase == "ended" else None)

    def cancel(self, record: JobRecord) -> None:
        with _client(record.facts["address"]) as client:
            client.stop_job(record.id)

    def output(self, record: JobRecord) -> Sequence[str]:
        # Ray's own command prints all of it, and its own messages besides.
        own = [sys.executable, "-m", "gristmill.launch.jobs.ray"]
        return [*own, record.facts["address"], record.id]


@contextlib.contextmanager
def _client(address: str) -> Iterator[Any]:
    """A client of the cluster's dashboard; what Ray prints meanwhile is nothing for the user."""
    purpose = "launching on Ray"
    submission = optional("ray.job_submission", extra="ray", purpose=purpose)
    wrong = UserError(
        f"no Ray cluster answers at {address}",
        where="launch.address",
        remedy="give the address of its dashboard, such as http://head:8265, here or in "
        "RAY_ADDRESS; `ray status` on a node says whether it runs",
        exit=Exit.PEER,
    )
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            with _only_address(address):
                client = submission.JobSubmissionClient(address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise wrong from error
        try:
            yield client
        except ConnectionError as error:
            raise wrong from error
        except RuntimeError as error:
            raise UserError(
                f"Ray refused: {' '.join(str(error).split())[:300]}",
                where=f"launch.address {address}",
                remedy="see the dashboard of the cluster",
                exit=Exit.PEER,
            ) from error


@contextlib.contextmanager
def _only_address(address: str) -> Iterator[None]:
    """To Ray's client, variables of the environment count more than what it is given."""
    name = "RAY_API_SERVER_ADDRESS"
    before = os.environ.get(name)
    os.environ[name] = address
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def print_output(record: JobRecord, *, tail: int, follow: bool) -> None:
    """Print the last lines of a job's output, and if asked for, what comes until it has ended."""
    shown: int | None = None
    while True:
        ended = not follow or Ray().state(record).phase in ("ended", "unknown")
        with _client(record.facts["address"]) as client:
            text = client.get_job_logs(record.id)
        # The last line may be on its way.
        text = text if ended else text[: text.rfind("\n") + 1]
        lines = [line for line in text.splitlines() if not _NOISE.match(line)]
        begin = max(0, len(lines) - tail) if shown is None else shown
        for line in lines[begin:]:
            print(line, flush=True)
        shown = len(lines)
        if ended:
            return
        time.sleep(_POLL)


def main(words: Sequence[str] | None = None) -> int:
    """`python -m gristmill.launch.jobs.ray ADDRESS ID`: what `gristmill launch logs` runs."""
    parser = argparse.ArgumentParser(prog="python -m gristmill.launch.jobs.ray")
    parser.add_argument("address")
    parser.add_argument("id")
    parser.add_argument("--tail", type=int, required=True)
    parser.add_argument("--follow", action="store_true")
    given = parser.parse_args(words)
    try:
        record = JobRecord("ray", given.id, [], "", {"address": given.address})
        print_output(record, tail=given.tail, follow=given.follow)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit
    except KeyboardInterrupt:
        return INTERRUPTED
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
