"""Jobs of Ray, as far as they can be tested without a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.config.load import load_text
from gristmill.launch.jobs.batch import JobRecord
from gristmill.launch.jobs.ray import DEFAULT, Ray, main
from gristmill.launch.jobs.submit import PlannedJob, plan_training, submit
from gristmill.launch.ray_driver import bundle_of

RUN = """
name = "tiny"
folder = "{folder}"
model = {{ layers = 2, heads = 2, width = 16, context = 16 }}
data = {{ paths = "tokens", split = "90,10" }}
train = {{ until = "20 steps", batch = 48, accumulate = 1 }}
"""


class Client:
    """A stand-in for Ray's JobSubmissionClient."""

    submitted: ClassVar[list[dict[str, Any]]] = []
    addresses: ClassVar[list[str]] = []
    status = "RUNNING"
    exit: int | None = None
    text = ""

    def __init__(self, address: str) -> None:
        # As Ray's own client, which prefers the environment.
        chosen = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
        self.addresses.append(chosen or address)
        if "nowhere" in self.addresses[-1]:
            raise ConnectionError("refused")

    def submit_job(self, **described: Any) -> str:
        self.submitted.append(described)
        return "raysubmit_1"

    def get_job_info(self, id: str) -> Any:
        if self.status == "GONE":
            raise RuntimeError(f"Request failed with status code 404: Job {id} does not exist")
        if self.status == "BROKEN":
            raise RuntimeError("Request failed with\nstatus code 500")
        return SimpleNamespace(status=self.status, driver_exit_code=self.exit)

    def get_job_logs(self, id: str) -> str:
        return self.text

    def stop_job(self, id: str) -> bool:
        type(self).status = "STOPPED"
        return True


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    made = type("Made", (Client,), {"submitted": [], "addresses": []})
    module = ModuleType("ray.job_submission")
    module.JobSubmissionClient = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.job_submission", module)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


def planned(tmp_path: Path, *words: str) -> PlannedJob:
    config = load_text(RUN.format(folder=tmp_path / "run"), words, place="run.toml")
    return plan_training(config, Ray(), "ray")


RECORD = JobRecord("ray", "raysubmit_1", [], "", {"address": "http://head:8265"})


def test_a_job_runs_the_driver_after_the_setup(
    tmp_path: Path, client: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = planned(
        tmp_path,
        "launch.python=echo",
        "launch.stop_early=90s",
        "launch.environment={ A = '$(id) \"' }",
        "launch.setup=[\"printf '%s ' setup\"]",
    )
    submit(plan, Ray())
    [described] = client.submitted
    values = described["runtime_env"]["env_vars"]
    assert values["A"] == '$(id) "' and values["RAY_JOB_STOP_WAIT_TIME_S"] == "90"
    done = subprocess.run(described["entrypoint"], shell=True, capture_output=True, text=True)
    settings = tmp_path / "run/job/run.toml"
    assert done.stdout == f"setup -m gristmill.launch.ray_driver {settings}\n"
    assert settings.is_file() and shlex.split(described["entrypoint"])[0] == "exec"


def test_the_settings_name_the_cluster_before_the_environment_does(
    tmp_path: Path, client: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit(planned(tmp_path / "a"), Ray()).facts["address"] == DEFAULT
    monkeypatch.setenv("RAY_ADDRESS", "http://environment:1")
    assert submit(planned(tmp_path / "b"), Ray()).facts["address"] == "http://environment:1"
    words = "launch.address=http://settings:1"
    assert submit(planned(tmp_path / "c", words), Ray()).facts["address"] == "http://settings:1"
    Ray().state(RECORD)
    others = ["http://environment:1", "http://settings:1", "http://head:8265"]
    assert client.addresses == [DEFAULT, *others]
    assert "RAY_API_SERVER_ADDRESS" not in os.environ


@pytest.mark.parametrize(
    ("status", "exit", "phase", "shown"),
    [
        ("PENDING", None, "waiting", None),
        ("RUNNING", None, "running", None),
        ("SUCCEEDED", 0, "ended", 0),
        ("FAILED", 78, "ended", 78),
        ("STOPPED", None, "ended", None),
        ("GONE", None, "unknown", None),
    ],
)
def test_states(
    client: type[Client], status: str, exit: int | None, phase: str, shown: int | None
) -> None:
    client.status, client.exit = status, exit
    found = Ray().state(RECORD)
    assert (found.phase, found.exit) == (phase, shown)


def test_an_active_job_is_not_submitted_again(tmp_path: Path, client: type[Client]) -> None:
    first = submit(planned(tmp_path), Ray())
    with pytest.raises(UserError, match="is job raysubmit_1 already: RUNNING"):
        submit(planned(tmp_path), Ray())
    Ray().cancel(first)
    assert submit(planned(tmp_path), Ray()).earlier == ["raysubmit_1"]


def test_the_output_is_without_what_ray_adds(
    client: type[Client], capsys: pytest.CaptureFixture[str]
) -> None:
    client.status = "SUCCEEDED"
    client.text = (
        "Running entrypoint for job raysubmit_1: exec bash train.sh\n"
        "2026-11-16 22:45:00,123\tINFO worker.py:1900 -- Connecting to existing Ray cluster\n"
        "one\ntwo\nthree\n"
    )
    words = Ray().output(RECORD)[3:]
    assert main([*words, "--tail=40", "--follow"]) == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
    assert main([*words, "--tail=1"]) == 0
    assert capsys.readouterr().out == "three\n"


def test_a_cluster_that_does_not_answer_is_one_clear_error(
    client: type[Client], capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = JobRecord("ray", "1", [], "", {"address": "http://nowhere:1"})
    with pytest.raises(UserError, match="no Ray cluster answers at http://nowhere:1") as raised:
        Ray().state(nowhere)
    assert raised.value.exit == Exit.PEER
    assert main(["http://nowhere:1", "1", "--tail=1"]) == Exit.PEER
    assert capsys.readouterr().err.startswith("error: launch.address: no Ray cluster")
    client.status = "BROKEN"
    with pytest.raises(UserError, match="Ray refused: Request failed with status code 500"):
        Ray().state(RECORD)


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    with pytest.raises(UserError, match=re.escape("pip install 'gristmill[ray]'")):
        submit(planned(tmp_path), Ray())


def test_what_is_reserved_on_each_node(tmp_path: Path) -> None:
    words = ["launch.gpus_per_node=4", "launch.cpus_per_process=3", "launch.resources={ tpu = 2 }"]
    launch = planned(tmp_path, *words).job.launch
    assert bundle_of(launch) == {"CPU": 12, "GPU": 4, "tpu": 2}
    assert bundle_of(planned(tmp_path, "launch.processes_per_node=2").job.launch) == {"CPU": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch.resources={ system = 'polaris' }"], "Ray counts resources"),
        (["launch.container=image"], "launch.container: has no effect with ray"),
        (["launch.requeue=false"], "launch.requeue: has no effect with ray"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        planned(tmp_path, *words)


def test_dry_run_shows_what_would_be_submitted(tmp_path: Path) -> None:
    files = planned(tmp_path).files
    assert list(files) == ["ray.json", "train.sh", "run.toml"]
    assert json.loads(files["ray.json"])["entrypoint"].endswith("/job/train.sh")
