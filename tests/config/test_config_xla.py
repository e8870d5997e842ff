"""What `runtime.device = "xla"` does not do is refused when a run file is read, all at once."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import UserError
from gristmill.base.process import ProcessInfo
from gristmill.cli import doctor
from gristmill.cli.main import app
from gristmill.config.load import load_text
from gristmill.config.rules import check_mesh
from gristmill.plan.arithmetic import peak_flops
from gristmill.strategies.xla.backend import VERSIONS, version_fits
from gristmill.train.build import device_mesh

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": 64,
    "vocab_size": 300,
    "activation_function": "gelu_new",
}
RUN = """
name = "tiny"
[model]
layers = 2
heads = 2
width = 16
context = 24
[data]
paths = "tokens/tiny"
[train]
until = "12 steps"
batch = 4
[runtime]
device = "xla"
"""


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ('optim.preconditioner.type="kfac"', "optim.preconditioner"),
        ('optim.preconditioner.type="soap"', "optim.preconditioner"),
        ('optim.type="accum-adamw"', "optim.type"),
        ('precision.compute="fp16"', "precision.compute"),
        ("parallel.pp=2", "parallel.pp"),
        ("parallel.cp=2", "parallel.cp"),
        ('parallel.gossip.topology="ring"', "parallel.gossip"),
        ('parallel.local.every="5 steps"', "parallel.local"),
        ("runtime.kernels=false", "runtime.kernels"),
        ("runtime.compile=true", "runtime.compile"),
        ("runtime.compile=false", "runtime.compile"),
        ("parallel.sequence=true", "parallel.sequence"),
    ],
)
def test_what_xla_devices_cannot_do_is_refused(setting: str, where: str) -> None:
    with pytest.raises(UserError) as caught:
        load_text(RUN, (setting, *(["parallel.tp=2"] if "sequence" in setting else [])), place="x")
    assert any(str(problem.where).endswith(where) for problem in caught.value.problems)
    assert "XLA" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "where", "why"),
    [
        ('model.hf="{folder}"', "runtime.device", "XLA devices train our own GPT, and not "),
        ('model.start="{folder}"', "model.lora", "adapters are not trained on XLA devices"),
    ],
)
def test_models_that_xla_devices_cannot_train_are_refused(
    tmp_path: Path, setting: str, where: str, why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    tables = RUN.split("[model]")[0] + "[data]" + RUN.split("[data]")[1]
    settings = [setting.format(folder=tmp_path)]
    settings += ["model.lora.rank=2"] if where == "model.lora" else []
    with pytest.raises(UserError) as caught:
        load_text(tables, settings, place="x")
    assert [str(one.where).endswith(where) for one in caught.value.problems] == [True]
    assert why in str(caught.value)


def test_everything_is_refused_at_once_and_before_jax_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)  # importing it would be another error
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    words = ["parallel.pp=2", 'optim.type="accum-adamw"', 'precision.compute="fp16"']
    result = CliRunner().invoke(app, ["train", str(file), *words])
    assert isinstance(result.exception, UserError)
    places = [str(one.where).split()[-1] for one in result.exception.problems]
    assert places == ["optim.type", "precision.compute", "parallel.pp"]


def test_fp8_is_refused() -> None:
    fp8 = ('precision.fp8=["head"]', 'precision.compute="bf16"')
    with pytest.raises(UserError, match=r"needs an NVIDIA GPU, and runtime\.device is 'xla'"):
        load_text(RUN, fp8, place="x")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("model.dropout=0.1",), "cudnn drops no weights of attention"),
        (("model.window=8",), "cudnn has no windows"),
        (('data.documents="masked"',), "cudnn takes no masks"),
        (('precision.compute="fp32"',), "cudnn computes in bf16"),
        (('runtime.device="cuda"',), "has no effect unless runtime.device is 'xla' (it is 'cuda')"),
    ],
)
def test_a_kernel_for_attention_that_does_not_fit_is_refused(
    settings: tuple[str, ...], why: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_text(RUN, ('runtime.xla_attention="cudnn"', *settings), place="x")
    (problem,) = caught.value.problems
    assert str(problem.where).endswith("runtime.xla_attention")
    assert why in problem.what
    load_text(RUN, ('runtime.xla_attention="cudnn"',), place="x")


def test_the_versions_of_jax_are_those_of_the_extra() -> None:
    file = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(file.read_text())["project"]["optional-dependencies"]
    assert extras["xla"] == [f"jax>={VERSIONS[0]},<{VERSIONS[1]}"]
    fits = {version: version_fits(version) for version in ("0.10.1", "0.10.2", "0.11.2", "0.12.0")}
    assert fits == {"0.10.1": False, "0.10.2": True, "0.11.2": True, "0.12.0": False}


def test_doctor_says_when_jax_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"jax": "0.13.1"}
    monkeypatch.setattr(doctor, "version", installed.get)
    for check in ("_device", "_machine", "_calibration"):
        monkeypatch.setattr(doctor, check, lambda: iter(()))
    (finding,) = [one for one in doctor.examine() if one.name == "extra xla"]
    assert not finding.good
    assert finding.what == "jax 0.13.1, which was not tested: from 0.10.2 to below 0.12 is"
    installed["jax"] = "0.11.2"
    (finding,) = [one for one in doctor.examine() if one.name == "extra xla"]
    assert finding.good and finding.what == "jax 0.11.2"


def test_the_mesh_is_one_of_devices() -> None:
    config = load_text(RUN, ("parallel.tp=2",), place="x")
    assert config.runtime.devices_of(3) is None, "only JAX can count them"
    assert check_mesh(config, processes=4).sizes["dp_replicate"] == 2
    with pytest.raises(UserError, match="tp 2 asks for a multiple of 2 devices, and there are 3"):
        check_mesh(config, processes=3)


def test_without_jax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    config = load_text(RUN, (), place="x")
    with pytest.raises(UserError, match="needs the package 'jax', which is not installed") as said:
        device_mesh(config, ProcessInfo())
    assert said.value.problems[0].remedy == "pip install 'gristmill[xla]'"


def test_tpus_are_in_the_table() -> None:
    assert peak_flops("4 x TPU v4 with XLA") == 275e12
    assert peak_flops("4 x TPU v5 lite with XLA") == 197e12
    assert peak_flops("8 x TPU v5 with XLA") == 459e12
    assert peak_flops("8 x TPU v3 with XLA") == 61.5e12, "half of the 123e12 of a chip"
    assert peak_flops("8 x TPU v3 with XLA", "tf32") == 20.5e12
    assert peak_flops("1 x TPU v6 lite with XLA") == 918e12
