"""Batch scripts of PBS, on a stand-in for its server and for Cray's mpiexec."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import ClusterRun
    from pbs_cluster import PbsCluster, PbsJob

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def write(folder: Path, script: str) -> Path:
    file = folder / "job.sh"
    file.write_text(script)
    return file


@pytest.mark.slow
def test_ranks_of_two_nodes_train_as_one_process(
    pbs_job: Callable[..., PbsJob], cluster_run: Callable[..., ClusterRun]
) -> None:
    run = cluster_run(steps=6)
    job = pbs_job(
        "#!/bin/bash\n#PBS -N tiny\n#PBS -l walltime=00:30:00,filesystems=home\n#PBS -A project\n"
        "NODES=$(wc -l < $PBS_NODEFILE)\n"
        "mpiexec -n $NODES --ppn 1 --depth 8 --cpu-bind depth --env OMP_NUM_THREADS=1 "
        f"{shlex.join(run.command)}\n"
    )
    assert job.exit_status == 0, job.errors
    assert "done at step 6" in job.output
    assert "2 processes" in (run.folder / "train.log").read_text()
    run.assert_as_alone()


def test_a_script_sees_what_pbs_gives_it(pbs: PbsCluster, pbs_job: Callable[..., PbsJob]) -> None:
    pbs.environment["OF_THE_SUBMITTER"] = "1"
    job = pbs_job(
        "#PBS -N look\n#PBS -j oe\npwd; env; cat $PBS_NODEFILE >&2; exit 3\n", nodes=2, ppn=2
    )
    assert job.exit_status == 3 and job.errors == ""
    lines = job.output.splitlines()
    assert lines[0] == str(pbs.home)
    assert lines[-4:] == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2
    values = dict(line.partition("=")[::2] for line in lines)
    work = str(pbs.folder.parent)
    assert values["PBS_JOBID"] == job.id and values["PBS_JOBNAME"] == "look"
    assert values["PBS_ENVIRONMENT"] == "PBS_BATCH" and values["PBS_O_WORKDIR"] == work
    assert "OF_THE_SUBMITTER" not in values, "only -V or -v passes it on"
    assert job.attributes["Output_Path"] == f"pbs:{work}/look.o{job.id.partition('.')[0]}"


@pytest.mark.parametrize(
    ("line", "message", "status"),
    [
        ("--nodes 2", "qsub: directive error: --nodes 2", 1),
        ("-Z", "qsub: directive error: -Z", 1),
        ("-N tiny # a comment", "qsub: directive error: -N tiny # a comment", 1),
        ("-l gpus=4", "qsub: Unknown resource: gpus", 188),
        ("-l select=2:gpus=4", "qsub: Unknown resource: gpus", 188),
        ("-l walltime=1h", "qsub: illegal -l value", 2),
        ("-j yes", "qsub: illegal -j value", 2),
    ],
)
def test_directives_that_pbs_does_not_know_are_refused(
    pbs: PbsCluster, tmp_path: Path, line: str, message: str, status: int
) -> None:
    done = pbs.run("qsub", str(write(tmp_path, f"#!/bin/bash\n#PBS {line}\ntrue\n")))
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(message)


def test_a_job_waits_for_nodes_and_can_be_deleted(pbs: PbsCluster, tmp_path: Path) -> None:
    script = write(tmp_path, "trap 'echo asked; exit 75' TERM\nsleep 600 & wait\n")
    first, second, third = (pbs.submit(script, "-l", "select=3") for _ in range(3))
    pbs.wait(first, "R")
    assert pbs.job(second).state == "Q" and pbs.job(third).state == "Q"
    assert pbs.run("qdel", third, first).returncode == 0
    done = pbs.wait(first)
    assert (done.exit_status, done.output) == (75, "asked\n")
    assert pbs.wait(third).exit_status is None
    assert pbs.wait(second, "R").attributes["exec_host"].count("+") == 2
    over = pbs.run("qstat", "-f", "-F", "json", first)
    assert over.returncode == 35 and "Job has finished" in over.stderr
    assert "Jobs" not in json.loads(over.stdout)
    assert pbs.run("qdel", first).stderr == f"qdel: Job has finished {first}\n"
    unknown = pbs.run("qstat", "-f", "-F", "json", "9.pbs")
    assert (unknown.returncode, unknown.stderr) == (153, "qstat: Unknown Job Id 9.pbs\n")


@pytest.mark.parametrize(("launch", "saved"), [("mpiexec", False), ("exec mpiexec", True)])
def test_a_script_that_ends_takes_its_ranks_along(
    pbs: PbsCluster, tmp_path: Path, launch: str, saved: bool
) -> None:
    """The shell of a script without a trap ends with TERM at once, and PBS kills the rest."""
    rank = tmp_path / "rank.sh"
    rank.write_text("trap 'sleep 1; touch saved; exit 75' TERM\ntouch ready\nsleep 600 & wait\n")
    job = pbs.submit(write(tmp_path, f"cd $PBS_O_WORKDIR\n{launch} -n 1 bash {rank}\n"))
    while not (tmp_path / "ready").exists():
        assert pbs.job(job).state in "QR"
    assert pbs.run("qdel", job).returncode == 0
    assert pbs.wait(job).exit_status == (75 if saved else 256 + 15)
    assert (tmp_path / "saved").exists() is saved


def test_mpiexec_ends_all_ranks_when_one_fails(pbs_job: Callable[..., PbsJob]) -> None:
    program = '[ "$PALS_RANKID/$PMI_SIZE/$PMI_LOCAL_RANK" = 3/4/1 ] && exit 76; sleep 600'
    job = pbs_job(f"mpiexec -n 4 --ppn 2 bash -c {shlex.quote(program)}\n")
    assert job.exit_status == 76
    assert job.errors == "127.0.0.2: rank 3 exited with code 76\n"


def test_a_job_past_its_walltime_is_ended(pbs_job: Callable[..., PbsJob]) -> None:
    job = pbs_job("#PBS -l walltime=1\nexec sleep 600\n")
    assert job.exit_status == -29


@pytest.mark.parametrize("words", ["--nosuch 1 true", "-n 5 --ppn 2 true", "--cpu-bind all true"])
def test_options_that_mpiexec_does_not_know_are_refused(
    pbs_job: Callable[..., PbsJob], words: str
) -> None:
    job = pbs_job(f"mpiexec {words}\n")
    assert job.exit_status == 2 and job.errors.startswith("mpiexec: ")
