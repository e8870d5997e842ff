"""Decoding kernels against the model's own forward pass, and rows in any company; in Triton's
interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gristmill.config.model import GPTConfig
from gristmill.models.build import build_model
from gristmill.models.decoding import AttentionShape, Norm
from gristmill.models.gpt import GPT
from gristmill.models.kernel_decoding import KernelDecoder
from gristmill.models.kernels import decoding as kernels
from gristmill.models.kernels.decoding_attention import attend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
# The interpreter takes a tenth of a second for a layer.
VOCAB, CAPACITY, SLOTS = 50, 24 if ON_GPU else 9, 3
SMALL: dict[str, Any] = {"layers": 2, "heads": 4, "width": 32, "context": CAPACITY}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "no bias, erf gelu": {"bias": False, "activation": "gelu", "tie_head": False},
    "as llama": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "kv_heads": 2,
        "bias": False,
        "qkv_bias": True,
        "head_width": 12,
    },
    "as GPT-NeoX": {
        "positions": "rotary",
        "rotary_fraction": 0.5,
        "parallel_residual": True,
        "activation": "relu",
    },
    "windows": {"window": 5, "positions": "rotary", "kv_heads": 1, "layers": 3},
    "as modern-mini": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "norm_gain": False,
        "qk_norm": True,
        "activation": "relu2",
        "bias": False,
        "tie_head": False,
        "embedding_norm": True,
        "value_embeddings": 1,
        "attention_gate": True,
        "attention_scale": 0.2,
        "logit_cap": 20.0,
    },
    "qk norm with gains": {"positions": "rotary", "norm": "rmsnorm", "qk_norm": True},
}


def make_model(settings: dict[str, Any]) -> GPT:
    model = build_model(GPTConfig(**{**SMALL, **settings}), vocab=VOCAB, device=DEVICE)
    model.initialise(3)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():  # gains, biases and gates that do something
        for parameter in model.parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=draw)
            parameter += noise.to(DEVICE)
    return model.eval()


def make_decoder(model: GPT, dtype: torch.dtype = torch.float32) -> KernelDecoder:
    memory = model.slot_memory(SLOTS + 1, CAPACITY, dtype=dtype)
    return KernelDecoder(model, memory, capacity=CAPACITY, dtype=dtype)


def rows(ids: list[int], slot: int, start: int = 0) -> tuple[torch.Tensor, ...]:
    """Tokens, slots and places of a part of a prompt."""
    places = list(range(start, start + len(ids)))
    numbers = ids, [slot] * len(ids), places
    return tuple(torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in numbers)


def random_ids(count: int, seed: int = 0) -> list[int]:
    drawn = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
    return list(map(int, drawn))


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=list(VARIANTS))
@torch.inference_mode()
def test_logits_are_those_of_the_model(settings: dict[str, Any]) -> None:
    model, ids = make_model(settings), random_ids(CAPACITY)
    expected_TV = model(torch.tensor([ids], device=DEVICE))[0]
    decoder = make_decoder(model)
    # Two parts of a prompt, and then one token after the other.
    got = [
        decoder.logits(decoder.hidden(*rows(ids[:3], 1), together=True)),
        decoder.logits(decoder.hidden(*rows(ids[3:-2], 1, start=3), together=True)),
    ]
    got += [decoder.decode([1], [ids[at]], [at]) for at in (CAPACITY - 2, CAPACITY - 1)]
    got_TV = torch.cat(got)[:, :VOCAB]
    assert torch.allclose(got_TV, expected_TV, atol=1e-4, rtol=1e-4)


COMPANY = [
    (name, dtype)
    for name in ("gpt2", "as llama", "windows", "as modern-mini")
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(
    ("name", "dtype"), COMPANY if ON_GPU else [COMPANY[0], COMPANY[-2]], ids=str
)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(name: str, dtype: torch.dtype) -> None:
    """As a part of a prompt, however it is cut, and generated, alone or among others."""
    model, last = make_model(VARIANTS[name]), CAPACITY - 2
    ids, other = random_ids(last + 1), random_ids(last + 1, seed=5)

    def alone() -> tuple[torch.Tensor, KernelDecoder]:
        decoder = make_decoder(model, dtype)
        decoder.hidden(*rows(ids[:last], 0), together=True)
        return decoder.decode([0], [ids[last]], [last]), decoder

    def cut() -> tuple[torch.Tensor, KernelDecoder]:
        decoder = make_decoder(model, dtype)
        parts = zip(rows(ids[: last - 3], 0), rows(other[:3], 2), strict=True)
        decoder.hidden(*(torch.cat(pair) for pair in parts), together=True)
        for step in range(3):
            at = last - 3 + step
            decoder.decode([2, 0], [other[at], ids[at]], [3 + step, at])
        return decoder.decode([1, 2, 0], [3, 4, ids[last]], [0, 6, last])[2:], decoder

    logits_1V, decoder = alone()
    again_1V, second = cut()
    assert torch.equal(logits_1V, again_1V)
    for ours, theirs in (
        (decoder.memory.keys_LSGCK, second.memory.keys_LSGCK),
        (decoder.memory.values_LSGCK, second.memory.values_LSGCK),
    ):
        assert torch.equal(ours[:, 0, :, : last + 1], theirs[:, 0, :, : last + 1])


@pytest.mark.parametrize("activation", list(kernels.ACTIVATIONS), ids=str)
def test_a_product_has_the_same_bits_among_any_number_of_rows(activation: str | None) -> None:
    draw = torch.Generator().manual_seed(0)
    x_RK = torch.randn(70, 40, generator=draw).to(DEVICE)
    weight_NK, bias_N = torch.randn(96, 40, generator=draw).to(DEVICE), torch.ones(96).to(DEVICE)
    whole_RN = kernels.linear(x_RK, weight_NK, bias_N, activation=activation)
    exact_RN = torch.nn.functional.linear(x_RK.double(), weight_NK.double(), bias_N.double())
    if activation == "swiglu":
        gate, up = exact_RN.chunk(2, dim=1)
        exact_RN = torch.nn.functional.silu(gate) * up
    elif activation == "relu2":
        exact_RN = exact_RN.relu().square()
    elif activation is not None:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        gelu = torch.nn.functional.gelu(exact_RN, approximate=approximate)
        exact_RN = exact_RN.relu() if activation == "relu" else gelu
    assert torch.allclose(whole_RN.double(), exact_RN, atol=1e-4, rtol=1e-4)
    for count in (1, 3, 16, 17, 33):
        some_RN = kernels.linear(x_RK[:count], weight_NK, bias_N, activation=activation)
        assert torch.equal(some_RN, whole_RN[:count])


# Triton's interpreter multiplies no bf16.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16][: 1 + ON_GPU], ids=str)
@pytest.mark.parametrize("activation", [None, "swiglu"], ids=str)
def test_many_rows_have_the_same_bits_as_few(activation: str | None, dtype: torch.dtype) -> None:
    """Tensor cores have other instructions for many rows."""
    draw = torch.Generator().manual_seed(0)
    rows, inputs, outputs = (1100, 2304, 4096) if ON_GPU else (70, 70, 36)
    x_RK = torch.randn(rows, inputs, generator=draw).to(DEVICE, dtype)
    weight_NK = torch.randn(outputs, inputs, generator=draw).to(DEVICE, dtype)
    bias_N = torch.randn(outputs, generator=draw).to(DEVICE, dtype)
    whole_RN = kernels.linear(x_RK, weight_NK, bias_N, activation=activation)
    whole = kernels.product(x_RK, weight_NK, None)
    exact_RN = x_RK.double() @ weight_NK.double().T
    assert torch.allclose(whole.parts_PRN.sum(0).double(), exact_RN, atol=1e-3, rtol=1e-3)
    for count in (1, 20, 33, 65):
        some_RN = kernels.linear(x_RK[:count], weight_NK, bias_N, activation=activation)
        assert torch.equal(some_RN, whole_RN[:count])
        some = kernels.product(x_RK[:count], weight_NK, None)
        assert torch.equal(some.parts_PRN, whole.parts_PRN[:, :count])


def test_what_is_added_to_the_residual_stream() -> None:
    draw = torch.Generator().manual_seed(0)
    x_RD = torch.randn(5, 48, generator=draw).to(DEVICE)
    products, exact_RD = [], x_RD.double()
    for _ in range(2):
        y_RK = torch.randn(5, 32, generator=draw).to(DEVICE)
        weight_DK = torch.randn(48, 32, generator=draw).to(DEVICE)
        bias_D = torch.randn(48, generator=draw).to(DEVICE)
        products.append(kernels.product(y_RK, weight_DK, bias_D))
        exact_RD = exact_RD + y_RK.double() @ weight_DK.double().T + bias_D.double()
    gain_D, shift_D = (torch.randn(48, generator=draw).to(DEVICE) for _ in range(2))
    stream_RD, out_RD = kernels.normalised(x_RD, Norm(True, 1e-5, gain_D, shift_D), products)
    expected_RD = torch.nn.functional.layer_norm(
        exact_RD, (48,), gain_D.double(), shift_D.double(), 1e-5
    )
    assert torch.allclose(stream_RD.double(), exact_RD, atol=1e-4)
    assert torch.allclose(out_RD.double(), expected_RD, atol=1e-4)


@pytest.mark.parametrize("window", [None, 150])
def test_attention_over_several_spans(window: int | None) -> None:
    """Long sequences are cut into spans that are read by a program each."""
    heads, groups, width, capacity, span = 4, 2, 16, 600, 128
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE)

    keys, values = random(3, groups, capacity, width), random(3, groups, capacity, width)
    qkv = random(3, (heads + 2 * groups) * width)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([599, 0, 300], dtype=torch.int32, device=DEVICE)
    shape = AttentionShape(0, heads, 0.25, window, None)
    arrived = torch.zeros(3 * groups, dtype=torch.int32, device=DEVICE)
    got = attend(qkv, keys, values, slots, places, shape, span=span, arrived=arrived)
    assert not arrived.any()
    for row, (slot, place) in enumerate(zip(slots.tolist(), places.tolist(), strict=True)):
        query = qkv[row, : heads * width].view(heads, 1, width).double()
        first = 0 if window is None else max(0, place + 1 - window)
        seen = slice(first, place + 1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[None],
            keys[slot, :, seen].double()[None],
            values[slot, :, seen].double()[None],
            scale=0.25,
            enable_gqa=True,
        )
        assert torch.allclose(got[row].double(), expected.flatten(), atol=1e-5)


def test_kernels_compile_for_a_gpu() -> None:
    program = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ended = subprocess.run(
        [sys.executable, program, "90"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    kernels = "_append _attend _cast _draw _embed _linear _linear_of_many _norm _survey"
    assert ended.stdout.split() == kernels.split()
