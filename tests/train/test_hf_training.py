"""Models of transformers go through training as our own do: by name, exactly resumed, in every
layout that does not divide them, from their weights, and refused clearly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.model import open_model, open_stored
from gristmill.config.hf import HFConfig
from gristmill.config.load import dump_run, load_run, load_text
from gristmill.config.schema import RunConfig
from gristmill.evaluate.loss import evaluate_loss, evaluation_ids
from gristmill.export.folder import export
from gristmill.generate.engine import Engine
from gristmill.generate.sampling import Sampling
from gristmill.models.hf import HFModel
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

transformers = pytest.importorskip("transformers")
Crowd = Callable[..., list[Any]]
CPU = torch.device("cpu")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rope_scaling": None,
    "attention_dropout": 0.0,
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
}
RUN = """
name = "hf"
folder = "{folder}"
data = {{ paths = "{tokens}", split = "90,10", sequence = 24 }}
train = {{ until = "8 steps", batch = 4, accumulate = 2 }}
optim = {{ lr = 1e-2, eps = 1e-4 }}
validate = {{ every = "4 steps", windows = 8 }}
checkpoint.every = "3 steps"
runtime = {{ device = "cpu", threads = 1 }}
[model]
hf = "{model}"
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with an architecture and no weights."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def hf_run(tokens: Path, folder: Path, model: Path, *words: str) -> RunConfig:
    text = RUN.format(folder=folder, tokens=tokens, model=model)
    return load_text(text, words, place="hf.toml")


def losses(runs: Runs, folder: Path) -> list[float]:
    return [line["loss"] for line in runs.history(folder) if line["kind"] == "step"]


@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(('optim.type="muon"', "optim.lr=0.02"), marks=pytest.mark.slow),
        ('train.recompute="full"', 'precision.compute="bf16"'),
        ('train.recompute="selective"', "model.dropout=0.1"),
        pytest.param(('optim.preconditioner.type="soap"',), marks=pytest.mark.slow),
    ],
    ids=["adamw", "muon", "recomputed in bf16", "dropout", "soap"],
)
def test_it_trains_and_resumes_exactly(
    tokens: Path,
    tmp_path: Path,
    llama: Path,
    runs: Runs,
    stop_after: Callable[[int], None],
    words: tuple[str, ...],
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert Run(hf_run(tokens, whole, llama, *words)).train().exit is Exit.DONE
    stop_after(4)
    assert Run(hf_run(tokens, parted, llama, *words)).train().exit is Exit.STOPPED
    assert Run(hf_run(tokens, parted, llama, *words)).train().exit is Exit.DONE
    runs.assert_same(whole, parted)
    assert losses(runs, whole)[-1] < losses(runs, whole)[0] - 0.3


def train_hf(tokens: str, folder: str, model: str, *words: str) -> int:
    return int(Run(hf_run(Path(tokens), Path(folder), Path(model), *words)).train().exit)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["parallel.dp_shard=2", pytest.param("parallel.dp_replicate=2", marks=pytest.mark.slow)],
)
def test_two_processes_train_as_one(
    crowd: Crowd, tokens: Path, tmp_path: Path, llama: Path, runs: Runs, layout: str
) -> None:
    Run(hf_run(tokens, tmp_path / "one", llama)).train()
    args = (str(tokens), str(tmp_path / "two"), str(llama), layout, "train.accumulate=1")
    assert crowd(2, train_hf, *args) == [0, 0]
    assert losses(runs, tmp_path / "two") == pytest.approx(losses(runs, tmp_path / "one"), rel=1e-5)
    names = runs.tensors(tmp_path / "two").keys()
    assert {"model:model.layers.1.mlp.up_proj.weight", "model:model.norm.weight"} < names
    assert "model:lm_head.weight" not in names


def test_the_run_needs_the_folder_no_more(
    tokens: Path, tmp_path: Path, llama: Path, runs: Runs
) -> None:
    """All of the architecture is in the run file that the run keeps."""
    folder = tmp_path / "run"
    Run(hf_run(tokens, folder, llama, 'train.until="4 steps"')).train()
    (llama / "config.json").unlink()
    kept = load_run(folder)
    assert isinstance(kept.model, HFConfig)
    assert kept.model.hf_config["rope_scaling"] == "null"
    assert kept.model.architecture()["rope_scaling"] is None
    assert Run(kept).train().exit is Exit.DONE
    loaded = open_model(str(folder), device=CPU)
    assert isinstance(loaded.model, HFModel)
    greedy = Sampling(temperature=0.0)
    texts = [
        engine.generate([[1, 2, 3]], tokens=80, sampling=greedy)[0]
        for engine in (Engine(loaded.model), Engine(loaded.model, cached=False))
    ]
    assert texts[0] == texts[1]
    text = evaluation_ids(loaded, data=None, text=None)
    assert 1.0 < evaluate_loss(loaded, text.ids, limit=200).loss < 6.0


def test_weights_are_random_unless_they_are_asked_for(
    tokens: Path, tmp_path: Path, llama: Path, runs: Runs
) -> None:
    first = tmp_path / "first"
    Run(hf_run(tokens, first, llama)).train()
    trained = open_model(str(first), device=CPU).model
    assert isinstance(trained, HFModel)
    trained.inner.save_pretrained(tmp_path / "trained")
    for init, good in (("random", False), ("pretrained", True)):
        folder = tmp_path / init
        Run(hf_run(tokens, folder, tmp_path / "trained", f"model.init={init}")).train()
        begins = next(one["loss"] for one in runs.history(folder) if one["kind"] == "validation")
        assert (begins < 5.0) == good
    Run(hf_run(tokens, tmp_path / "on", llama, "model.hf=unset", f"model.start={first}")).train()
    again = [line["loss"] for line in runs.history(tmp_path / "on") if line["kind"] == "validation"]
    ends = [line["loss"] for line in runs.history(first) if line["kind"] == "validation"]
    assert again[0] == pytest.approx(ends[-1], rel=1e-6)


@pytest.mark.parametrize(
    "kind", ["llama", "mixtral", pytest.param("olmo2", marks=pytest.mark.slow)]
)
def test_what_was_trained_is_exported_as_it_is(
    tokens: Path, tmp_path: Path, llama: Path, kind: str
) -> None:
    words = (f"model.hf_config.model_type={kind}", 'train.until="3 steps"')
    Run(hf_run(tokens, tmp_path / "run", llama, *words)).train()
    stored = open_stored(str(tmp_path / "run"))
    done = export(stored, tmp_path / "out", check="transformers", shard=20_000)
    assert done.agreement is not None and done.agreement.largest_difference == 0
    assert done.files > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == done.architecture
    ours = stored.load(CPU).model
    ids = torch.arange(40)[None]
    assert torch.equal(theirs.eval()(ids).logits, ours(ids))
    again = open_model(str(tmp_path / "out"), device=CPU).model
    assert torch.allclose(again(ids), ours(ids), atol=1e-5)
    with pytest.raises(UserError, match="which transformers has already"):
        export(stored, tmp_path / "other", code=True)


# ------------------------------------------------------------------ settings


def test_a_model_on_the_command_line_replaces_that_of_the_file(tokens: Path, llama: Path) -> None:
    text = f"""
    name = "x"
    preset = "gpt2-small"
    data.paths = "{tokens}"
    train = {{ until = "1 steps", batch = 1 }}
    model.dropout = 0.1
    """
    words = (f"model.hf={llama}", "model.hf_config.num_hidden_layers=1", "data.sequence=16")
    config = load_text(text, words, place="run.toml")
    assert isinstance(config.model, HFConfig)
    assert (config.model.context, config.model.vocab, config.model.dropout) == (64, 257, 0.0)
    assert config.model.hf_config["num_hidden_layers"] == 1
    assert "torch_dtype" not in config.model.hf_config
    again = load_text(dump_run(config), place="written")
    assert again.model == config.model


def test_an_architecture_needs_no_folder(tokens: Path) -> None:
    text = f"""
    name = "x"
    data.paths = "{tokens}"
    train = {{ until = "1 steps", batch = 1 }}
    [model.hf_config]
    model_type = "gpt2"
    n_positions = 32
    vocab_size = 300
    attn_pdrop = 0.2
    """
    model = load_text(text, ("data.sequence=16",), place="run.toml").model
    assert isinstance(model, HFConfig)
    assert (model.context, model.vocab, model.dropout) == (32, 300, 0.2)
    changed = load_text(text, ("model.dropout=0.0", "data.sequence=16"), place="run.toml").model
    assert isinstance(changed, HFConfig)
    assert changed.architecture()["attn_pdrop"] == 0.0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("parallel.tp=2",), "parallel.tp: needs tensor parallelism, which Hugging Face models"),
        (("parallel.cp=2",), "parallel.cp: needs context parallelism"),
        (("parallel.pp=2",), "parallel.pp: needs pipeline stages"),
        (('data.documents="masked"',), "data.documents: needs attention masks for packed"),
        (("model.layers=3",), "model.layers: there is no such setting.*model.hf_config"),
        (("model.context=128",), "model.context: 128 is more than the 64 positions"),
        (("model.dropout=0.1", "model.hf_config.attention_dropout=unset"), "no dropout rate"),
        (('model.init="pretrained"', "model.vocab=300"), "model.vocab: 300, but the weights"),
        (('model.init="imported"',), "model.init: .*'random' or 'pretrained'"),
        (("model.hf_config=3",), "model.hf_config: .*dictionary"),
        (("model.hf_config.output_router_logits=true",), "auxiliary loss of routers"),
        (("model.hf=nowhere/to-be-found",), "model.hf"),
        (("model.hf_config.num_hidden_layer=1",), "did you mean num_hidden_layers"),
    ],
)
def test_what_cannot_be_is_refused_when_the_file_is_read(
    tokens: Path, tmp_path: Path, llama: Path, words: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(UserError, match=f"(?s){problem}"):
        hf_run(tokens, tmp_path / "run", llama, *words)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("model.hf_config.vocab_size=100",), "the tokenizer has 257 ids, but the model has 100"),
        (('model.init="pretrained"',), "safetensors"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    tokens: Path, tmp_path: Path, llama: Path, words: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        Run(hf_run(tokens, tmp_path / "run", llama, *words)).train()


def test_muon_refuses_stacked_experts(tokens: Path, tmp_path: Path, llama: Path) -> None:
    words = ("model.hf_config.model_type=mixtral", "optim.type=muon")
    with pytest.raises(UserError, match=r"experts.*has 3 dimensions"):
        Run(hf_run(tokens, tmp_path / "run", llama, *words)).train()


@pytest.mark.slow
def test_soap_leaves_stacked_experts_to_adam(
    tokens: Path, tmp_path: Path, llama: Path, runs: Runs
) -> None:
    words = ("model.hf_config.model_type=mixtral", 'optim.preconditioner.type="soap"')
    Run(hf_run(tokens, tmp_path / "run", llama, *words, 'train.until="2 steps"')).train()
    stored = {name.partition(":")[2] for name in runs.tensors(tmp_path / "run")}
    kinds = {"experts": set[str](), "q_proj": set[str]()}
    for kind, _, key in (name.partition("/") for name in stored):
        for part in kinds:
            kinds[part] |= {kind} if part in key else set()
    assert kinds["experts"] == {"step", "exp_avg", "exp_avg_sq"}
    assert {"momentum", "row_basis", "column_factor"} < kinds["q_proj"]


def test_another_architecture_does_not_resume(tokens: Path, tmp_path: Path, llama: Path) -> None:
    Run(hf_run(tokens, tmp_path / "run", llama, 'train.until="3 steps"')).train()
    with pytest.raises(UserError, match=r"model\.hf_config"):
        Run(hf_run(tokens, tmp_path / "run", llama, "model.hf_config.intermediate_size=64")).train()
