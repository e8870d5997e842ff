"""Scripts of PBS that continue in other jobs, and sweeps, on stand-ins for its commands.

What the stand-ins answer is what OpenPBS 23.06 answered when the same was tried on it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.config.load import load_text
from gristmill.launch.jobs.batch import BatchJob, JobRecord, read_record, write_record
from gristmill.launch.jobs.pbs import Pbs
from gristmill.launch.jobs.submit import (
    PlannedJob,
    plan_command,
    plan_sweep,
    plan_training,
    submit,
    sweep_words,
)

RUN = """
name = "tiny"
preset = "gpt2-nano"
data.paths = "tokens/books"
train.until = "20 steps"
train.batch = 192
launch = { python = "./train", time = "1h" }
"""
QSUB = """#!/bin/bash
echo "qsub $*" >> calls
if [ -e refuse ]; then echo "qsub: Unknown queue" >&2; exit 170; fi
echo x >> submitted
number=$((100 + $(wc -l < submitted)))
case "$*" in *"-J "*) echo "$number[].server" ;; *) echo "$number.server" ;; esac
"""
QSTAT = """#!/bin/bash
echo "qstat $*" >> calls
id=${@: -1}
cat "shown/${id%@*}" 2>/dev/null || { echo "qstat: Unknown Job Id ${@: -1}" >&2; exit 153; }
"""
QALTER = '#!/bin/bash\necho "qalter $*" >> calls\n[ ! -e refuse ]\n'
QDEL = '#!/bin/bash\necho "qdel $*" >> calls\n'
TRAIN = """#!/bin/bash
echo "train ${@: -2}" >> calls
echo "$GRISTMILL_JOB_BEGAN" >> began
[ -e saves ] && mkdir -p "$(cat saves)/checkpoints/step-$(wc -l < calls)"
read -r status < status
sed -i 1d status
exit "$status"
"""
"""Saves a checkpoint, if it is told where, and ends with the next status of a list."""


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("bin", "shown"):
        (tmp_path / name).mkdir()
    texts = {"qsub": QSUB, "qstat": QSTAT, "qalter": QALTER, "qdel": QDEL, "../train": TRAIN}
    for name, text in texts.items():
        file = tmp_path / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")


def training(*words: str) -> PlannedJob:
    return plan_training(load_text(RUN, words, place="run.toml"), Pbs(), "pbs")


def sweep(*axes: str, at_once: int | None = None) -> PlannedJob:
    config = load_text(RUN, (), place="run.toml")
    runs = [
        (words, load_text(RUN, words, place="run.toml"))
        for words in sweep_words(axes, name=config.name)
    ]
    return plan_sweep(config, runs, Pbs(), "pbs", at_once=at_once)


def calls(word: str = "") -> list[str]:
    file = Path("calls")
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if line.startswith(word)]


def show(id: str, **attributes: object) -> None:
    """What PBS says of a job from now on; as it writes it, with tabs."""
    answer = {"pbs_server": "server", "Jobs": {f"{id}.server": attributes}}
    Path(f"shown/{id}.server").write_text(json.dumps(answer, indent="\t"))


def run_script(job: BatchJob, id: str, *statuses: int, saves: Path | None, **more: str) -> str:
    """Run the script of a job as PBS does; what its log says."""
    Path("status").write_text("".join(f"{status}\n" for status in statuses))
    if saves is not None:
        Path("saves").write_text(str(saves))
    variables = {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": f"{id}.server", **more}
    file = next(file for file in job.folder.iterdir() if file.suffix == ".pbs")
    done = subprocess.run(["bash", str(file)], env={**os.environ, **variables})
    logs = "".join(file.read_text() for file in job.logs.glob(f"job-{id.replace('[', '[[]')}*.log"))
    return f"{logs}exit {done.returncode}\n"


# ------------------------------------------------------------------ the time is over


def test_jobs_that_wait_for_a_job_wait_for_its_successor_too() -> None:
    """With status 75 PBS would delete them, even after they no longer name the job that ends."""
    planned = training()
    submit(planned, Pbs())
    show("101", depend="beforeok:102.server@server:103.server@server")
    show("102", depend="beforeok:104.server@server,afterok:101.server@server")
    show("103", depend="afterany:9.server@server,afterok:8.server@server:101.server@server")
    said = run_script(planned.job, "101", 75, saves=planned.job.run)
    assert said.endswith("continues as job 102.server\nexit 0\n"), said
    assert calls("qsub")[1:] == [f"qsub {planned.job.folder / 'train.pbs'}"]
    assert calls("qalter") == [
        "qalter -W depend=afterok:101.server@server:102.server 102.server@server",
        "qalter -W depend=afterany:9.server@server,"
        "afterok:8.server@server:101.server@server:102.server 103.server@server",
    ]
    assert (planned.job.folder / "ids").read_text().split() == ["101.server", "102.server"]


def test_jobs_that_cannot_be_told_are_not_let_go() -> None:
    planned = training()
    submit(planned, Pbs())
    show("101", depend="beforeok:102.server@server")
    show("102", depend="afterok:101.server@server")
    (Path("bin") / "qalter").write_text("#!/bin/bash\nexit 1\n")
    said = run_script(planned.job, "101", 75, saves=planned.job.run)
    assert "cannot be made to wait for job 102.server\nexit 75\n" in said, said


def test_a_server_that_does_not_answer_lets_no_job_go() -> None:
    planned = training()
    submit(planned, Pbs())
    assert run_script(planned.job, "101", 75, saves=planned.job.run).endswith("exit 75\n")


def test_a_job_without_a_new_checkpoint_has_no_successor() -> None:
    planned = training()
    submit(planned, Pbs())
    show("101")
    said = run_script(planned.job, "101", 75, saves=None)
    assert said == (
        "no checkpoint was written in the time of this job, so it is not queued again\nexit 75\n"
    )
    assert len(calls("qsub")) == 1


def test_a_restart_within_a_job_does_not_begin_its_time_anew() -> None:
    planned = training("launch.restarts=2")
    submit(planned, Pbs())
    run_script(planned.job, "101", 70, 70, 0, saves=planned.job.run)
    began = Path("began").read_text().split()
    assert len(began) == 3 and len(set(began)) == 1 and began[0].isdigit()


# ------------------------------------------------------------------ sweeps


def test_a_task_of_a_sweep_continues_as_a_job_of_its_own() -> None:
    planned = sweep("optim.lr=1e-3,1e-4,1e-2")
    file = planned.job.folder / "tiny-sweep.pbs"
    assert "#PBS -J" not in file.name and not any(
        line.startswith("#PBS -J") for line in planned.files[file.name].splitlines()
    )
    record = submit(planned, Pbs())
    assert record.id == "101[].server" and calls("qsub") == [f"qsub -J 1-3 {file}"]
    show("101[]", depend="beforeok:102.server@server")
    show("102", depend="afterok:101[].server@server")
    task = {"PBS_ARRAY_INDEX": "2", "PBS_ARRAY_ID": "101[].server"}
    run = Path.cwd() / "runs/tiny-lr-1e-4"
    said = run_script(planned.job, "101[2]", 75, saves=run, **task)
    # With another status the array, and with it all that waits for it, would have failed.
    assert said.endswith("continues as job 102.server\nexit 0\n"), said
    assert calls("train") == ["train optim.lr=1e-4 name=tiny-lr-1e-4"]
    assert calls("qsub")[1:] == [f"qsub -v GRISTMILL_TASK=2 {file}"]
    assert calls("qalter") == [
        "qalter -W depend=afterok:101[].server@server:102.server 102.server@server"
    ]
    # The successor knows which task it is.
    run_script(planned.job, "102", 0, saves=run, GRISTMILL_TASK="2")
    assert calls("train")[1:] == ["train optim.lr=1e-4 name=tiny-lr-1e-4"]


def test_successors_keep_to_the_number_of_runs_at_once() -> None:
    planned = sweep("optim.lr=1e-3,1e-4,1e-2", at_once=2)
    file = planned.job.folder / "tiny-sweep.pbs"
    submit(planned, Pbs())
    assert calls("qsub") == [f"qsub -J 1-3%2 {file}"]
    show("101[]")
    for number, run in enumerate(("tiny-lr-1e-3", "tiny-lr-1e-4", "tiny-lr-1e-2"), 1):
        task = {"PBS_ARRAY_INDEX": str(number), "PBS_ARRAY_ID": "101[].server"}
        run_script(planned.job, f"101[{number}]", 75, saves=Path.cwd() / "runs" / run, **task)
    submitted = [line.removesuffix(f" {file}") for line in calls("qsub")[1:]]
    assert submitted == [
        "qsub -W depend=afterany:101[].server -v GRISTMILL_TASK=1",
        "qsub -W depend=afterany:101[].server -v GRISTMILL_TASK=2",
        "qsub -W depend=afterany:101[].server:102.server -v GRISTMILL_TASK=3",
    ]


def test_a_sweep_of_one_run_is_no_array_since_pbs_has_none() -> None:
    planned = sweep("optim.lr=1e-3")
    record = submit(planned, Pbs())
    assert calls("qsub")[0].startswith("qsub -v GRISTMILL_TASK=1 ")
    assert [task.id for task in record.tasks] == [record.id] == ["101.server"]


def show_array(states: dict[int, str]) -> None:
    jobs = {f"101[{n}].server": {"job_state": state} for n, state in states.items()}
    whole = "B" if set(states.values()) & set("QR") else "F"
    answer = {"Jobs": {"101[].server": {"job_state": whole}, **jobs}}
    Path("shown/101[].server").write_text(json.dumps(answer))
    for id, job in jobs.items():
        Path(f"shown/{id}").write_text(json.dumps({"Jobs": {id: job}}))


def test_a_sweep_and_its_runs_are_found_and_cancelled(
    gristmill: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    def launch(*words: str, exit: int = 0) -> str:
        done = gristmill("launch", *words)
        assert done.returncode == exit, done.stdout + done.stderr
        return str(done.stdout)

    planned = sweep("optim.lr=1e-3,1e-4,1e-2")
    submit(planned, Pbs())
    show_array({1: "F", 2: "R", 3: "Q"})
    for run, state in (("tiny-lr-1e-3", "done"), ("tiny-lr-1e-4", "running")):
        Path(f"runs/{run}/status.json").write_text(json.dumps({"state": state, "step": 7}))
    assert launch("status", "runs/tiny-sweep", exit=Exit.STOPPED).splitlines() == [
        "job 101[].server (pbs): 1 finished, 1 running, 1 queued",
        "run runs/tiny-lr-1e-3: done at step 7",
        "run runs/tiny-lr-1e-4: running at step 7",
        "run runs/tiny-lr-1e-2: has not begun",
    ]
    told = json.loads(launch("status", "runs/tiny-sweep", "--json", exit=Exit.STOPPED))
    assert [one.get("state") for one in told["runs"].values()] == ["done", "running", None]
    said = launch("status", "runs/tiny-lr-1e-3")
    assert said.startswith("job 101[1].server (pbs): finished\n")
    # One of them, which continues in another job.
    Path("runs/tiny-sweep/job/ids-2").write_text("102.server\n")
    show("102", job_state="R")
    assert "as 102.server, running" in launch("status", "runs/tiny-lr-1e-4", exit=Exit.STOPPED)
    launch("cancel", "runs/tiny-lr-1e-4")
    assert calls("qdel") == ["qdel 102.server"]
    # All of them: the array as a whole, and what continues elsewhere.
    launch("cancel", "runs/tiny-sweep")
    assert calls("qdel")[1:] == ["qdel 101[].server", "qdel 102.server"]
    show_array(dict.fromkeys((1, 2, 3), "F"))
    show("102", job_state="F")
    assert "has ended" in launch("cancel", "runs/tiny-sweep")
    assert len(calls("qdel")) == 3


@pytest.mark.parametrize("again", [["optim.lr=1e-4,1"], ["optim.lr=1e-3,1e-4"]])
def test_a_run_is_in_one_sweep_at_a_time(again: Sequence[str]) -> None:
    submit(sweep("optim.lr=1e-3,1e-4"), Pbs())
    show_array({1: "F", 2: "R"})
    with pytest.raises(UserError, match=r"already: (running|1 finished, 1 running)") as refused:
        submit(sweep(*again), Pbs())
    assert refused.value.exit is Exit.REFUSED
    # A run of its own, too.
    with pytest.raises(UserError, match=r"this run is job 101\[2\].server already: running"):
        submit(training("name=tiny-lr-1e-4"), Pbs())


# ------------------------------------------------------------------ refusals


def test_a_refused_submission_leaves_nothing_behind() -> None:
    Path("refuse").touch()
    for planned in (training(), sweep("optim.lr=1e-3,1e-4")):
        with pytest.raises(UserError, match="qsub ended with 170: qsub: Unknown queue"):
            submit(planned, Pbs())
        assert not Path("runs").exists()


def test_a_refused_submission_leaves_an_older_one_as_it_was() -> None:
    planned = training()
    record = submit(planned, Pbs())
    show("101", job_state="F")
    before = {file: file.read_bytes() for file in planned.job.folder.iterdir()}
    Path("refuse").touch()
    with pytest.raises(UserError, match="Unknown queue"):
        submit(training("optim.lr=0.5"), Pbs())
    assert {file: file.read_bytes() for file in planned.job.folder.iterdir()} == before
    assert read_record(planned.job.folder) == record
    with pytest.raises(UserError, match="Unknown queue"):
        submit(plan_command(["report", "x"], planned, Pbs(), after=["101.server"]), Pbs())
    assert not (planned.job.folder / "report").exists()


def test_an_answer_that_is_no_id_leaves_the_files_of_a_job_that_may_be_queued() -> None:
    (Path("bin") / "qsub").write_text("#!/bin/bash\necho accepted\n")
    planned = training()
    with pytest.raises(UserError, match="gave no id"):
        submit(planned, Pbs())
    assert (planned.job.folder / "run.toml").is_file()


def test_a_refused_fresh_start_leaves_the_run_where_it_was(
    gristmill: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    Path("run.toml").write_text(RUN)
    Path("refuse").touch()
    kept = Path("runs/tiny/metrics.jsonl")
    kept.parent.mkdir(parents=True)
    kept.write_text('{"kind": "step", "step": 1}\n')
    done = gristmill("launch", "run.toml", "--on", "pbs", "--fresh")
    assert done.returncode == Exit.CONFIG and "Unknown queue" in done.stderr
    files = [file for file in Path("runs").rglob("*") if file.is_file()]
    assert [file for file in files if file.name != ".lock"] == [kept]
    # Nor is the folder of a job that runs now moved away.
    Path("refuse").unlink()
    submit(training(), Pbs())
    show("101", job_state="R")
    done = gristmill("launch", "run.toml", "--on", "pbs", "--fresh")
    assert done.returncode == Exit.REFUSED and "is job 101.server already" in done.stderr
    assert kept.is_file()


def test_a_chain_that_breaks_off_says_what_was_submitted(
    gristmill: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    Path("run.toml").write_text(RUN)
    (Path("bin") / "qsub").write_text(QSUB.replace("[ -e refuse ]", "[ -e submitted ]"))
    done = gristmill("launch", "run.toml", "--on", "pbs", "--then", "report runs/tiny")
    assert done.returncode == Exit.CONFIG and "Unknown queue" in done.stderr
    assert "submitted job 101.server (pbs)" in done.stdout


def test_the_record_of_another_scheduler_is_no_obstacle() -> None:
    """A run that was once a job of Slurm, on a cluster whose commands are not here."""
    for name in ("scontrol", "sacct"):
        (Path("bin") / name).write_text("#!/bin/bash\nexit 127\n")
    planned = training()
    planned.job.folder.mkdir(parents=True)
    write_record(planned.job.folder, JobRecord("slurm", "7", [], ""))
    assert submit(planned, Pbs()).earlier == ["7"]
