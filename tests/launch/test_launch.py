"""From a `[launch]` table to a job script, and what is said of a job afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.launch.test_rendering import HOSTILE

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.config.load import load_run, load_text
from gristmill.launch.jobs.batch import BatchState, JobRecord, read_record
from gristmill.launch.jobs.mpi import Mpi
from gristmill.launch.jobs.pbs import Pbs, newest_id
from gristmill.launch.jobs.slurm import Slurm, _from_scontrol, clock, ranges
from gristmill.launch.jobs.submit import launcher_of, plan_sweep, plan_training, submit, sweep_words

RUN = """
name = "tiny"
preset = "gpt2-nano"
data.paths = "tokens/books"
train.until = "20 steps"
train.batch = 192
"""
NAMES = ("slurm", "pbs", "mpi")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(on: str, *words: str) -> str:
    config = load_text(RUN, words, place="run.toml")
    name, launcher = launcher_of(on)
    return next(iter(plan_training(config, launcher, name).files.values()))


def directives(text: str, mark: str) -> list[str]:
    return [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]


# ------------------------------------------------------------------ scripts


def test_slurm_is_asked_for_what_the_table_says() -> None:
    words = (
        "launch.nodes=4",
        "launch.gpus_per_node=8",
        "launch.cpus_per_process=6",
        'launch.memory="64G"',
        'launch.time="1d2h30m"',
        'launch.stop_early="10m"',
        'launch.account="abc"',
        'launch.queue="gpu"',
        'launch.qos="high"',
        'launch.constraint="a100&nvlink"',
        'launch.mail="me@lab.org"',
        'launch.mail_on=["fail"]',
        "launch.exclusive=true",
        "launch.options={ switches = 1, wait-all-nodes = 1, spread-job = true }",
    )
    text = script("slurm", *words)
    assert directives(text, "#SBATCH --") == [
        "job-name=tiny",
        "nodes=4",
        "ntasks-per-node=8",
        f"chdir={Path.cwd()}",
        f"output={Path.cwd()}/runs/tiny/logs/job-%j.log",
        "open-mode=append",
        "cpus-per-task=6",
        "gpus-per-node=8",
        "mem=64G",
        "account=abc",
        "partition=gpu",
        "qos=high",
        "constraint=a100&nvlink",
        "mail-user=me@lab.org",
        "mail-type=FAIL",
        "exclusive",
        "time=26:30:00",
        "signal=B:USR1@600",
        "requeue",
        "switches=1",
        "wait-all-nodes=1",
        "spread-job",
    ]
    assert "srun --kill-on-bad-exit=0 --wait=900 --cpus-per-task=6 --" in text
    assert "export OMP_NUM_THREADS=6" in text


def test_polaris() -> None:
    words = (
        "launch.nodes=16",
        "launch.processes_per_node=4",
        'launch.resources={ system = "polaris" }',
        'launch.filesystems=["home", "grand"]',
        'launch.time="6h"',
        'launch.account="alloc"',
        'launch.queue="prod"',
        'launch.mail="me@lab.org"',
        'launch.modules=["cray-python", "cudatoolkit-standalone/11.7.1"]',
        'launch.setup=["source /path/to/venv/bin/activate"]',
        'launch.environment={ OMP_NUM_THREADS = "8" }',
    )
    text = script("pbs", *words)
    found = directives(text, "#PBS -")
    assert found[:3] == ["N tiny", "l select=16:system=polaris", "l place=scatter"]
    for line in ("l walltime=06:00:00", "l filesystems=home:grand", "A alloc", "q prod", "m abe"):
        assert line in found, found
    assert "module load cray-python cudatoolkit-standalone/11.7.1" in text
    assert "mpi=(mpiexec -n 64 --ppn 4 --cpu-bind none)" in text
    # The run looks at the clock itself.
    config = load_text(RUN, words, place="run.toml")
    settings = tomllib.loads(plan_training(config, Pbs(), "pbs").files["run.toml"])
    assert settings["train"]["time_limit"] == "5h55m00s"


@pytest.mark.parametrize("on", NAMES)
@pytest.mark.parametrize("starter", ["tasks", "torchrun"])
def test_every_script_is_valid_shell(on: str, starter: str) -> None:
    words = ["launch.processes_per_node=2", f'launch.starter="{starter}"', "launch.restarts=2"]
    words += ['launch.time="2h"', 'launch.container="image.sif"']
    words += ['launch.container_runtime="apptainer"', 'launch.mounts=["/data:/data"]']
    words += [] if on == "mpi" else ["launch.nodes=3"]
    text = script(on, *words)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert ("torch.distributed.run" in text) is (starter == "torchrun")
    assert "apptainer exec --bind" in text


@pytest.mark.parametrize("on", NAMES)
@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_runs_nothing(on: str, value: str, tmp_path: Path) -> None:
    folder = Path("folder $(touch pwned) ' \" x")
    config = load_text(
        RUN,
        [f"launch.environment={{ HOSTILE = {json.dumps(value)} }}", "launch.restarts=0"],
        place="run.toml",
    ).model_copy(update={"folder": str(folder)})
    config = config.model_copy(
        update={"launch": config.launch and config.launch.model_copy(update={"python": "./print"})}
    )
    stand_ins(tmp_path)
    name, launcher = launcher_of(on)
    planned = plan_training(config, launcher, name)
    file = tmp_path / "script"
    file.write_text(next(iter(planned.files.values())))
    done = subprocess.run(["bash", str(file)], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert f"<{value}>" in done.stdout
    assert f"<{(tmp_path / folder / 'job/run.toml')}>" in done.stdout
    assert not list(tmp_path.rglob("*pwned")), done.stdout


def environment(**more: str) -> dict[str, str]:
    here = Path.cwd() / "bin"
    path = f"{here}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(Path.cwd()), "SLURM_JOB_ID": "7", **more}


def stand_ins(folder: Path) -> None:
    """srun and mpiexec that run the command once, and a command that prints what it gets."""
    (folder / "bin").mkdir()
    last = 'while [ $# -gt 0 ] && [ "$1" != ./print ]; do shift; done; exec "$@"\n'
    for name in ("srun", "mpiexec"):
        file = folder / "bin" / name
        file.write_text(f"#!/bin/bash\n{last}")
        file.chmod(0o755)
    shown = folder / "print"
    shown.write_text('#!/bin/bash\nprintf "<%s>\\n" "$HOSTILE" "$@"\n')
    shown.chmod(0o755)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ('launch.account="a b"', "launch.account"),
        ('launch.account="a\\nrm -rf /"', "launch.account"),
        ('launch.queue="$(reboot)"', "launch.queue"),
        ('launch.mail="x; reboot@b"', "launch.mail"),
        ('launch.environment={ "A B" = "1" }', "launch.environment"),
        ('launch.environment={ A = "a\\nb" }', "launch.environment"),
        ('launch.options={ "wrap;reboot" = "x" }', "launch.options"),
        ('launch.setup=["a\\nb"]', "launch.setup"),
        ('launch.memory="lots"', "launch.memory"),
        ("launch.nodes=0", "launch.nodes"),
        ("launch.node=2", "did you mean nodes"),
    ],
)
def test_values_that_no_scheduler_takes_are_refused(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says.replace(".", r"\.")):
        load_text(RUN, [word], place="run.toml")


@pytest.mark.parametrize(
    ("on", "word", "says"),
    [
        ("slurm", 'launch.filesystems=["home"]', "launch.filesystems: has no effect with slurm"),
        ("pbs", 'launch.qos="x"', "launch.qos: has no effect with pbs"),
        ("pbs", "launch.options={ switches = 1 }", "'switches' is no option of qsub"),
        ("mpi", 'launch.account="x"', "launch.account: has no effect with mpi"),
        ("mpi", "launch.nodes=2", "launch.hostfile: launch.nodes is 2, and nothing says which"),
        ("pbs", 'launch.container_runtime="pyxis"', "pyxis belongs to Slurm"),
        ("slurm", 'launch.mounts=["/a:/b"]', "has no effect without launch.container"),
        ("slurm", 'launch.mounts=["/a"]', "does not say where to mount what"),
        ("slurm", 'launch={ time = "1m", stop_early = "2m" }', "leaves no time to train"),
        ("slurm", 'launch={ time = "3m", stop_early = "150s" }', "Slurm may send the signal 60 s"),
        ("slurm", "launch.nodes=5", "batch"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(on: str, word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        script(on, word)


def test_a_job_whose_processes_have_no_gpu_each_is_refused() -> None:
    few = ("launch.gpus_per_node=1", "launch.processes_per_node=2")
    with pytest.raises(
        UserError, match="2 processes on each node need a GPU each, and 1"
    ) as raised:
        script("slurm", *few)
    (problem,) = raised.value.problems
    assert problem.where == "launch.processes_per_node" and problem.remedy is not None
    for way in ("give 1", "launch.gpus_per_node", "parallel.share_gpu", "runtime.device"):
        assert way in problem.remedy
    elastic = 'parallel={ elastic = true, local = { every = "4 steps" } }'
    for word in ("parallel.share_gpu=true", elastic, 'runtime.device="cpu"'):
        assert "--gpus-per-node=1" in script("slurm", *few, word)
    # Polaris gives whole nodes, of which nobody says what they have.
    assert script("slurm", "launch.processes_per_node=2")


def test_every_launcher_is_known_by_name() -> None:
    with pytest.raises(UserError, match="nothing says where to submit"):
        launcher_of(None)
    with pytest.raises(UserError, match="there is no 'lsf'"):
        launcher_of("lsf")


# ------------------------------------------------------------------ sweeps


def test_a_sweep_has_a_run_for_every_combination() -> None:
    runs = sweep_words(["optim.lr=1e-3,6e-4", 'data.paths=["a","b"],["c"]'], name="tiny")
    assert [words[-1] for words in runs] == [
        "name=tiny-lr-1e-3-paths-a-b",
        "name=tiny-lr-1e-3-paths-c",
        "name=tiny-lr-6e-4-paths-a-b",
        "name=tiny-lr-6e-4-paths-c",
    ]
    assert runs[1][:2] == ["optim.lr=1e-3", 'data.paths=["c"]']
    for wrong in (["optim.lr"], ["optim.lr=1,,2"], ["a.b=1", "a.b=2"]):
        with pytest.raises(UserError):
            sweep_words(wrong, name="tiny")


def test_the_tasks_of_a_sweep_have_their_own_words() -> None:
    config = load_text(RUN, (), place="run.toml")
    words = sweep_words(["optim.lr=1e-3,$(touch pwned)"], name="tiny")
    runs = [(one, load_text(RUN, one[-1:], place="run.toml")) for one in words]
    planned = plan_sweep(config, runs, Slurm(), "slurm", at_once=1)
    text = planned.files["tiny-sweep.sbatch"]
    assert "#SBATCH --array=1-2%1" in text
    assert "task=(optim.lr=1e-3 name=tiny-lr-1e-3)" in text
    assert "task=('optim.lr=$(touch pwned)' name=tiny-lr-touch-pwned)" in text


def test_numbers_are_written_as_slurm_does() -> None:
    assert ranges([7, 1, 2, 3, 9, 10]) == "1-3,7,9-10"
    assert [clock(seconds) for seconds in (59, 3600, 93784)] == ["00:00:59", "01:00:00", "26:03:04"]


# ------------------------------------------------------------------ what becomes of a job


SHOWN = (
    "JobId=3 JobName=tiny JobState={} Reason={} Restarts={} ExitCode={} RunTime=00:01:02 "
    "NodeList=n[1-2]"
)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (("PENDING", "Priority", 0, "0:0"), BatchState("waiting", "PENDING (Priority)")),
        (
            ("RUNNING", "None", 2, "0:0"),
            BatchState("running", "RUNNING for 00:01:02 on n[1-2], started 3 times"),
        ),
        (("FAILED", "NonZeroExitCode", 0, "78:0"), BatchState("ended", "FAILED", 78)),
        (("CANCELLED", "None", 0, "0:15"), BatchState("ended", "CANCELLED", 143)),
        (("COMPLETED", "None", 0, "0:0"), BatchState("ended", "COMPLETED", 0)),
    ],
)
def test_what_slurm_says_of_a_job(facts: tuple[object, ...], expected: BatchState) -> None:
    assert _from_scontrol(SHOWN.format(*facts)) == expected


def test_what_slurm_says_of_an_array() -> None:
    lines = [SHOWN.format(state, "None", 0, "0:0") for state in ("COMPLETED", "RUNNING", "RUNNING")]
    assert _from_scontrol("\n".join(lines)) == BatchState("running", "1 COMPLETED, 2 RUNNING")


def test_the_successor_of_a_job_of_pbs_is_asked_about(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    record = JobRecord("pbs", "1.server", [], "", {"ids": str(ids)})
    assert newest_id(record) == "1.server"
    ids.write_text("1.server\n2.server\n")
    assert newest_id(record) == "2.server"


def test_a_run_is_not_submitted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path)
    wait = tmp_path / "bin/mpiexec"
    wait.write_text('#!/bin/bash\n[ "$1" = --version ] && exit 0\nexec sleep 60\n')
    # The job is a login shell, which may set the path anew.
    (tmp_path / ".bash_profile").write_text(f'PATH="{tmp_path}/bin:$PATH"\n')
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    launcher = Mpi()
    planned = plan_training(load_text(RUN, (), place="run.toml"), launcher, "mpi")
    record = submit(planned, launcher)
    try:
        assert read_record(planned.job.folder) == record
        assert launcher.state(record).phase == "running"
        with pytest.raises(UserError, match=f"this run is job {record.id} already") as refused:
            submit(planned, launcher)
        assert refused.value.exit is Exit.REFUSED
    finally:
        os.killpg(int(record.id), signal.SIGKILL)
    os.waitpid(int(record.id), 0)
    assert launcher.state(record).phase == "ended"


# ------------------------------------------------------------------ the command line


def test_the_command_line_without_a_scheduler(
    tmp_path: Path, gristmill: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    def launch(*words: str, exit: int = 0, env: Mapping[str, str] = os.environ) -> str:
        done = gristmill("launch", *words, env=env)
        assert done.returncode == exit, done.stdout + done.stderr
        return done.stdout + done.stderr

    Path("run.toml").write_text(RUN)
    shown = gristmill("launch", "run.toml", "--on", "slurm", "--dry-run")
    assert shown.stdout.startswith("#!/bin/bash -l") and "[model]" not in shown.stdout
    for name in ("train.sbatch", "run.toml"):
        assert f"# ---- {tmp_path}/runs/tiny/job/{name}\n" in shown.stderr
    assert "[model]" in shown.stderr and not Path("runs").exists()
    without = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    said = launch("run.toml", "--on", "slurm", exit=Exit.CONFIG, env=without)
    assert "sbatch is not installed here" in said and "--dry-run" in said
    said = launch("status", "run.toml", exit=Exit.USAGE)
    assert "this run was not submitted as a job" in said
    said = launch("run.toml", "--on", "slurm", "--then", "rm -rf /", exit=Exit.USAGE)
    assert "is no command that a job can run" in said


# ------------------------------------------------------------------ what processes find


def slurm_places() -> list[dict[str, str]]:
    """The variables of the tasks of srun that matter, as a real Slurm sets them."""
    common = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
    common |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    common |= {"MASTER_ADDR": "n1", "MASTER_PORT": "15007"}
    return [
        common
        | {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % 2),
            "SLURM_NODEID": str(rank // 2),
        }
        for rank in range(4)
    ]


def pals_places() -> list[dict[str, str]]:
    common = {"PMI_SIZE": "4", "PMI_LOCAL_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "15007"}
    return [common | {"PMI_RANK": str(rank), "PMI_LOCAL_RANK": str(rank % 2)} for rank in range(4)]


def open_mpi_places() -> list[dict[str, str]]:
    common = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    common |= {"MASTER_ADDR": "n1", "MASTER_PORT": "15007"}
    return [
        common | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2)}
        for rank in range(4)
    ]


@pytest.mark.parametrize("places", [slurm_places, pals_places, open_mpi_places])
def test_processes_find_their_ranks_and_the_address(
    places: Callable[[], list[dict[str, str]]],
) -> None:
    found = [ProcessInfo.current(values) for values in places()]
    assert [(one.rank, one.local_rank, one.world) for one in found] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 0, 4),
        (3, 1, 4),
    ]
    assert {(one.address, one.nodes) for one in found} == {(("n1", 15007), 2)}


def test_a_submitted_run_is_what_it_was_then(tmp_path: Path) -> None:
    Path("run.toml").write_text(RUN)
    config = load_run(Path("run.toml"), ["optim.lr=0.5", "launch.nodes=2", "train.seed=3"])
    planned = plan_training(config, Slurm(), "slurm")
    assert load_text(planned.files["run.toml"], place="x").optim.lr == 0.5
    assert planned.job.command[-2:] == ("train", f"{tmp_path}/runs/tiny/job/run.toml")
