"""Checkpoints of the real megatron-core become model folders with the same logits."""

from __future__ import annotations

import argparse
import collections
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gristmill.base.errors import DataError
from gristmill.checkpoint.model import open_model
from gristmill.foreign.folder import import_model, open_checkpoint
from gristmill.foreign.torch_file import read_distributed
from gristmill.text.tokenizers.tokenizer import open_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
LAYOUTS = ("torch-tp1-pp1", "torch-tp2-pp1", "torch-tp1-pp2", "torch_dist-tp2-pp1")


def logits_of(source: Path, folder: Path, ids_BT: torch.Tensor) -> torch.Tensor:
    """What our model computes with an imported checkpoint."""
    import_model(open_checkpoint(source), folder)
    # A vocabulary of 48 has no tokenizer of ours; generating is not what is tested.
    from gristmill.checkpoint.loading import load_weights
    from gristmill.checkpoint.tensorfile import open_hf_tensors
    from gristmill.config.hf import model_settings
    from gristmill.config.schema import parse_model
    from gristmill.models.build import build_model
    from gristmill.models.hf import folder_weights

    config = parse_model(model_settings(folder))
    model = build_model(config, vocab=config.vocab or 0, device=torch.device("cpu"))
    values = {"model_type": "gristmill"}
    load_weights(model, folder_weights(open_hf_tensors(folder), model, values, folder=folder))
    with torch.inference_mode():
        found = model.eval()(ids_BT)
    assert isinstance(found, torch.Tensor)
    return found[..., : config.vocab]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("style", ["gpt2", "modern"])
def test_logits_are_those_of_megatron(tmp_path: Path, style: str, layout: str) -> None:
    wanted = load_file(FIXTURES / f"{style}-logits.safetensors")
    found = logits_of(FIXTURES / f"{style}-{layout}", tmp_path / "model", wanted["ids"])
    torch.testing.assert_close(found, wanted["logits"], atol=2e-5, rtol=1e-4)


# ------------------------------------------------------------------ older Megatrons

SIZES = {"layers": 2, "width": 8, "heads": 2, "vocab": 300, "context": 12}


def older_arguments(**change: Any) -> argparse.Namespace:
    values = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
        "kv_channels": 4,
        "max_position_embeddings": 12,
        "layernorm_epsilon": 1e-5,
        "bias_gelu_fusion": True,
        "hidden_dropout": 0.1,
        "init_method_std": 0.02,
    }
    return argparse.Namespace(**{**values, **change})


def whole_model(layers: int = 2) -> dict[str, torch.Tensor]:
    """A model under our names, with queries, keys and values one after the other."""
    generator, width = torch.Generator().manual_seed(3), 8

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    model = {"embedding.weight": draw(300, width), "positions.weight": draw(12, width)}
    for layer in range(layers):
        block = f"blocks.{layer}"
        for name, rows, columns in (
            ("attention.qkv", 3 * width, width),
            ("attention.out", width, width),
            ("mlp.up", 4 * width, width),
            ("mlp.down", width, 4 * width),
        ):
            model[f"{block}.{name}.weight"] = draw(rows, columns)
            model[f"{block}.{name}.bias"] = draw(rows)
        for name in ("attention_norm", "mlp_norm"):
            model[f"{block}.{name}.weight"], model[f"{block}.{name}.bias"] = (
                draw(width),
                draw(width),
            )
    model["norm.weight"], model["norm.bias"] = draw(width), draw(width)
    return model


def their_rows(qkv: torch.Tensor, version: float) -> torch.Tensor:
    """Rows of one rank's queries, keys and values, as a version of Megatron has them."""
    three = qkv.view(3, -1, 4, *qkv.shape[1:])  # which of the three, head, feature
    if version >= 2:
        return three.transpose(0, 1).reshape(qkv.shape)
    if version >= 1:
        return three.movedim(0, 2).reshape(qkv.shape)
    return qkv


OLD_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
COLUMN, ROW = ("attention.qkv", "mlp.up"), ("attention.out", "mlp.down")


def layer_tensors(
    model: dict[str, torch.Tensor], layer: int, rank: int, ranks: int, version: float
) -> dict[str, torch.Tensor]:
    """A layer under old names, of one rank."""
    found = {}
    for ours, theirs in OLD_NAMES.items():
        for kind in ("weight", "bias"):
            value = model[f"blocks.{layer}.{ours}.{kind}"]
            if ours == "attention.qkv":
                parts = [part.chunk(ranks)[rank] for part in value.chunk(3)]
                value = their_rows(torch.cat(parts), version)
            elif ours in COLUMN:
                value = value.chunk(ranks)[rank]
            elif ours in ROW and kind == "weight":
                value = value.chunk(ranks, dim=1)[rank]
            found[f"{theirs}.{kind}"] = value.clone()
    return found


def save_older(folder: Path, *, ranks: int, stages: int, version: float, **change: Any) -> Path:
    """A checkpoint as Megatron-LM of 2020 to 2023 wrote it."""
    model = whole_model()
    for stage in range(stages):
        for rank in range(ranks):
            layers = range(stage * 2 // stages, (stage + 1) * 2 // stages)
            encoder = collections.OrderedDict(
                (f"layers.{number}.{name}", value)
                for number, layer in enumerate(layers)
                for name, value in layer_tensors(model, layer, rank, ranks, version).items()
            )
            language: dict[str, Any] = {"transformer" if version < 2 else "encoder": encoder}
            state: dict[str, Any] = {"language_model": language}
            words = {"weight": model["embedding.weight"].chunk(ranks)[rank].clone()}
            if stage == 0:
                positions = {"weight": model["positions.weight"]}
                embedding = {"word_embeddings": words, "position_embeddings": positions}
                language["embedding"] = embedding
            if stage == stages - 1:
                encoder["final_layernorm.weight"] = model["norm.weight"]
                encoder["final_layernorm.bias"] = model["norm.bias"]
                if stages > 1:
                    state["word_embeddings_for_head"] = words
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            place = folder / "iter_0000123" / name
            place.mkdir(parents=True)
            content = {"args": older_arguments(**change), "model": state, "iteration": 123}
            if version:
                content["checkpoint_version"] = version
            torch.save(content, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("123\n")
    return folder


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_older_layouts_are_merged(tmp_path: Path, version: float, ranks: int, stages: int) -> None:
    source = save_older(tmp_path / "old", ranks=ranks, stages=stages, version=version)
    model = open_checkpoint(source)
    wanted = whole_model()
    assert set(model.tensors) == set(wanted)
    for name, tensor in model.tensors.items():
        assert torch.equal(tensor.read(), wanted[name]), name
    assert (model.config.activation, model.config.dropout) == ("gelu_tanh", 0.1)
    import_model(model, tmp_path / "model", tokenizer=open_tokenizer("bytes"))
    opened = open_model(str(tmp_path / "model"), device=torch.device("cpu"))
    assert torch.equal(
        opened.model.get_parameter("embedding.weight")[:300], wanted["embedding.weight"]
    )


def test_virtual_stages_come_one_after_the_other(tmp_path: Path) -> None:
    model = whole_model(layers=4)
    for stage in range(2):
        content: dict[str, Any] = {"args": older_arguments(num_layers=4), "checkpoint_version": 3.0}
        for chunk in range(2):
            tensors = layer_tensors(model, 2 * chunk + stage, 0, 1, 3.0)
            encoder = {f"layers.0.{name}": value for name, value in tensors.items()}
            language: dict[str, Any] = {"encoder": encoder}
            if (stage, chunk) == (0, 0):
                words = {"weight": model["embedding.weight"]}
                positions = {"weight": model["positions.weight"]}
                both = {"word_embeddings": words, "position_embeddings": positions}
                language["embedding"] = both
            if (stage, chunk) == (1, 1):
                encoder["final_norm.weight"] = model["norm.weight"]
                encoder["final_norm.bias"] = model["norm.bias"]
            content[f"model{chunk}"] = {"language_model": language}
        place = tmp_path / "iter_0000001" / f"mp_rank_00_{stage:03d}"
        place.mkdir(parents=True)
        torch.save(content, place / "model_optim_rng.pt")
    found = open_checkpoint(tmp_path / "iter_0000001")
    assert set(found.tensors) == set(model)
    assert all(torch.equal(tensor.read(), model[name]) for name, tensor in found.tensors.items())


def test_a_checkpoint_without_arguments(tmp_path: Path) -> None:
    source = save_older(tmp_path / "old", ranks=1, stages=1, version=3.0)
    file = source / "iter_0000123" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    for change in ({"args": None}, {"args": {"num_layers": "2"}}):
        torch.save({**content, **change}, file)
        with pytest.raises(DataError, match="does not hold the arguments of its run"):
            open_checkpoint(source)
    torch.save({**content, "checkpoint_version": 4.0}, file)
    with pytest.raises(DataError, match=r"checkpoint_version 4\.0 is not known"):
        open_checkpoint(source)


def test_megatron_deepspeed_layer_files(tmp_path: Path) -> None:
    model, folder = whole_model(), tmp_path / "run" / "global_step77"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("global_step77")
    for rank in range(2):

        def save(number: int, content: dict[str, torch.Tensor], rank: int = rank) -> None:
            torch.save(content, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")

        words = model["embedding.weight"].chunk(2)[rank].clone()
        positions = model["positions.weight"]
        save(1, {"word_embeddings.weight": words, "position_embeddings.weight": positions})
        for layer in range(2):
            save(3 + layer, layer_tensors(model, layer, rank, 2, 3.0))
        save(6, {"weight": model["norm.weight"], "bias": model["norm.bias"]})
        content = {"args": older_arguments(), "checkpoint_version": 3.0, "module": None}
        torch.save(content, folder / f"mp_rank_{rank:02d}_model_states.pt")
    found = open_checkpoint(tmp_path / "run")
    assert found.program == "Megatron-DeepSpeed"
    assert {n: t.shape for n, t in found.tensors.items()} == {n: t.shape for n, t in model.items()}
    assert all(torch.equal(tensor.read(), model[name]) for name, tensor in found.tensors.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8}, "--num-experts 8"),
        ({"position_embedding_type": "alibi"}, "--position-embedding-type alibi"),
        ({"multi_latent_attention": True}, "--multi-latent-attention,"),
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post"),
        ({"rotary_interleaved": True, "position_embedding_type": "rope"}, "--rotary-interleaved"),
        ({"normalization": "L2"}, "--normalization L2"),
        ({"add_bias_linear": False}, "--disable-bias-linear with LayerNorm"),
        ({"qk_layernorm": True}, "--qk-layernorm"),
        ({"glu_activation": "geglu"}, "--glu-activation geglu"),
        ({"num_attention_heads": "x"}, "--num-attention-heads"),
        ({"num_layers": 3}, "lacks blocks.2"),
        ({"hidden_size": 16}, "rows|shape"),
    ],
)
def test_what_our_model_cannot_be_is_refused_by_its_option(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = save_older(tmp_path / "old", ranks=1, stages=1, version=3.0, **change)
    with pytest.raises(DataError, match=message):
        import_model(open_checkpoint(source), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_missing_ranks_and_files(tmp_path: Path) -> None:
    source = save_older(tmp_path / "old", ranks=2, stages=2, version=3.0)
    shutil.rmtree(source / "iter_0000123" / "mp_rank_01_000")
    with pytest.raises(DataError, match=r"there is no mp_rank_01_000: the checkpoint has 2 x 2"):
        open_checkpoint(source)
    (source / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(DataError, match="names no checkpoint"):
        open_checkpoint(source)
    (source / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(DataError, match="iter_0000007, which is not there"):
        open_checkpoint(source)
    (source / "iter_0000123" / "mp_rank_00_000_001").mkdir()
    with pytest.raises(DataError, match="--expert-model-parallel-size"):
        open_checkpoint(source / "iter_0000123")
    file = source / "iter_0000123" / "mp_rank_00_000" / "model_optim_rng.pt"
    with pytest.raises(DataError, match="give the folder"):
        open_checkpoint(file)


# ------------------------------------------------------------------ torch_dist


@pytest.fixture
def distributed(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / "gpt2-torch_dist-tp2-pp1" / "iter_0000010", tmp_path / "it")
    return tmp_path / "it"


def test_a_hostile_metadata_file(distributed: Path, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(tmp_path / 'HARM')!r}, 'w')",))

    (distributed / ".metadata").write_bytes(pickle.dumps({"x": Harm()}))
    with pytest.raises(DataError, match=r"builtins\.exec"):
        open_checkpoint(distributed)
    assert not (tmp_path / "HARM").exists()


def test_pieces_that_are_cut_missing_or_elsewhere(distributed: Path, tmp_path: Path) -> None:
    metadata = (distributed / ".metadata").read_bytes()
    for change, message in (
        (metadata.replace(b"__0_0.distcp", b"../0_0.distc"), "a file named"),
        (metadata[:-20], "damaged"),
        (metadata.replace(b"word_embeddings", b"work_embeddings"), "no word embeddings"),
    ):
        (distributed / ".metadata").write_bytes(change)
        with pytest.raises(DataError, match=message):
            open_checkpoint(distributed)
    (distributed / ".metadata").write_bytes(metadata)
    for file in distributed.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="the file has"):
        import_model(open_checkpoint(distributed), tmp_path / "model")
    for file in distributed.glob("*.distcp"):
        file.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        import_model(open_checkpoint(distributed), tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it"]


def test_pieces_that_overlap_leave_holes_that_are_found(distributed: Path, tmp_path: Path) -> None:
    model = open_checkpoint(distributed)
    name = "embedding.weight"
    stored = read_distributed(distributed, lambda one: one.endswith("word_embeddings.weight"))
    (whole,) = stored.values()
    first = whole.chunks[0]
    twice = replace(whole, chunks=tuple(first for _ in whole.chunks))
    changed = replace(model, tensors={**model.tensors, name: twice.whole()})
    with pytest.raises(DataError, match=r"NaN or infinite numbers in embedding\.weight"):
        import_model(changed, tmp_path / "model")
