"""Documents that share a sample but do not see one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gristmill.config.model import GPTConfig
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.models.layers import DOCUMENT_BLOCK, document_blocks
from gristmill.models.recompute import Recompute
from gristmill.models.spec import Kernels, Loss, document_mask

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"layers": 2, "heads": 4, "width": 32, "context": 24}
VARIANTS: dict[str, dict[str, Any]] = {
    "learned": {},
    "rotary": {"positions": "rotary"},
    "rotary, grouped heads, qk norm": {"positions": "rotary", "kv_heads": 2, "qk_norm": True},
    "windows": {"positions": "rotary", "window": 5},
}
LENGTHS = [[7, 1, 12, 4], [24], [1, 22, 1]]
"""Documents of three samples."""


def make(settings: dict[str, Any], *, recompute: bool = False) -> GPT:
    config = GPTConfig(**{**SMALL, **settings})
    again = Recompute("full" if recompute else "none")
    model = build_model(config, vocab=50, device=CPU)
    model.recompute_blocks(again)
    model.initialise(3)
    return model


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions and document numbers of three samples."""
    ids = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    documents = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS]
    )
    return ids, positions, documents.to(torch.int32)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_logits_are_those_of_each_document_alone(
    settings: dict[str, Any], backend: SDPBackend
) -> None:
    model = make(settings).eval()
    ids, positions, documents = packed()
    with torch.inference_mode(), sdpa_kernel(backend):
        together = model(ids, positions_BT=positions, documents_BT=documents)
        joined = model(ids)
        for row, lengths in enumerate(LENGTHS):
            begin = 0
            for length in lengths:
                alone = model(ids[row : row + 1, begin : begin + length])
                part = together[row : row + 1, begin : begin + length]
                assert torch.allclose(part, alone, atol=1e-5)
                begin += length
    assert torch.allclose(joined[1], together[1], atol=1e-5)
    assert not torch.allclose(joined[0], together[0], atol=1e-3)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_the_sum_over_the_documents(
    settings: dict[str, Any], recompute: bool
) -> None:
    ids, positions, documents = packed()
    targets = ids.roll(-1, dims=1)
    model, alone = make(settings, recompute=recompute).train(), make(settings).train()
    whole = model(ids, targets_BT=targets, positions_BT=positions, documents_BT=documents)
    assert isinstance(whole, Loss)
    whole.scaled.backward()
    total = 0.0
    for row, lengths in enumerate(LENGTHS):
        for begin, length in zip(torch.tensor([0, *lengths]).cumsum(0), lengths, strict=False):
            part = slice(int(begin), int(begin) + length)
            loss = alone(ids[row : row + 1, part], targets_BT=targets[row : row + 1, part])
            loss.scaled.backward()
            total += loss.total.item()
    assert whole.total.item() == pytest.approx(total, rel=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4, rtol=1e-3), name


def test_one_document_in_every_sample_changes_nothing() -> None:
    model = make({"positions": "rotary"}).eval()
    ids, _, _ = packed()
    positions = torch.arange(24).expand(3, 24)
    with torch.inference_mode():
        plain = model(ids)
        told = model(ids, positions_BT=positions, documents_BT=torch.zeros_like(ids))
    assert torch.allclose(plain, told, atol=1e-5)


def test_positions_alone_leave_attention_as_it_is() -> None:
    model = make({}).eval()
    ids, positions, documents = packed()
    changed = ids.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 50
    with torch.inference_mode():
        before, after = (model(row, positions_BT=positions)[0] for row in (ids, changed))
        alone, still = (
            model(row, positions_BT=positions, documents_BT=documents)[0] for row in (ids, changed)
        )
    assert not torch.allclose(before[7:], after[7:])
    assert torch.equal(alone[7:], still[7:])


def test_the_mask_of_a_small_example() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1]]))
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    "name",
    [
        *("learned", "windows"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("rotary", "rotary, grouped heads, qk norm")
        ),
    ],
)
def test_a_compiled_model_is_one_graph_with_and_without_documents(name: str) -> None:
    # The limit on recompilations counts what earlier tests compiled.
    torch.compiler.reset()
    model = make({**VARIANTS[name], "layers": 1}).eval()
    ids, positions, documents = packed()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.allclose(compiled(ids), model(ids), atol=1e-5)
        options = {"positions_BT": positions, "documents_BT": documents}
        assert torch.allclose(compiled(ids, **options), model(ids, **options), atol=1e-5)


PACKED = [[384], [1, 383], [128, 128, 128], [100, 30, 4, 250], [383, 1], [127, 2, 127, 128]]
"""Documents of samples of three blocks: borders on a block's edge, beside it, several inside."""


def test_blocks_say_what_the_dense_mask_says() -> None:
    documents = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in PACKED]
    )
    blocks = document_blocks(documents)
    dense = document_mask(documents)[:, 0]
    tiles = dense.unflatten(2, (3, DOCUMENT_BLOCK)).unflatten(1, (3, DOCUMENT_BLOCK))
    some, every = tiles.any(4).any(2), tiles.all(4).all(2)
    for sample in range(len(PACKED)):
        for query in range(3):
            whole_count = int(blocks.full_kv_num_blocks[sample, 0, query])
            whole = blocks.full_kv_indices[sample, 0, query, :whole_count].tolist()
            part_count = int(blocks.kv_num_blocks[sample, 0, query])
            parts = blocks.kv_indices[sample, 0, query, :part_count].tolist()
            assert sorted(whole) == every[sample, query].nonzero().flatten().tolist()
            assert sorted(whole + parts) == some[sample, query].nonzero().flatten().tolist()


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_attention_in_blocks_computes_the_same(settings: dict[str, Any]) -> None:
    """With torch's own plain version of it, which has no gradients on a CPU: those are tested on a
    GPU."""
    documents = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in PACKED[:4]]
    )
    ids = torch.randint(0, 50, (4, 384), generator=torch.Generator().manual_seed(1))
    logits = []
    for blocks in (False, True):
        model = make({**settings, "context": 384}).eval()
        model.kernels = Kernels(document_blocks=blocks)
        with torch.inference_mode():
            logits.append(model(ids, documents_BT=documents))
    assert torch.allclose(*logits, atol=1e-4)
