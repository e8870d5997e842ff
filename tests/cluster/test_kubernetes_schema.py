"""Manifests against the schemas of Kubernetes itself, where `kubernetes-validate` is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gristmill.config.load import load_text
from gristmill.launch.jobs.kubernetes import Kubernetes
from gristmill.launch.jobs.submit import plan_training

pytestmark = pytest.mark.cluster

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed: pip install it"
)

VERSION = "1.31"
"""The first in which rules for failed pods are stable."""

RUN = """
name = "Tiny_Run"
folder = "{folder}/run"
model = {{ layers = 2, heads = 2, width = 16, context = 16 }}
data = {{ paths = "tokens", split = "90,10" }}
train = {{ until = "20 steps", batch = 48, accumulate = 1 }}
[launch]
container = "registry.example/gristmill:1"
[launch.kubernetes]
volumes = {{ my-claim = "{folder}", other = "/other" }}
"""
FULL = [
    "launch.nodes=3",
    "launch.gpus_per_node=2",
    "launch.cpus_per_process=4",
    "launch.memory=64G",
    "launch.time=6h",
    "launch.restarts=2",
    "launch.queue=research",
    'launch.resources={"rdma/hca" = 1}',
    'launch.environment={ A = "$(B)", C = "1" }',
    'launch.setup=["source activate"]',
    "launch.kubernetes.namespace=ml",
    "launch.kubernetes.service_account=trainer",
    'launch.kubernetes.node_selector={"cloud/gpu" = "h100"}',
    'launch.kubernetes.pull_secrets=["registry"]',
]
PYTORCHJOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["pytorchReplicaSpecs"],
            "additionalProperties": False,
            "properties": {
                "nprocPerNode": {"type": "string"},
                "elasticPolicy": {"type": "object"},
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "suspend": {"type": "boolean"},
                        "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
                        "backoffLimit": {"type": "integer"},
                        "activeDeadlineSeconds": {"type": "integer"},
                        "ttlSecondsAfterFinished": {"type": "integer"},
                    },
                },
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "required": ["Master"],
                    "additionalProperties": False,
                    "patternProperties": {
                        "^(Master|Worker)$": {
                            "type": "object",
                            "required": ["template"],
                            "additionalProperties": False,
                            "properties": {
                                "replicas": {"type": "integer", "minimum": 1},
                                "restartPolicy": {
                                    "enum": ["Always", "OnFailure", "Never", "ExitCode"]
                                },
                                "template": {"type": "object"},
                            },
                        }
                    },
                },
            },
        },
    },
}


def objects(tmp_path: Path, words: list[str]) -> list[dict[str, Any]]:
    config = load_text(RUN.format(folder=tmp_path), words, place="run.toml")
    files = plan_training(config, Kubernetes(), "kubernetes").files
    return list(yaml.safe_load_all(next(iter(files.values()))))


def validate(one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, VERSION, strict=True)


@pytest.mark.parametrize("words", [[], FULL, [*FULL, "launch.requeue=false"]])
def test_a_job_is_as_kubernetes_wants_it(tmp_path: Path, words: list[str]) -> None:
    found = objects(tmp_path, words)
    for one in found:
        validate(one)
    job = found[-1]
    job["spec"]["completionsmode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)


@pytest.mark.parametrize("words", [[], FULL])
def test_a_pytorchjob_is_as_kubeflow_wants_it(tmp_path: Path, words: list[str]) -> None:
    config_map, job = objects(tmp_path, [*words, "launch.kubernetes.kind=pytorchjob"])
    validate(config_map)
    jsonschema.validate(job, PYTORCHJOB)
    for one in job["spec"]["pytorchReplicaSpecs"].values():
        # Kubeflow fills in a policy for restarts, which a template in Kubernetes has to have.
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
        validate({**template, "template": one["template"]})
