"""A run that trains adapters: what it changes and saves, how it resumes, and what it opens as."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.layout import CheckpointFolder, verify
from gristmill.checkpoint.model import open_model, open_stored
from gristmill.checkpoint.tensorfile import open_tensors
from gristmill.cli.main import app
from gristmill.config.load import load_run, load_text
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.evaluate.loss import evaluate_loss, evaluation_ids
from gristmill.export.folder import export
from gristmill.generate.engine import Engine
from gristmill.generate.sampling import Sampling
from gristmill.models.lora import MergedWeights
from gristmill.plan.arithmetic import gpt_size
from gristmill.track.folder import RunFolder
from gristmill.train.assemble import assemble
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]
Crowd = Callable[..., list[Any]]
CPU = torch.device("cpu")
BASE = """
name = "base"
folder = "{folder}"
data = {{ paths = "{tokens}", split = "90,10" }}
train = {{ until = "6 steps", batch = 4 }}
optim.lr = 1e-2
checkpoint.every = "3 steps"
runtime = {{ device = "cpu", threads = 1 }}
[model]
layers = 2
heads = 2
width = 16
context = 24
mlp_width = 24
positions = "rotary"
norm = "rmsnorm"
activation = "swiglu"
bias = false
tie_head = false
"""
RUN = """
name = "tuned"
folder = "{folder}"
model = {{ start = "{start}", lora = {{ rank = 4 }} }}
data = {{ paths = "{tokens}", split = "90,10" }}
train = {{ until = "9 steps", batch = 4, seed = 2 }}
optim = {{ lr = 3e-2, eps = 1e-5 }}
validate = {{ every = "3 steps", windows = 8 }}
checkpoint.every = "3 steps"
runtime = {{ device = "cpu", threads = 1 }}
"""


@pytest.fixture(scope="session")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to start from."""
    folder = tmp_path_factory.mktemp("base") / "run"
    Run(load_text(BASE.format(folder=folder, tokens=tokens), place="base.toml")).train()
    return folder


@pytest.fixture
def base(trained: Path, tmp_path: Path) -> Path:
    """The same, as one's own."""
    return Path(shutil.copytree(trained, tmp_path / "base"))


def lora_run(tokens: Path, folder: Path, start: Path, *words: str) -> RunConfig:
    text = RUN.format(folder=folder, tokens=tokens, start=start)
    return load_text(text, words, place="tuned.toml")


def newest(folder: Path) -> Path:
    found = CheckpointFolder(folder / "checkpoints").newest_intact().path
    assert found is not None
    return found


def losses(runs: Runs, folder: Path) -> list[float]:
    return [line["loss"] for line in runs.history(folder) if line["kind"] == "step"]


def greedy(model: Any) -> list[int]:
    return Engine(model).generate([[1, 2, 3]], tokens=16, sampling=Sampling(temperature=0.0))[0]


def some_ids() -> torch.Tensor:
    return torch.randint(0, 257, (3, 24), generator=torch.Generator().manual_seed(3))


# ------------------------------------------------------------------ what it trains and saves


def test_a_checkpoint_holds_the_adapters_only(
    tokens: Path, tmp_path: Path, base: Path, runs: Runs
) -> None:
    folder, before = tmp_path / "tuned", runs.tensors(base)
    config = lora_run(tokens, folder, base)
    Run(config).train()
    steps = losses(runs, folder)
    assert sum(steps[-3:]) < sum(steps[:3])
    held = runs.tensors(folder)
    layers = [
        f"blocks.{number}.{name}"
        for number in (0, 1)
        for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ]
    names = {f"{layer}.{part}" for layer in layers for part in ("lora_a", "lora_b")}
    assert {key.partition(":")[2] for key in held if key.startswith("model:")} == names
    state = {key.partition("/")[2] for key in held if key.startswith("optimizer:")}
    assert state == names
    files = [newest(folder) / f"{kind}.safetensors" for kind in ("model", "optimizer")]
    size = gpt_size(config, rows=resolve(config, vocab=257).padded_vocab)
    content = sum(one.numel() * 4 for key, one in held.items() if "/step/" not in key)
    assert size.trained == sum(held[f"model:{name}"].numel() for name in names)
    assert size.checkpoint <= content < 1.1 * size.checkpoint
    assert sum(file.stat().st_size for file in files) < 2 * size.checkpoint
    # The base is as it was.
    assert all(torch.equal(one, runs.tensors(base)[key]) for key, one in before.items())
    assert not verify(newest(base))
    assert "are trained, in adapters of 8 layers, " in (folder / "train.log").read_text()


def test_the_base_in_memory_never_changes(tokens: Path, tmp_path: Path, base: Path) -> None:
    """Also not by weight decay, which is far above zero."""
    config = lora_run(tokens, tmp_path / "tuned", base, "optim.weight_decay=0.5")
    Run(config).train()
    parts = assemble(config, RunFolder(tmp_path / "tuned"))
    stored = open_stored(str(base)).weights
    for name in parts.meta_model.base_parameters():
        own = parts.strategy.parameters[name].local.detach()
        whole = stored.read(name)
        assert torch.equal(own[: len(whole)], whole), name


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.lora.dropout=0.2", 'train.recompute="full"', "train.accumulate=2"),
        ('precision.compute="bf16"', 'model.lora.layers=["qkv","mlp.*"]'),
    ],
    ids=["plain", "dropout", "bf16"],
)
def test_it_resumes_to_the_bit(
    tokens: Path,
    tmp_path: Path,
    base: Path,
    runs: Runs,
    stop_after: Callable[[int], None],
    words: tuple[str, ...],
) -> None:
    whole, parted = (lora_run(tokens, tmp_path / name, base, *words) for name in ("one", "two"))
    assert Run(whole).train().exit is Exit.DONE
    stop_after(4)
    assert Run(parted).train().exit is Exit.STOPPED
    stop_after(10**9)
    assert Run(parted).train().exit is Exit.DONE
    runs.assert_same(tmp_path / "one", tmp_path / "two")


def train_lora(tokens: str, folder: str, start: str, *words: str) -> int:
    return int(Run(lora_run(Path(tokens), Path(folder), Path(start), *words)).train().exit)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("parallel.dp_replicate=2", marks=pytest.mark.slow),
        "parallel.dp_shard=2",
        pytest.param("parallel.cp=2", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(
    crowd: Crowd, tokens: Path, tmp_path: Path, base: Path, runs: Runs, layout: str
) -> None:
    sample = ('sample.every="9 steps"', "sample.temperature=0.0", "sample.tokens=12")
    words = ("train.micro_batch=2", *sample)
    Run(lora_run(tokens, tmp_path / "one", base, *words)).train()
    args = (str(tokens), str(tmp_path / "two"), str(base), layout, *words)
    assert crowd(2, train_lora, *args) == [0, 0]
    assert losses(runs, tmp_path / "two") == pytest.approx(losses(runs, tmp_path / "one"), rel=1e-5)
    one, two = (runs.tensors(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=2e-4, rtol=2e-3)
    texts = [
        [line["text"] for line in runs.history(tmp_path / name) if line["kind"] == "sample"]
        for name in ("one", "two")
    ]
    assert texts[0] and texts[0] == texts[1]


@pytest.mark.slow
def test_two_processes_compute_in_bf16_with_sharded_frozen_weights(
    crowd: Crowd, tokens: Path, tmp_path: Path, base: Path, runs: Runs
) -> None:
    words = ("train.micro_batch=2", 'precision.compute="bf16"')
    Run(lora_run(tokens, tmp_path / "one", base, *words)).train()
    args = (str(tokens), str(tmp_path / "two"), str(base), "parallel.dp_shard=2", *words)
    assert crowd(2, train_lora, *args) == [0, 0]
    assert losses(runs, tmp_path / "two") == pytest.approx(losses(runs, tmp_path / "one"), rel=1e-2)


# ------------------------------------------------------------------ what it opens as


def test_it_opens_as_the_merged_model(tokens: Path, tmp_path: Path, base: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "tuned"
    config = lora_run(tokens, folder, base)
    Run(config).train()
    parts = assemble(config, RunFolder(folder))
    from gristmill.train.resume import resume

    resume(parts)
    own = parts.strategy.gather_full_model()
    assert own is not None and own.adapters
    stored = open_stored(str(folder))
    assert stored.config.lora is None and isinstance(stored.weights, MergedWeights)
    opened = open_model(str(folder), device=CPU)
    ids = some_ids()
    with torch.no_grad():
        wanted = own.eval()(ids)
        assert (wanted - open_model(str(base), device=CPU).model(ids)).abs().max() > 0.05
        torch.testing.assert_close(opened.model(ids), wanted, atol=3e-6, rtol=1e-5)
    assert greedy(opened.model) == greedy(own)
    # Exporting compares with transformers: logits within 1e-5, the same greedy tokens.
    exported = export(stored, tmp_path / "exported")
    assert exported.agreement is not None and exported.architecture == "LlamaForCausalLM"
    again = open_model(str(tmp_path / "exported"), device=CPU)
    with torch.no_grad():
        assert torch.equal(again.model(ids), opened.model(ids))
    found = evaluation_ids(opened, data=None, text=None)
    tuned = evaluate_loss(opened, found.ids, limit=400).loss
    assert tuned < evaluate_loss(open_model(str(base), device=CPU), found.ids, limit=400).loss


def test_the_command_line_exports_adapters(tokens: Path, tmp_path: Path, base: Path) -> None:
    folder = tmp_path / "tuned"
    Run(lora_run(tokens, folder, base, 'train.until="3 steps"')).train()
    place = str(tmp_path / "adapter")
    refused = CliRunner().invoke(app, ["export", str(folder), place, "--adapter", "--code"])
    assert isinstance(refused.exception, UserError) and "--adapter" in str(refused.exception)
    plain = CliRunner().invoke(app, ["export", str(base), place, "--adapter"])
    assert isinstance(plain.exception, UserError) and "no adapters" in str(plain.exception)
    done = CliRunner().invoke(app, ["export", str(folder), place, "--adapter"])
    assert done.exit_code == 0, done.output
    assert "14 modules" in done.output  # qkv is three of theirs, up two
    assert f"note: these adapters belong to step-00000006 of {base}" in done.output
    assert {file.name for file in Path(place).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_a_further_run_starts_from_the_merged_model(
    tokens: Path, tmp_path: Path, base: Path, runs: Runs
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    Run(lora_run(tokens, first, base)).train()
    # All weights of the merged model are trained, or adapters of it.
    Run(lora_run(tokens, second, first, "model.lora=unset", 'train.until="3 steps"')).train()
    assert "model:head.weight" in runs.tensors(second)
    Run(lora_run(tokens, third, first, 'train.until="3 steps"')).train()
    merged = open_model(str(first), device=CPU)
    starts = [runs.history(folder)[0] for folder in (second, third)]
    assert [line["kind"] for line in starts] == ["validation"] * 2
    assert starts[0]["loss"] == starts[1]["loss"]
    last = [line for line in runs.history(first) if line["kind"] == "validation"][-1]
    assert starts[0]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    with torch.no_grad():
        twice = open_model(str(third), device=CPU).model(some_ids())
        assert (twice - merged.model(some_ids())).abs().max() > 1e-3


# ------------------------------------------------------------------ its base


def test_its_base_may_train_on(
    tokens: Path, tmp_path: Path, base: Path, runs: Runs, stop_after: Callable[[int], None]
) -> None:
    """The run goes on with the checkpoint that it began with, not with the newest one."""
    whole, folder = tmp_path / "whole", tmp_path / "tuned"
    Run(lora_run(tokens, whole, base)).train()
    stop_after(4)
    Run(lora_run(tokens, folder, base)).train()
    stop_after(10**9)
    known = newest(base).name
    extra = CheckpointFolder(base / "checkpoints").begin(99)
    for file in newest(base).iterdir():
        shutil.copy(file, extra / file.name)
    (extra / "MANIFEST").unlink()
    tensors = load_file(extra / "model.safetensors")
    save_file({name: one + 0.1 for name, one in tensors.items()}, extra / "model.safetensors")
    state = json.loads((extra / "state.json").read_text())
    state["progress"]["steps"] = 99
    (extra / "state.json").write_text(json.dumps(state))
    CheckpointFolder(base / "checkpoints").commit(extra)
    assert newest(base).name == "step-00000099"
    Run(lora_run(tokens, folder, base)).train()
    saved = json.loads((newest(folder) / "state.json").read_text())["base"]
    assert saved["checkpoint"] == known
    runs.assert_same(whole, folder)
    one, two = (open_stored(str(each)).weights for each in (folder, whole))
    assert all(torch.equal(one.read(name), two.read(name)) for name in two.shapes)
    shutil.rmtree(base / "checkpoints" / known)
    with pytest.raises(UserError, match=f"base: has no {known} .any more.; the adapters") as caught:
        Run(lora_run(tokens, folder, base)).train()
    assert caught.value.exit is Exit.DATA
    with pytest.raises(UserError, match=f"their model was not found: {known} of "):
        open_stored(str(folder))


def test_a_moved_base_is_found_or_asked_for(
    tokens: Path, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    shutil.move(base, home / "base")
    folder = home / "tuned"
    Run(lora_run(tokens, folder, home / "base")).train()
    # Both moved together.
    home = Path(shutil.move(home, tmp_path / "away"))
    folder = home / "tuned"
    wanted = open_stored(str(folder)).weights.read("blocks.0.mlp.up.weight")
    # The base alone.
    shutil.move(home / "base", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="adapters only, and their model was not found") as caught:
        open_stored(str(folder))
    text = str(caught.value)
    assert f"{tmp_path}/home/base: is not there" in text and f"{home}/base: is not there" in text
    assert f"`gristmill train {folder} model.start=PLACE`" in text
    assert caught.value.exit is Exit.DATA
    # What the message says helps.
    again = load_run(folder, [f"model.start={tmp_path}/elsewhere", f"folder={folder}"])
    assert Run(again).train().exit is Exit.DONE
    found = open_stored(str(folder))
    assert torch.equal(found.weights.read("blocks.0.mlp.up.weight"), wanted)


def test_a_changed_base_is_refused(tokens: Path, tmp_path: Path, base: Path) -> None:
    pytest.importorskip("transformers")
    hf, folder = tmp_path / "hf", tmp_path / "tuned"
    export(open_stored(str(base)), hf)
    config = lora_run(tokens, folder, hf, f"data.tokenizer={base / 'tokenizer'}")
    Run(config).train()
    open_stored(str(folder))
    tensors = load_file(hf / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="hf: holds other weights now"):
        open_stored(str(folder))
    with pytest.raises(UserError, match="hf: holds other weights now; the adapters of this run"):
        Run(config).train()


def test_damaged_adapters_are_not_used(
    tokens: Path, tmp_path: Path, base: Path, runs: Runs
) -> None:
    folder = tmp_path / "tuned"
    Run(lora_run(tokens, folder, base)).train()
    whole = runs.tensors(folder)
    file = newest(folder) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    stored = open_stored(str(folder))
    assert stored.step == 6 and "step-00000009 is damaged" in stored.notes[0]
    Run(lora_run(tokens, folder, base)).train()
    assert "skipped damaged checkpoint step-00000009" in (folder / "train.log").read_text()
    again = runs.tensors(folder)
    assert all(torch.equal(one, again[name]) for name, one in whole.items())


def test_a_damaged_base_is_not_used(tokens: Path, tmp_path: Path, base: Path) -> None:
    folder = tmp_path / "tuned"
    Run(lora_run(tokens, folder, base)).train()
    file = newest(base) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 8)
    for use in (lambda: open_stored(str(folder)), lambda: Run(load_run(folder)).train()):
        with pytest.raises(UserError, match=r"model.safetensors: has \d+ bytes, not"):
            use()


def test_other_adapters_are_another_run(tokens: Path, tmp_path: Path, base: Path) -> None:
    Run(lora_run(tokens, tmp_path / "tuned", base)).train()
    with pytest.raises(UserError, match=r"model.lora: was .*'rank': 4.* is now .*'rank': 2"):
        Run(lora_run(tokens, tmp_path / "tuned", base, "model.lora.rank=2")).train()
    # Dropout is not part of what they are.
    changed = lora_run(tokens, tmp_path / "tuned", base, "model.lora.dropout=0.1")
    assert Run(changed).train().exit is Exit.DONE


# ------------------------------------------------------------------ models of transformers


def test_models_of_transformers_have_adapters_too(
    tokens: Path,
    tmp_path: Path,
    runs: Runs,
    stop_after: Callable[[int], None],
) -> None:
    """GPT-2, whose weights are transposed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"vocab_size": 257, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    made.save_pretrained(tmp_path / "gpt2")
    hf = (f"model.hf={tmp_path / 'gpt2'}", "model.init=pretrained", "model.start=unset")
    words = (*hf, "model.dropout=0.0", "model.lora.rank=4")
    whole, parted = (lora_run(tokens, tmp_path / one, Path("-"), *words) for one in ("one", "two"))
    Run(whole).train()
    stop_after(4)
    Run(parted).train()
    stop_after(10**9)
    Run(parted).train()
    runs.assert_same(tmp_path / "one", tmp_path / "two")
    assert losses(runs, tmp_path / "one")[-1] < losses(runs, tmp_path / "one")[0] - 0.05
    names = open_tensors(newest(tmp_path / "one")).shapes
    assert names["transformer.h.1.attn.c_attn.lora_b"] == (48, 4)
    assert all(".lora_" in name for name in names)
    stored = open_stored(str(tmp_path / "one"))
    exported = export(stored, tmp_path / "exported")
    assert exported.agreement is not None and exported.architecture == "GPT2LMHeadModel"
    parts = assemble(whole, RunFolder(tmp_path / "one"))
    from gristmill.train.resume import resume

    resume(parts)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "exported").eval()
    with torch.no_grad():
        own = parts.strategy.gather_full_model().eval()(some_ids())  # type: ignore[union-attr]
        torch.testing.assert_close(theirs(some_ids()).logits, own, atol=3e-6, rtol=1e-5)
    further = lora_run(tokens, tmp_path / "further", tmp_path / "one", 'train.until="2 steps"')
    assert Run(further).train().exit is Exit.DONE
