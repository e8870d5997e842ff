"""nanoGPT's ckpt.pt becomes a model folder with the same logits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gristmill.base.errors import DataError, UserError
from gristmill.checkpoint.model import open_model, open_stored
from gristmill.config.hf import model_settings
from gristmill.foreign.folder import import_model, open_checkpoint
from gristmill.text.tokenizers.tokenizer import open_tokenizer

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 320}


def state_dict(*, bias: bool) -> dict[str, torch.Tensor]:
    """The tensors of nanoGPT's model, under its names."""
    generator, width = torch.Generator().manual_seed(1), SIZES["n_embd"]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    state = {
        "transformer.wte.weight": draw(SIZES["vocab_size"], width),
        "transformer.wpe.weight": draw(SIZES["block_size"], width),
    }
    linears = {
        "attn.c_attn": (3, 1),
        "attn.c_proj": (1, 1),
        "mlp.c_fc": (4, 1),
        "mlp.c_proj": (1, 4),
    }
    for layer in range(SIZES["n_layer"]):
        h = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            state[f"{h}.{norm}.weight"] = 1 + draw(width)
        for name, (rows, columns) in linears.items():
            state[f"{h}.{name}.weight"] = draw(rows * width, columns * width)
        if bias:
            for name in ("ln_1", "ln_2", "attn.c_proj", "mlp.c_proj"):
                state[f"{h}.{name}.bias"] = draw(width)
            state[f"{h}.attn.c_attn.bias"] = draw(3 * width)
            state[f"{h}.mlp.c_fc.bias"] = draw(4 * width)
    state["transformer.ln_f.weight"] = 1 + draw(width)
    if bias:
        state["transformer.ln_f.bias"] = draw(width)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


def reference_logits(
    state: dict[str, torch.Tensor], ids_BT: torch.Tensor, *, tanh: bool = False
) -> torch.Tensor:
    """GPT-2 in plain steps, in double precision."""
    get = {name: tensor.double() for name, tensor in state.items()}
    heads, width = SIZES["n_head"], SIZES["n_embd"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ get[f"{name}.weight"].T + get.get(f"{name}.bias", 0)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
        return scaled * get[f"{name}.weight"] + get.get(f"{name}.bias", 0)

    B, T = ids_BT.shape
    x = get["transformer.wte.weight"][ids_BT] + get["transformer.wpe.weight"][:T]
    mask = torch.full((T, T), -math.inf).triu(1).double()
    for layer in range(SIZES["n_layer"]):
        h = f"transformer.h.{layer}"
        qkv = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn")
        q, k, v = (
            part.view(B, T, heads, width // heads).transpose(1, 2) for part in qkv.split(width, -1)
        )
        weights = torch.softmax(q @ k.mT / math.sqrt(width // heads) + mask, dim=-1)
        x = x + linear((weights @ v).transpose(1, 2).reshape(B, T, width), f"{h}.attn.c_proj")
        inner = linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        inner = functional.gelu(inner, approximate="tanh" if tanh else "none")
        x = x + linear(inner, f"{h}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ get["lm_head.weight"].T


def save_checkpoint(
    path: Path, state: dict[str, torch.Tensor], *, prefix: str = "", **model_args: object
) -> Path:
    """A file as nanoGPT writes it, with the state of its optimizer."""
    arguments = {**SIZES, "bias": "transformer.ln_f.bias" in state, "dropout": 0.1, **model_args}
    content = {
        "model": {f"{prefix}{name}": tensor for name, tensor in state.items()},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 6e-4}]},
        "model_args": arguments,
        "iter_num": 10,
        "best_val_loss": torch.tensor(3.5),
        "config": {"dataset": "openwebtext", "betas": (0.9, 0.95)},
    }
    torch.save(content, path)
    return path


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_logits_are_those_of_nanogpt(tmp_path: Path, bias: bool, prefix: str) -> None:
    state = state_dict(bias=bias)
    source = save_checkpoint(tmp_path / "ckpt.pt", state, prefix=prefix)
    done = import_model(
        open_checkpoint(source), tmp_path / "model", tokenizer=open_tokenizer("bytes")
    )
    assert done.parameters == sum(t.numel() for n, t in state.items() if n != "lm_head.weight")
    ids_BT = torch.randint(0, 320, (3, 12), generator=torch.Generator().manual_seed(2))
    model = open_model(str(tmp_path / "model"), device=torch.device("cpu")).model
    with torch.inference_mode():
        found = model(ids_BT)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(
        found[..., :320].double(), reference_logits(state, ids_BT), atol=1e-5, rtol=1e-5
    )


def test_a_folder_with_a_ckpt_pt_and_the_older_gelu(tmp_path: Path) -> None:
    state = state_dict(bias=True)
    save_checkpoint(tmp_path / "ckpt.pt", state)
    model = open_checkpoint(tmp_path, activation="gelu_tanh")
    import_model(model, tmp_path / "model", tokenizer=open_tokenizer("bytes"))
    ids_BT = torch.arange(12)[None]
    with torch.inference_mode():
        found = open_model(str(tmp_path / "model"), device=torch.device("cpu")).model(ids_BT)
    assert isinstance(found, torch.Tensor)
    wanted = reference_logits(state, ids_BT, tanh=True)
    torch.testing.assert_close(found[..., :320].double(), wanted, atol=1e-5, rtol=1e-5)


def test_the_folder_is_a_start_and_says_where_it_came_from(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "ckpt.pt", state_dict(bias=False))
    import_model(open_checkpoint(source), tmp_path / "model")
    settings = model_settings(tmp_path / "model")
    assert settings["layers"] == 2 and settings["vocab"] == 320 and settings["bias"] is False
    assert settings["activation"] == "gelu" and settings["dropout"] == 0.1
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["imported_from"] == {"program": "nanoGPT", "path": str(source)}
    assert "eos_token_id" not in values and "auto_map" not in values
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip


def test_numbers_keep_their_type_and_files_are_divided(tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in state_dict(bias=True).items()}
    model = open_checkpoint(save_checkpoint(tmp_path / "ckpt.pt", state))
    tokenizer = open_tokenizer("bytes")
    done = import_model(model, tmp_path / "model", tokenizer=tokenizer, shard=20_000)
    assert done.files > 1 and done.bytes == 2 * done.parameters
    stored = open_stored(str(tmp_path / "model")).weights
    wanted = state["transformer.h.1.mlp.c_fc.weight"].float()
    torch.testing.assert_close(stored.read("blocks.1.mlp.up.weight"), wanted, rtol=0, atol=0)


def test_an_existing_folder_is_kept_unless_asked(tmp_path: Path) -> None:
    first = open_checkpoint(save_checkpoint(tmp_path / "a.pt", state_dict(bias=False)))
    second = open_checkpoint(save_checkpoint(tmp_path / "b.pt", state_dict(bias=True)))
    folder = tmp_path / "model"
    import_model(first, folder)
    with pytest.raises(UserError, match="not empty"):
        import_model(second, folder)
    import_model(second, folder, overwrite=True)
    assert model_settings(folder)["bias"] is True
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="something other than a model"):
        import_model(second, other, overwrite=True)
    assert (other / "thesis.txt").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt", "model", "precious"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": 3}, "no model has these sizes"),
        ({"n_layer": 3}, "lacks blocks.2"),
        ({"n_layer": 10**9}, "only"),
        ({"n_embd": 32}, "has shape"),
        ({"n_embd": 2**40}, "shape|sizes"),
        ({"n_embd": "x"}, "n_embd"),
        ({"vocab_size": 321}, r"\(320, 16\), not \(321, 16\)"),
        ({"bias": True}, "lacks blocks.0.attention_norm.bias"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    source = save_checkpoint(tmp_path / "ckpt.pt", state_dict(bias=False), **change)
    with pytest.raises(DataError, match=message):
        import_model(open_checkpoint(source), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"]


def test_weights_that_are_not_finite_leave_nothing(tmp_path: Path) -> None:
    state = state_dict(bias=False)
    state["transformer.h.1.ln_2.weight"][3] = math.nan
    model = open_checkpoint(save_checkpoint(tmp_path / "ckpt.pt", state))
    with pytest.raises(DataError, match=r"NaN or infinite numbers in blocks.1.mlp_norm.weight"):
        import_model(model, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"]


def test_a_tokenizer_that_is_too_large(tmp_path: Path) -> None:
    state = state_dict(bias=False)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state[name] = state[name][:100]
    model = open_checkpoint(save_checkpoint(tmp_path / "ckpt.pt", state, vocab_size=100))
    with pytest.raises(UserError, match="has 257 ids, but the model has 100"):
        import_model(model, tmp_path / "model", tokenizer=open_tokenizer("bytes"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(DataError, match="neither a checkpoint of Megatron"):
        open_checkpoint(tmp_path)
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(DataError, match="not a checkpoint of nanoGPT"):
        open_checkpoint(tmp_path / "other.pt")
    state = {**state_dict(bias=False), "transformer.h.0.attn.rotary.weight": torch.ones(2)}
    with pytest.raises(DataError, match=r"has no transformer.h.0.attn.rotary.weight"):
        open_checkpoint(save_checkpoint(tmp_path / "ckpt.pt", state))


def test_a_head_that_is_not_the_embedding_is_kept(tmp_path: Path) -> None:
    state = state_dict(bias=True)
    state["lm_head.weight"] = state["lm_head.weight"].flip(0).contiguous()
    found = open_checkpoint(save_checkpoint(tmp_path / "ckpt.pt", state))
    assert found.config.tie_head is False and "a head of its own" in found.notes[0]
    import_model(found, tmp_path / "model", tokenizer=open_tokenizer("bytes"))
    ids_BT = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(2))
    model = open_model(str(tmp_path / "model"), device=torch.device("cpu")).model
    with torch.inference_mode():
        logits = model(ids_BT)
    torch.testing.assert_close(
        logits.double(), reference_logits(state, ids_BT), rtol=1e-4, atol=1e-4
    )


def test_a_copy_of_the_embedding_is_no_head_of_its_own(tmp_path: Path) -> None:
    state = state_dict(bias=True)
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    found = open_checkpoint(save_checkpoint(tmp_path / "ckpt.pt", state))
    assert found.config.tie_head and found.notes == () and "head.weight" not in found.tensors


def test_arguments_that_nanogpt_does_not_have_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "ckpt.pt", state_dict(bias=True), rotary=True, n_kv_head=1)
    with pytest.raises(DataError, match="model_args have no rotary, n_kv_head: this is a changed"):
        open_checkpoint(path)
    path = save_checkpoint(tmp_path / "ckpt.pt", state_dict(bias=True), vocab_size=None)
    with pytest.raises(DataError, match="vocab_size is no number"):
        open_checkpoint(path)
