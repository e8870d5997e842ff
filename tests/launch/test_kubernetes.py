"""Manifests for Kubernetes, and jobs on a stand-in for kubectl."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Address, ProcessInfo
from gristmill.cli.main import app
from gristmill.config.load import load_text
from gristmill.launch.jobs.batch import BatchJob, JobRecord, read_record
from gristmill.launch.jobs.kubernetes import Kubernetes, object_name
from gristmill.launch.jobs.submit import plan_training, submit
from gristmill.launch.node import FRUITLESS, limit_fruitless, main, pod_starter
from gristmill.launch.processes import Job, supervise
from gristmill.launch.starting import LocalStarter, process_environment
from gristmill.track.folder import RunFolder

RUN = """
name = "Tiny_Run"
folder = "{folder}"
model = {{ layers = 2, heads = 2, width = 16, context = 16 }}
data = {{ paths = "tokens", split = "90,10" }}
train = {{ until = "20 steps", batch = 48, accumulate = 1 }}
[launch]
nodes = 2
processes_per_node = 2
container = "registry.example/gristmill:1"
[launch.kubernetes]
volumes = {{ my-claim = "{volume}" }}
"""


@pytest.fixture
def run_text(tmp_path: Path) -> str:
    return RUN.format(folder=tmp_path / "run", volume=tmp_path)


@pytest.fixture
def manifest(run_text: str) -> Callable[..., dict[str, Any]]:
    """The objects of a job, by kind."""

    def make(*words: str) -> dict[str, Any]:
        config = load_text(run_text, words, place="run.toml")
        planned = plan_training(config, Kubernetes(), "kubernetes")
        text = next(iter(planned.files.values()))
        return {one["kind"]: one for one in yaml.safe_load_all(text)}

    return make


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """What Kubernetes makes of a word of a command or the value of a variable."""
    return re.sub(
        r"\$(\$|\((\w+)\))",
        lambda found: "$" if found[1] == "$" else environment.get(found[2], found[0]),
        text,
    )


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    values: dict[str, str] = {}
    for one in container["env"]:
        values[one["name"]] = expanded(one["value"], values)
    return values


def container_of(objects: dict[str, Any]) -> dict[str, Any]:
    if "Job" in objects:
        template = objects["Job"]["spec"]["template"]
    else:
        template = objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    container: dict[str, Any] = template["spec"]["containers"][0]
    return container


# ------------------------------------------------------------------ manifests


def test_a_job_asks_for_what_the_settings_say(
    manifest: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    objects = manifest(
        "launch.gpus_per_node=8",
        "launch.processes_per_node=8",
        "launch.cpus_per_process=4",
        "launch.memory=64G",
        "launch.time=6h",
        "launch.stop_early=90s",
        "launch.restarts=3",
        "launch.queue=research",
        'launch.resources={"rdma/hca" = 1}',
        "launch.kubernetes.namespace=ml",
        "launch.kubernetes.service_account=trainer",
        'launch.kubernetes.node_selector={"cloud/gpu" = "h100"}',
        'launch.kubernetes.pull_secrets=["registry"]',
        "launch.kubernetes.shared_memory=16G",
    )
    name = object_name("Tiny_Run")
    assert {one["metadata"]["name"] for one in objects.values()} == {name}
    assert {one["metadata"]["namespace"] for one in objects.values()} == {"ml"}
    service = objects["Service"]["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert service["selector"] == {"batch.kubernetes.io/job-name": name}
    job = objects["Job"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    spec = job["spec"]
    assert spec["suspend"] is True and spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2 and spec["backoffLimit"] == 3
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["subdomain"] == name
    assert pod["terminationGracePeriodSeconds"] == 90
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"] == {"cloud/gpu": "h100"}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    # Kueue would take a pod with its label for a job of its own.
    assert "kueue.x-k8s.io/queue-name" not in spec["template"]["metadata"]["labels"]
    container = pod["containers"][0]
    assert container["image"] == "registry.example/gristmill:1"
    limits = {"cpu": 32, "memory": "64Gi", "nvidia.com/gpu": 8, "rdma/hca": 1}
    assert container["resources"] == {"limits": limits, "requests": limits}
    assert environment_of(container)["OMP_NUM_THREADS"] == "4"
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["volume-1"] == str(tmp_path)
    assert volumes["volume-1"]["persistentVolumeClaim"]["claimName"] == "my-claim"
    assert mounts["shared-memory"] == "/dev/shm"
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert volumes["settings"]["configMap"]["name"] == name


def test_the_settings_travel_with_the_job(manifest: Callable[..., dict[str, Any]]) -> None:
    objects = manifest("launch.time=6h", "train.seed=7")
    container = container_of(objects)
    [path] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "settings"]
    assert container["command"][-2:] == ["train", f"{path}/run.toml"]
    sent = load_text(objects["ConfigMap"]["data"]["run.toml"], place="run.toml")
    assert sent.train.seed == 7 and sent.train.time_limit == "5h55m00s"


@pytest.mark.parametrize(
    ("words", "ignored", "fails", "disruption"),
    [
        ((), {75, 76}, {2, 65, 71, 74, 77, 78}, "Ignore"),
        (("launch.requeue=false",), set(), {2, 65, 71, 74, 75, 76, 77, 78}, "FailJob"),
        (
            ("launch.requeue=false", "launch.restarts=1"),
            {76},
            {2, 65, 71, 74, 75, 77, 78},
            "FailJob",
        ),
    ],
)
def test_exit_statuses_decide_what_becomes_of_a_pod(
    manifest: Callable[..., dict[str, Any]],
    words: tuple[str, ...],
    ignored: set[int],
    fails: set[int],
    disruption: str,
) -> None:
    first, *rest = manifest(*words)["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert first["action"] == disruption
    assert first["onPodConditions"][0]["type"] == "DisruptionTarget"
    found: dict[str, set[int]] = {"Ignore": set(), "FailJob": set()}
    for rule in rest:
        assert rule["onExitCodes"]["containerName"] == "gristmill"
        found[rule["action"]] |= set(rule["onExitCodes"]["values"])
    assert found == {"Ignore": ignored, "FailJob": fails}


def test_a_pytorchjob_has_one_master_and_workers(manifest: Callable[..., dict[str, Any]]) -> None:
    kind = "launch.kubernetes.kind=pytorchjob"
    objects = manifest(kind, "launch.nodes=3", "launch.queue=q")
    assert objects.keys() == {"ConfigMap", "PyTorchJob"}
    spec = objects["PyTorchJob"]["spec"]
    assert spec["runPolicy"] == {"suspend": True, "cleanPodPolicy": "Running"}
    replicas = spec["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 2}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert {one["restartPolicy"] for one in replicas.values()} == {"ExitCode"}
    assert container_of(objects)["name"] == "pytorch"
    alone = manifest(kind, "launch.nodes=1")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert list(alone) == ["Master"]


HOSTILE = [
    "$(HOME) $$(HOME) $HOME ${HOME} `id`",
    "quotes \" ' \\ and {{ job.name }} {% raw %}",
    "!!python/object/apply:os.system [id]",
    "- a: b # c",
    "*anchor &anchor | > @",
    "emoji \U0001f600 and é",
    "true",
    "0123",
]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
def test_values_stay_values(
    manifest: Callable[..., dict[str, Any]], value: str, kind: str, tmp_path: Path
) -> None:
    quoted = json.dumps(value, ensure_ascii=False)
    objects = manifest(
        f"launch.kubernetes.kind={kind}",
        f"launch.environment={{ VALUE = {quoted}, HOME = '/root' }}",
        f"launch.python={quoted}",
        f"launch.container={quoted}",
        f"launch.kubernetes.node_selector={{ {quoted} = {quoted} }}",
        f"launch.setup=[{quoted}]",
    )
    container = container_of(objects)
    environment = environment_of(container)
    assert environment["VALUE"] == value
    command = [expanded(word, environment) for word in container["command"]]
    assert command[:2] == ["/bin/bash", "-c"]
    assert command[2].splitlines()[1:] == [value, 'exec "$@"']
    assert command[4] == value and container["image"] == value
    template = objects.get("Job") or objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Master"]
    template = template.get("spec", template)["template"]
    assert template["spec"]["nodeSelector"] == {value: value}


def test_setup_runs_first_and_makes_room_for_the_command(
    manifest: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    container = container_of(manifest('launch.setup=["export A=1", "B=$(echo 2)"]'))
    words = [expanded(word, {}) for word in container["command"]]
    script = words[: words.index("bash") + 1]
    inner = [sys.executable, "-S", "-c", "import os; print(os.environ['A'], os.getpid())"]
    process = subprocess.Popen([*script, *inner], stdout=subprocess.PIPE, text=True)
    # The same process id: bash is gone, and signals reach the command.
    assert process.communicate()[0].split() == ["1", str(process.pid)]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
def test_every_process_of_every_pod_finds_its_place(
    manifest: Callable[..., dict[str, Any]], kind: str, nodes: int, each: int
) -> None:
    container = container_of(
        manifest(
            f"launch.kubernetes.kind={kind}",
            f"launch.nodes={nodes}",
            f"launch.processes_per_node={each}",
        )
    )
    assert f"--nodes={nodes}" in container["command"]
    assert f"--processes={each}" in container["command"]
    places, addresses = [], set()
    for pod in range(nodes):
        environment = environment_of(container)
        if kind == "job":
            environment["JOB_COMPLETION_INDEX"] = str(pod)
        else:
            # As Kubeflow's operator counts: pods, not processes.
            environment |= {"RANK": str(pod), "WORLD_SIZE": str(nodes), "PET_NNODES": str(nodes)}
            environment |= {"MASTER_ADDR": "x-master-0", "MASTER_PORT": "23456"}
        starter = pod_starter(environment, nodes=nodes, each=each)
        starter.prepare(lambda: False)
        assert starter.address is not None
        host, port = starter.address
        for rank in starter.ranks:
            own = process_environment(
                rank,
                processes=nodes * each,
                port=port,
                host=host,
                nodes=nodes,
                around=environment,
            )
            place = ProcessInfo.current(own)
            places.append((place.rank, place.local_rank, place.world, place.local_world))
            assert place.nodes == nodes
            addresses.add(place.address)
    assert places == [(rank, rank % each, nodes * each, each) for rank in range(nodes * each)]
    name = object_name("Tiny_Run")
    expected = Address(f"{name}-0.{name}", 29500) if kind == "job" else ("x-master-0", 23456)
    assert nodes == 1 or addresses == {expected}


def test_a_pod_outside_of_a_job_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--nodes=2", "--processes=1", f"--folder={tmp_path}", "--", "true"]
    assert main(words) == Exit.CONFIG
    assert "no pod of an Indexed Job or a PyTorchJob" in capsys.readouterr().err


def test_names_that_kubernetes_forbids_are_changed() -> None:
    names = ["plain-1", "A_b", "a.b", "a-b", "A-b", "1", "x" * 80, "x" * 81, "-", "a-"]
    made = [object_name(name) for name in names]
    assert made[0] == "plain-1" and made[3] == "a-b"
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name) for name in made)
    assert len(set(made)) == len(made)
    assert made == [object_name(name) for name in names]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch.container=unset"], "launch.container: pods need an image"),
        (["launch.kubernetes.volumes={}"], "no volume is left to hold the run"),
        (["launch.kubernetes.volumes={ a = 'data' }"], "no absolute path"),
        (["launch.kubernetes.volumes={ a = '/a', b = '/a/' }"], "the same path"),
        (["launch.kubernetes.volumes={ a = '/elsewhere' }"], "is on no volume"),
        (["launch.modules=['cuda']"], "launch.modules: has no effect with kubernetes"),
        (["launch.queue=Not_A_Queue"], "is no name of a local queue"),
    ],
)
def test_wrong_settings_are_named(
    manifest: Callable[..., dict[str, Any]], words: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        manifest(*words)


def test_the_working_folder_is_that_of_the_run_if_a_volume_holds_it(
    manifest: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert container_of(manifest())["workingDir"] == str(tmp_path)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert container_of(manifest())["workingDir"] == str(tmp_path / "work")


# ------------------------------------------------------------------ jobs


class Cluster:
    """What the stand-in for kubectl keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def objects(self) -> set[str]:
        return {file.name for file in self.folder.glob("*.json")}

    def change(self, kind: str, **parts: Any) -> None:
        [file] = self.folder.glob(f"*.{kind}.*.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | parts))

    def read(self, kind: str) -> dict[str, Any]:
        [file] = self.folder.glob(f"*.{kind}.*.json")
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def ended(
        self, kind: str, *, failed: str | None = None, statuses: tuple[int, ...] = ()
    ) -> None:
        what = "Complete" if kind == "job" else "Succeeded"
        condition = {"type": "Failed" if failed else what, "status": "True", "message": failed}
        self.change(kind, status={"conditions": [condition]})
        states = [{"state": {"terminated": {"exitCode": one}}} for one in statuses]
        pods = [{"status": {"containerStatuses": [one]}} for one in states]
        (self.folder / "pods").write_text(json.dumps(pods))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    programs, objects = tmp_path / "bin", tmp_path / "objects"
    programs.mkdir()
    objects.mkdir()
    script = Path(__file__).with_name("stand_in_kubectl.py").read_text()
    (programs / "kubectl").write_text(f"#!{sys.executable}\n{script}")
    (programs / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OBJECTS", str(objects))
    return Cluster(objects)


@pytest.fixture
def run_file(run_text: str, tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(run_text)
    return file


def launch(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["launch", *map(str, words)])
    if isinstance(result.exception, UserError):
        return result.exception.exit, str(result.exception)
    return result.exit_code, result.output


def submitted(text: str, *words: str) -> tuple[JobRecord, BatchJob]:
    planned = plan_training(load_text(text, words, place="run.toml"), Kubernetes(), "kubernetes")
    return submit(planned, Kubernetes()), planned.job


def test_a_job_from_submission_to_the_end(cluster: Cluster, run_file: Path, tmp_path: Path) -> None:
    name = object_name("Tiny_Run")
    code, text = launch(run_file, "--on", "kubernetes", "launch.kubernetes.namespace=ml")
    assert code == 0 and f"submitted job {name} (kubernetes)" in text
    kinds = {"configmap", "service", "job"}
    assert cluster.objects() == {f"ml.{kind}.{name}.json" for kind in kinds}
    job = cluster.read("job")
    for kind in ("configmap", "service"):
        [owner] = cluster.read(kind)["metadata"]["ownerReferences"]
        assert owner["uid"] == job["metadata"]["uid"]
        assert (owner["apiVersion"], owner["kind"], owner["name"]) == ("batch/v1", "Job", name)
    assert launch("status", tmp_path / "run")[0] == Exit.STOPPED
    assert "0 of 2 pods are running" in launch("status", tmp_path / "run")[1]
    cluster.change("job", status={"ready": 2, "failed": 1})
    assert "2 of 2 pods are running, 1 have ended before" in launch("status", tmp_path / "run")[1]
    code, text = launch(run_file, "--on", "kubernetes", "launch.kubernetes.namespace=ml")
    assert code == Exit.REFUSED and "already" in text
    cluster.ended("job")
    code, text = launch("status", tmp_path / "run")
    assert code == 0 and "complete, exit status 0" in text


def test_the_output_is_that_of_the_first_pod(
    cluster: Cluster, run_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = object_name("Tiny_Run")
    launch(run_file, "--on", "kubernetes")
    assert launch("logs", tmp_path / "run", "-n", "7", "-f")[0] == 0
    job, index = "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index"
    assert capfd.readouterr().out == f"logs {job}={name},{index}=0 gristmill 7 True\n"


def test_a_cancelled_job_is_there_until_its_pods_have_saved(
    cluster: Cluster, run_file: Path, tmp_path: Path
) -> None:
    launch(run_file, "--on", "kubernetes")
    cluster.change("job", status={"ready": 2})
    code, text = launch("cancel", tmp_path / "run")
    assert code == 0 and "asked kubernetes to end" in text
    assert "its pods save and stop" in launch("status", tmp_path / "run")[1]
    assert launch(run_file, "--on", "kubernetes")[0] == Exit.REFUSED
    for file in cluster.folder.glob("*.json"):
        file.unlink()
    assert "no longer knows it" in launch("status", tmp_path / "run")[1]
    assert launch(run_file, "--on", "kubernetes")[0] == 0


def test_a_run_is_submitted_again_under_its_name(
    cluster: Cluster, run_text: str, tmp_path: Path
) -> None:
    first, job = submitted(run_text)
    before = cluster.read("job")["metadata"]["uid"]
    cluster.ended("job", failed="Container gristmill failed", statuses=(76, 78, 75))
    state = Kubernetes().state(first)
    assert (state.phase, state.exit) == ("ended", 78)
    assert state.text == "failed: Container gristmill failed"
    again, _ = submitted(run_text, "launch.restarts=2")
    assert again.id == first.id and again.earlier == [first.id]
    assert read_record(job.folder) == again
    assert cluster.read("job")["metadata"]["uid"] != before
    assert cluster.read("job")["spec"]["backoffLimit"] == 2
    assert "status" not in cluster.read("job")


@pytest.mark.parametrize("owner", ["/another/run", None])
def test_the_job_of_another_run_is_left_alone(
    cluster: Cluster, run_text: str, tmp_path: Path, owner: str | None
) -> None:
    submitted(run_text)
    cluster.ended("job")
    metadata = cluster.read("job")["metadata"]
    metadata["annotations"] = {} if owner is None else {"gristmill/run": owner}
    cluster.change("job", metadata=metadata)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match=owner or "gristmill has not made") as raised:
        submitted(run_text)
    assert raised.value.exit == Exit.REFUSED
    assert cluster.read("job")["status"]


def test_a_pytorchjob_tells_the_status_before_128_was_added(
    cluster: Cluster, run_text: str
) -> None:
    record, _ = submitted(run_text, "launch.kubernetes.kind=pytorchjob", "launch.queue=q")
    assert Kubernetes().state(record).text == "waiting in the queue q"
    spec = cluster.read("pytorchjob")["spec"]
    spec["runPolicy"]["suspend"] = False
    running = {"type": "Running", "status": "True"}
    replicas = {"Master": {"active": 1}, "Worker": {"active": 1}}
    cluster.change(
        "pytorchjob",
        spec=spec,
        status={"conditions": [running], "replicaStatuses": replicas},
    )
    assert Kubernetes().state(record).text == "2 of 2 pods are running"
    cluster.ended("pytorchjob", failed="PyTorchJob failed", statuses=(75 + 128, 70 + 128))
    assert Kubernetes().state(record).exit == 70
    cluster.ended("pytorchjob", failed="PyTorchJob failed", statuses=(137,))
    assert Kubernetes().state(record).exit == 137
    label = "training.kubeflow.org/job-name"
    assert f"{label}={record.id}" in " ".join(Kubernetes().output(record))


def test_kubectl_that_fails_or_is_missing_is_one_clear_error(
    cluster: Cluster, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = tmp_path / "bin/kubectl"
    kubectl.write_text("#!/bin/sh\necho 'Unable to connect to the server' >&2\nexit 1\n")
    code, text = launch(run_file, "--on", "kubernetes")
    assert code == Exit.CONFIG and "Unable to connect to the server" in text
    kubectl.write_text("#!/bin/sh\necho nonsense\n")
    code, text = launch(run_file, "--on", "kubernetes")
    assert code == Exit.PEER and "did not answer with an object" in text
    monkeypatch.setenv("PATH", str(tmp_path))
    code, text = launch(run_file, "--on", "kubernetes")
    assert code == Exit.CONFIG and "kubectl is not installed here" in text
    assert read_record(tmp_path / "run/job") is None


@pytest.mark.parametrize(
    "words", [["--after", "1"], ["--then", "evaluate x"], ["--sweep", "train.seed=1,2"]]
)
def test_what_kubernetes_cannot_do_is_refused_before_anything_is_submitted(
    cluster: Cluster, run_file: Path, words: list[str]
) -> None:
    code, text = launch(run_file, "--on", "kubernetes", *words)
    assert code == Exit.USAGE and f"{words[0]}: kubernetes runs each job by itself" in text
    assert not cluster.objects()


# ------------------------------------------------------------------ pods


def pod_job(tmp_path: Path, script: str, node: int) -> Job:
    command = (sys.executable, "-S", "-c", f"import os, signal, sys\n{script}")
    starter = LocalStarter(4, nodes=2, node=node, address=Address("localhost", 1))
    return Job(command, 4, RunFolder(tmp_path), starter=starter, killed_as_signal=True)


def test_a_pod_has_the_ranks_of_its_node_and_their_logs(tmp_path: Path) -> None:
    script = "print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['GROUP_WORLD_SIZE'])"
    assert supervise(pod_job(tmp_path, script, node=1)) == 0
    logs = sorted(file.name for file in (tmp_path / "logs").iterdir())
    assert logs == ["rank-00002.log", "rank-00003.log"]
    assert (tmp_path / "logs/rank-00003.log").read_text().endswith("\n3 1 2\n")


def test_a_process_killed_in_the_pod_is_a_crash_of_the_pod(tmp_path: Path) -> None:
    kill = "os.environ['RANK'] == '3' and os.kill(os.getpid(), signal.SIGKILL)"
    assert supervise(pod_job(tmp_path, kill, node=1)) == 128 + 9
    assert supervise(pod_job(tmp_path, "sys.exit(76)", node=1)) == Exit.PEER


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["--restart-on", "75", "76"], 75, 203),
        (["--restart-on", "75", "76"], 76, 204),
        (["--restart-on", "75", "76"], 70, 70),
        (["--restart-on-crash"], 70, 198),
        (["--restart-on-crash"], 78, 78),
        (["--restart-on-crash"], 75, 75),
        (["--restart-on", "75", "--restart-on-crash"], 0, 0),
    ],
)
def test_a_pytorchjob_is_told_when_a_restart_may_help(
    tmp_path: Path, words: list[str], status: int, expected: int
) -> None:
    given = ["--nodes=1", "--processes=1", f"--folder={tmp_path}", *words, "--"]
    command = [sys.executable, "-S", "-c", f"import sys; sys.exit({status})"]
    assert main([*given, *command]) == expected


def test_losses_without_progress_end_the_job(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(FRUITLESS - 1):
        assert limit_fruitless(folder, Exit.PEER, before=None) == Exit.PEER
    assert limit_fruitless(folder, Exit.PEER, before=None) == Exit.REFUSED
    # The next submission counts from the beginning, and so does a run that has saved something.
    for _ in range(FRUITLESS - 1):
        assert limit_fruitless(folder, Exit.PEER, before=None) == Exit.PEER
    (folder.checkpoints / "step-00000010").mkdir(parents=True)
    assert limit_fruitless(folder, Exit.PEER, before=None) == Exit.PEER
    assert limit_fruitless(folder, Exit.PEER, before=10) == Exit.PEER
    assert limit_fruitless(folder, Exit.STOPPED, before=10) == Exit.STOPPED
    assert not (folder.job / "fruitless").exists()
