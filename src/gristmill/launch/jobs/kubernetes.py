"""Kubernetes: an Indexed Job or a PyTorchJob of Kubeflow, with one pod for each node.

    ConfigMap NAME     the settings, since pods do not see the folder they were submitted from
    Service NAME       names for the pods of a Job: NAME-0.NAME is where the processes meet
    Job NAME           pods that run `launch/node.py`, which starts the processes of one node

Exit statuses decide what becomes of a pod that has ended. A Job has rules for them. A PyTorchJob
starts a pod again if its status is 128 or more, so `node.py` adds 128 where a restart may help.

The Job owns the other two objects, which are deleted with it. Deleting the Job is the polite stop:
its pods get TERM and `stop_early` to save, and it disappears when they have ended.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.units import parse_seconds, timestamp
from gristmill.config.launch import KubernetesConfig, LaunchConfig
from gristmill.launch.jobs.batch import (
    BatchJob,
    BatchState,
    JobRecord,
    Launcher,
    UncertainError,
    render,
    run_scheduler,
)
from gristmill.launch.node import RESTART
from gristmill.launch.processes import PERMANENT

NEEDS = "where kubectl can reach the cluster"
RUN_ANNOTATION = "gristmill/run"
"""Names the run folder, so that two runs of one name are told apart."""
_SETTINGS = "/etc/gristmill"
_PORT = 29500
"""A pod has an address of its own, so nobody else uses its ports."""
_MOST_NAME = 50
"""Letters of a name: pods and Kubeflow's services add to it, and 63 is the limit."""
_DELETE_MARGIN = 60
_POD_LABELS = {
    "job": ("batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index=0"),
    "pytorchjob": ("training.kubeflow.org/job-name", "training.kubeflow.org/replica-type=master"),
}
"""The label with the job's name, and what its first pod has besides."""


class Kubernetes(Launcher):
    """Jobs of Kubernetes."""

    unused = (
        *("account", "qos", "constraint", "reservation", "exclusive", "filesystems", "options"),
        *("mail", "mail_on", "modules", "container_runtime", "mounts", "starter", "mpi"),
        *("hostfile", "address"),
    )
    lacks = ("--after", "--then", "--sweep")

    def problems(self, launch: LaunchConfig) -> Iterator[Problem]:
        if not launch.container:
            what = "pods need an image with gristmill in it"
            yield Problem(what, "launch.container", 'such as "registry.example/gristmill:1"')
        volumes = (launch.kubernetes or KubernetesConfig()).volumes
        where = "launch.kubernetes.volumes"
        if not volumes:
            what = "no volume is left to hold the run when its pods are gone"
            yield Problem(what, where, 'name a claim and its path: { my-claim = "/data" }')
        for claim, path in volumes.items():
            if not PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                what = f"the path of {claim} is {path!r}, which is no absolute path"
                yield Problem(what, where, 'such as "/data"')
            elif ":" in path:
                yield Problem(f"the path of {claim} has a colon: {path!r}", where, "use another")
        if len({PurePosixPath(path) for path in volumes.values()}) < len(volumes):
            yield Problem("two claims have the same path", where, "give each its own")
        if launch.queue and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", launch.queue):
            yield Problem(f"{launch.queue!r} is no name of a local queue", "launch.queue")

    def files(self, job: BatchJob) -> dict[str, str]:
        kubernetes = job.launch.kubernetes or KubernetesConfig()
        work = _working_folder(job, kubernetes.volumes)
        several = job.launch.nodes > 1 and kubernetes.kind == "job"
        name = object_name(job.name)
        labels = {"app.kubernetes.io/name": "gristmill", "app.kubernetes.io/instance": name}
        queue = {"kueue.x-k8s.io/queue-name": job.launch.queue} if job.launch.queue else {}
        values = {
            "job": job,
            "kubernetes": kubernetes,
            "name": name,
            "labels": labels,
            "job_labels": {**labels, **queue},
            "annotations": {RUN_ANNOTATION: str(job.folder.parent)},
            "suspended": bool(job.launch.queue),
            "subdomain": name if several else None,
            "policy": "Never" if kubernetes.kind == "job" else None,
            "grace": round(parse_seconds(job.launch.stop_early)),
            "work": str(work),
            "settings": _SETTINGS,
            "command": [_unexpanded(word) for word in _command(job, kubernetes)],
            "environment": {
                key: _unexpanded(value)
                for key, value in _environment(job, f"{name}-0.{name}" if several else None).items()
            },
            "resources": _resources(job.launch),
            "shared_memory": _quantity(kubernetes.shared_memory),
            "rules": list(_rules(job.launch)),
        }
        return {
            f"{kubernetes.kind}.yaml": render(f"kubernetes-{kubernetes.kind}.yaml.jinja", **values)
        }

    def submit(self, job: BatchJob, file: Path) -> JobRecord:
        kubernetes = job.launch.kubernetes or KubernetesConfig()
        name, kind = object_name(job.name), kubernetes.kind
        facts = {
            "kind": kind,
            "namespace": kubernetes.namespace,
            "seconds": round(parse_seconds(job.launch.stop_early)),
        }
        record = JobRecord("kubernetes", name, [], timestamp(), facts)
        _remove_ended(record, run=str(job.folder.parent))
        kubectl(record, "apply", "-f", str(file))
        owned = ("configmap", "service")[: 2 if kind == "job" and job.launch.nodes > 1 else 1]
        try:
            _own(record, owned)
        except UserError as error:
            # The job is there, so its files have to stay.
            raise UncertainError(error.problems, exit=error.exit) from error
        return record

    def state(self, record: JobRecord) -> BatchState:
        answer = _get(record)
        if answer is None:
            return BatchState("unknown", "Kubernetes no longer knows it, so it has ended")
        if "deletionTimestamp" in answer["metadata"]:
            return BatchState("running", "its pods save and stop")
        state = _state(answer)
        if state.phase != "ended" or state.exit is not None:
            return state
        return BatchState("ended", state.text, _exit_status(record))

    def cancel(self, record: JobRecord) -> None:
        # The pods end first, so that the run is not submitted again before it is saved.
        kubectl(record, "delete", _kind(record), record.id, "--cascade=foreground", "--wait=false")

    def output(self, record: JobRecord) -> Sequence[str]:
        label, first = _POD_LABELS[_kind(record)]
        container = "gristmill" if _kind(record) == "job" else "pytorch"
        chosen = ["logs", "-l", f"{label}={record.id},{first}", "-c", container]
        return [*_words(record), *chosen]


def object_name(name: str) -> str:
    """The name of a run as Kubernetes takes it; a name that has to be changed gets a checksum, so
    that two of them stay two."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if plain == name and len(name) <= _MOST_NAME and plain[0].isalpha():
        return name
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return f"{plain[: _MOST_NAME - 9].rstrip('-')}-{zlib.crc32(name.encode()):08x}"


def kubectl(record: JobRecord, *words: str, timeout: float = 60.0) -> str:
    """What kubectl prints."""
    return run_scheduler([*_words(record), *words], needs=NEEDS, timeout=timeout)


def _words(record: JobRecord) -> list[str]:
    namespace = record.facts.get("namespace")
    return ["kubectl", *(["--namespace", namespace] if namespace else [])]


def _kind(record: JobRecord) -> str:
    return str(record.facts["kind"])


def _get(record: JobRecord) -> dict[str, Any] | None:
    """The job as Kubernetes has it; None if it has none of this name."""
    words = ("get", _kind(record), record.id, "--ignore-not-found", "-o", "json")
    return _parse(record, kubectl(record, *words))


def _parse(record: JobRecord, text: str) -> dict[str, Any] | None:
    if not text.strip():
        return None
    try:
        answer = json.loads(text)
        answer["metadata"]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"kubectl did not answer with an object: {text.strip()[:200]!r}",
            where=f"{_kind(record)} {record.id}",
            remedy="see what `kubectl get` says of it",
            exit=Exit.PEER,
        ) from None
    return answer if isinstance(answer, dict) else None


def _own(record: JobRecord, kinds: Sequence[str]) -> None:
    """Have the job's other objects deleted with it."""
    job = _get(record) or {}
    owner = {
        "apiVersion": job.get("apiVersion"),
        "kind": job.get("kind"),
        "name": record.id,
        "uid": job.get("metadata", {}).get("uid"),
    }
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    for kind in kinds:
        kubectl(record, "patch", kind, record.id, "--type=merge", "-p", patch)


def _remove_ended(record: JobRecord, *, run: str) -> None:
    """Make room for a job of this name, unless it is another run's, or has not ended."""
    answer = _get(record)
    if answer is None:
        return
    owner = answer["metadata"].get("annotations", {}).get(RUN_ANNOTATION)
    ending = "deletionTimestamp" in answer["metadata"]
    if owner != run or (not ending and _state(answer).phase != "ended"):
        of = f" of the run {owner}" if owner else ", which gristmill has not made"
        raise UserError(
            f"there is a {_kind(record)} {record.id} already{'' if owner == run else of}",
            where=f"kubernetes namespace {record.facts.get('namespace') or 'of the context'}",
            remedy="wait for it, delete it with kubectl, or give this run another name",
            exit=Exit.REFUSED,
        )
    limit = record.facts["seconds"] + _DELETE_MARGIN
    words = ("delete", _kind(record), record.id, "--cascade=foreground", "--ignore-not-found")
    kubectl(record, *words, timeout=limit)


# ------------------------------------------------------------------ the manifest


def _working_folder(job: BatchJob, volumes: Mapping[str, str]) -> PurePosixPath:
    """Where the command runs: the same folder as here if a volume holds it, else the volume with
    the run."""
    paths = sorted((PurePosixPath(path) for path in volumes.values()), key=lambda path: path.parts)
    run = job.run or job.folder.parent
    home = [path for path in paths if run.is_relative_to(path)]
    if not home:
        raise UserError(
            f"the run folder {run} is on no volume, so it would be gone with the pods",
            where="launch.kubernetes.volumes",
            remedy="set `folder` to a place below one of the volumes "
            f"({', '.join(str(path) for path in paths)}), or mount one there",
        )
    if any(job.work.is_relative_to(path) for path in paths):
        return PurePosixPath(job.work)
    return home[-1]


def _command(job: BatchJob, kubernetes: KubernetesConfig) -> list[str]:
    """What a pod runs."""
    launch = job.launch
    node = ["-m", "gristmill.launch.node", f"--nodes={launch.nodes}"]
    node += [f"--processes={launch.each}", f"--folder={job.run or job.folder.parent}"]
    if job.elastic:
        node.append("--elastic")
    if kubernetes.kind == "pytorchjob":
        if again := _again(launch):
            node += ["--restart-on", *(str(int(status)) for status in again)]
        if launch.restarts:
            node.append("--restart-on-crash")
    outside, inside = str(job.folder / "run.toml"), f"{_SETTINGS}/run.toml"
    inner = [inside if word == outside else word for word in job.command]
    words = [job.command[0], *node, "--", *inner]
    if not launch.setup:
        return words
    # As process 1, bash would not listen to TERM; and it has to make room for what does.
    script = "\n".join(["trap 'exit 75' TERM", *launch.setup, 'exec "$@"'])
    return ["/bin/bash", "-c", script, "bash", *words]


def _environment(job: BatchJob, host: str | None) -> dict[str, str]:
    values = {"PYTHONUNBUFFERED": "1"}
    if job.launch.cpus_per_process:
        values["OMP_NUM_THREADS"] = str(job.launch.cpus_per_process)
    if host is not None:
        values |= {"MASTER_ADDR": host, "MASTER_PORT": str(_PORT)}
    return values | job.launch.environment


def _unexpanded(text: str) -> str:
    """Text that is the same after Kubernetes has replaced variables in it."""
    return text.replace("$", "$$")


def _quantity(memory: str) -> str:
    """An amount of memory, whose units are powers of 1024 to schedulers."""
    return f"{memory}i" if memory[-1].isalpha() else memory


def _resources(launch: LaunchConfig) -> dict[str, str | int]:
    values: dict[str, str | int] = {}
    if launch.cpus_per_process:
        values["cpu"] = launch.cpus_per_process * launch.each
    if launch.memory:
        values["memory"] = _quantity(launch.memory)
    if launch.gpus_per_node:
        values["nvidia.com/gpu"] = launch.gpus_per_node
    return {**values, **launch.resources}


def _again(launch: LaunchConfig) -> list[Exit]:
    """Statuses after which a pod is started again and nobody is to blame: stopped and saved, and
    another pod was lost."""
    stopped = [Exit.STOPPED] if launch.requeue else []
    return [*stopped, *([Exit.PEER] if launch.requeue or launch.restarts else [])]


def _rules(launch: LaunchConfig) -> Iterator[tuple[str, list[int]]]:
    """What a Job makes of exit statuses; all others are crashes, which it counts."""
    again = _again(launch)
    if again:
        yield "Ignore", [int(status) for status in again]
    others = {Exit.STOPPED, Exit.PEER} - set(again)
    yield "FailJob", sorted(int(status) for status in {*PERMANENT, *others})


# ------------------------------------------------------------------ what became of it


def _state(answer: dict[str, Any]) -> BatchState:
    """The state of a Job or a PyTorchJob."""
    status = answer.get("status") or {}
    conditions = {
        condition.get("type"): condition
        for condition in status.get("conditions") or ()
        if condition.get("status") == "True"
    }
    if "Complete" in conditions or "Succeeded" in conditions:
        return BatchState("ended", "complete", 0)
    if failed := conditions.get("Failed"):
        why = failed.get("message") or failed.get("reason")
        return BatchState("ended", f"failed: {why}" if why else "failed")
    spec = answer.get("spec") or {}
    if spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"):
        queue = answer["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        return BatchState("waiting", f"waiting in the queue {queue}" if queue else "suspended")
    replicas = spec.get("pytorchReplicaSpecs")
    if replicas is None:
        total, ready = spec.get("completions", 1), status.get("ready") or 0
        ready += status.get("succeeded") or 0
    else:
        total = sum(replica.get("replicas", 1) for replica in replicas.values())
        states = (status.get("replicaStatuses") or {}).values()
        ready = sum(state.get("active") or 0 for state in states) if "Running" in conditions else 0
    words = f"{ready} of {total} pods are running"
    if lost := status.get("failed"):
        words += f", {lost} have ended before"
    return BatchState("running" if ready else "waiting", words)


def _exit_status(record: JobRecord) -> int | None:
    """The status of the pod that failed; None if no pod is left to tell."""
    label = _POD_LABELS[_kind(record)][0]
    text = kubectl(record, "get", "pods", "-l", f"{label}={record.id}", "-o", "json")
    pods = (_parse(record, text) or {}).get("items", [])
    ended = [
        (container.get("state") or {}).get("terminated") or {}
        for pod in pods
        for container in (pod.get("status") or {}).get("containerStatuses") or ()
    ]
    known = {Exit.STOPPED, Exit.PEER}
    statuses = [state["exitCode"] for state in ended if state.get("exitCode")]
    plain = [status - RESTART if status - RESTART in set(Exit) else status for status in statuses]
    return min(plain, key=lambda status: (status in known, status == Exit.STOPPED), default=None)
