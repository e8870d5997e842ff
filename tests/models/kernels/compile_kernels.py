"""Compiles kernels for a GPU that is not there: python compile_kernels.py 90

Triton's interpreter accepts much that its compiler refuses, such as a name with two shapes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gristmill.config.model import GPTConfig
from gristmill.generate import kernels as drawing
from gristmill.models import fp8
from gristmill.models.build import build_model
from gristmill.models.kernel_decoding import KernelDecoder
from gristmill.models.kernels import decoding, decoding_attention
from gristmill.models.kernels.fp8 import cast as cast_kernel

CAPABILITY = int(sys.argv[1])


class Driver:
    """Says what GPU there is."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    compiled.append(kernel.__name__)
    return launch(kernel, *values, grid=grid, warmup=True, **options)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def draw(vocab: int) -> None:
    int32, rows, slots = torch.int32, 2, 3
    drawing.draw_rows(
        zeros(rows, vocab),
        zeros(slots, drawing.SETTINGS),
        seen_SV=zeros(slots, vocab, dtype=int32),
        bias_SV=zeros(slots, vocab),
        uniform_SU=zeros(slots, 16),
        slots_R=zeros(rows, dtype=int32),
        tokens_S=zeros(slots, dtype=int32),
        lengths_S=zeros(slots, dtype=int32),
        drawn_S=zeros(slots, dtype=int32),
        ids_SB=zeros(slots, 8, dtype=int32),
        capacity=8,
    )


@torch.inference_mode()
def decode(dtype: torch.dtype, **settings: Any) -> None:
    config = GPTConfig(**{"layers": 1, "heads": 4, "width": 64, "context": 2048, **settings})
    model = build_model(config, vocab=300, device=torch.device("cpu"), dtype=dtype)
    memory = model.slot_memory(3, 1500, dtype=dtype)  # two spans
    decoder = KernelDecoder(model, memory, capacity=1500, dtype=dtype)
    rows = zeros(3, 2, dtype=torch.int32)
    for many in (rows, zeros(3, 40, dtype=torch.int32), zeros(3, 80, dtype=torch.int32)):
        decoder.hidden(*many, together=True)
    decoder.logits(decoder.hidden(*rows))
    decoder.next_logits(rows[0])


def cast() -> None:
    x, scales, amax = zeros(256, 128, dtype=torch.bfloat16), zeros(3, fp8.ALIGNED), zeros(3)
    for operand, h, activation, written in (
        (fp8.X, None, "gelu", fp8.BOTH),
        (fp8.WEIGHT, None, "", fp8.TRANSPOSED),
        (fp8.GRADIENT, x, "gelu_tanh", fp8.BOTH),
        (fp8.GRADIENT, x, "relu2", fp8.BOTH),
    ):
        found = fp8.results(x, operand, written, groups=4)
        options = {"activation": activation, "rows": fp8.CAST_ROWS}
        cast_kernel(x, h, scales, amax, operand, found, **options)


compiled = list[str]()
launch, JITFunction.run = JITFunction.run, compile_only
driver.set_active(Driver())
start = {"EARLY": True, "launch_pdl": True} if CAPABILITY >= 90 else {"EARLY": False}
decoding.launched = decoding_attention.launched = drawing.launched = lambda device: start
for size in (300, 50304):
    draw(size)
if CAPABILITY >= 89:
    cast()
decode(torch.bfloat16)
decode(torch.float32, head_width=8)
decode(
    torch.float16,
    kv_heads=2,
    positions="rotary",
    qk_norm=True,
    norm="rmsnorm",
    activation="swiglu",
    window=64,
    embedding_norm=True,
)
print(*sorted(set(compiled)))
