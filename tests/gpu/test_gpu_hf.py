"""Models of transformers on a GPU: compiled, in bf16, with the kernel of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from gristmill.config.hf import HFConfig
from gristmill.models.build import build_model
from gristmill.models.loss_terms import LossTerms
from gristmill.models.spec import Kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
pytest.importorskip("transformers")

_COMMON = {
    "vocab_size": 1003,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 1003,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "llama": {**_COMMON, "num_key_value_heads": 2},
    "gemma2": {**_COMMON, "head_dim": 16, "num_key_value_heads": 2, "sliding_window": 32},
    "phi": {**_COMMON, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_loss_in_bf16_is_that_of_transformers_in_fp32(kind: str) -> None:
    """Vocabularies like these need rows of padding, or products would be slow."""
    config = HFConfig(hf_config={"model_type": kind, **KINDS[kind]})  # type: ignore[call-arg]
    model: Any = build_model(config, vocab=1003, device=torch.device("cuda"))
    model.initialise(3)
    ids = torch.randint(0, 1003, (4, 129), device="cuda")
    tokens, targets = ids[:, :-1], ids[:, 1:]
    logits = model.inner(input_ids=tokens).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected.backward()
    wanted = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    model.compute, model.kernels = torch.bfloat16, Kernels(loss=True)
    compiled, scale = (
        torch.compile(model, dynamic=False, fullgraph=True),
        torch.ones((), device="cuda"),
    )
    loss = compiled(tokens, targets_BT=targets, terms=LossTerms(scale=scale))
    assert loss.total.item() == pytest.approx(expected.item(), rel=2e-3)
    loss.scaled.backward()
    for name, one in model.named_parameters():
        assert one.grad.dtype == torch.float32
        apart = (one.grad - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-3)
        assert apart < 0.08, name
