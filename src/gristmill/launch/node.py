"""What a pod of a job in Kubernetes runs: the processes of one node, with a supervisor.

    python -m gristmill.launch.node --nodes 2 --processes 4 --folder RUN -- COMMAND...

Kubernetes decides by the exit status whether a pod is started again, so the supervisor tells apart
what is the same for a user at a terminal. A process that was killed here is a crash of this pod
(128 and the signal); one that lost a process of another pod is not to blame (`Exit.PEER`).

Pods that lost another one are started again without a limit, since nodes are lost again and again
in a long run. Only if that happens several times without a new checkpoint does the job end. The
count is in RUN/job, because a new pod remembers nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import storage_errors
from gristmill.base.process import Address
from gristmill.launch.processes import PERMANENT, Job, supervise
from gristmill.launch.starting import LocalStarter
from gristmill.track.folder import RunFolder

FRUITLESS = 5
"""How often in a row a process of another pod may be lost without a new checkpoint."""
RESTART = 128
"""PyTorchJobs start a pod again if its exit status is this or more."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the processes of this pod to their end; returns the exit status of the pod."""
    parser = argparse.ArgumentParser(prog="python -m gristmill.launch.node", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True, help="on each node")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--restart-on", type=int, nargs="*", default=[], metavar="STATUS")
    parser.add_argument("--restart-on-crash", action="store_true")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(words)
    folder = RunFolder(given.folder)
    try:
        starter = pod_starter(os.environ, nodes=given.nodes, each=given.processes)
        before = folder.newest_step()
        job = Job(
            given.command,
            starter.processes,
            folder,
            elastic=given.elastic,
            starter=starter,
            killed_as_signal=True,
        )
        status = supervise(job)
        if job.has_first:
            status = limit_fruitless(folder, status, before=before)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        status = error.exit
    permanent = {Exit.DONE, *PERMANENT, Exit.STOPPED, Exit.PEER}
    again = status in given.restart_on or (given.restart_on_crash and status not in permanent)
    return status + RESTART if again and status < RESTART else status


def pod_starter(environment: Mapping[str, str], *, nodes: int, each: int) -> LocalStarter:
    """The processes of this pod, by what Kubernetes tells it."""
    # An Indexed Job numbers its pods; a PyTorchJob takes a pod for a process.
    name = "JOB_COMPLETION_INDEX" if "JOB_COMPLETION_INDEX" in environment else "RANK"
    values = {
        variable: environment.get(variable, "") for variable in (name, "MASTER_ADDR", "MASTER_PORT")
    }
    if nodes == 1:
        return LocalStarter(each)
    wrong = [
        variable
        for variable, text in values.items()
        if variable != "MASTER_ADDR" and not text.isdigit()
    ]
    if wrong or not values["MASTER_ADDR"]:
        raise UserError(
            f"{', '.join(wrong) or 'MASTER_ADDR'} is not set, so this is no pod of an Indexed Job "
            "or a PyTorchJob",
            where="environment",
            remedy="submit the job with `gristmill launch --on kubernetes`",
        )
    address = Address(values["MASTER_ADDR"], int(values["MASTER_PORT"]))
    return LocalStarter(nodes * each, nodes=nodes, node=int(values[name]), address=address)


def limit_fruitless(folder: RunFolder, status: int, *, before: int | None) -> int:
    """The exit status, which is `Exit.REFUSED` once too many losses in a row have brought no new
    checkpoint."""
    file = folder.job / "fruitless"
    with storage_errors(file):
        newest, before = (-1 if step is None else step for step in (folder.newest_step(), before))
        if status != Exit.PEER or newest > before:
            file.unlink(missing_ok=True)
            return status
        count = (len(file.read_bytes()) if file.exists() else 0) + 1
        if count < FRUITLESS:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("x" * count)
            return status
        file.unlink()
    print(
        f"error: other processes were lost {FRUITLESS} times in a row without a new checkpoint, so "
        "another start would not help",
        file=sys.stderr,
    )
    return Exit.REFUSED


if __name__ == "__main__":
    from gristmill.base.exits import exit_on_stop_signals

    exit_on_stop_signals()
    sys.exit(main())
