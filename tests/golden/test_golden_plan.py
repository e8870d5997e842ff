"""The eight sizes of arXiv 2104.04473, planned where and as they were trained there.

A change to the formula or to the table of devices shows here, size by size and part by part.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gristmill.config.load import load_text
from gristmill.config.parallel import Mesh
from gristmill.plan.hardware import open_hardware
from gristmill.plan.step import PARTS
from gristmill.plan.timing import plan_step

SIZES = {
    # GPUs, batch, tp, pp, and the seconds of a step that its table amounts to.
    "1.7": (32, 512, 1, 1, 3.53),
    "3.6": (64, 512, 2, 1, 3.70),
    "7.5": (128, 512, 4, 1, 3.70),
    "18.4": (256, 1024, 8, 1, 9.40),
    "39.1": (512, 1536, 8, 2, 14.45),
    "76.1": (1024, 1792, 8, 4, 16.06),
    "145.6": (1536, 2304, 8, 8, 24.82),
    "310": (1920, 2160, 8, 16, 37.61),
}


def planned(billions: str) -> str:
    gpus, batch, tp, pp, published = SIZES[billions]
    text = f"""
name = "x"
preset = "gpt3-{billions}b"
data.paths = "tokens"
train = {{ until = "300B tokens", batch = {batch} }}
precision.compute = "bf16"
"""
    config = load_text(text, place="run.toml")
    mesh = Mesh(pp=pp, dp_replicate=gpus // (tp * pp), tp=tp)
    micro = 4 if pp == 1 else 1
    step = plan_step(
        config,
        mesh,
        open_hardware("a100-80gb"),
        vocab=50257,
        micro_batch=micro,
        recompute="full",
    )
    parts = "  ".join(
        f"{part} {step.parts[part] / step.seconds:.1%}" for part in PARTS if step.parts[part] > 0
    )
    # Megatron-LM of 2021 kept the scores of attention and sent gradients after the backward pass.
    assert 0.55 * published < step.seconds < published
    return (
        f"{billions}B on {gpus} x a100-80gb, {mesh}, micro-batch {micro}, full recomputation\n"
        f"  {step.seconds:.2f} s a step, MFU {step.mfu:.1%}; published {published} s\n  {parts}\n"
    )


@pytest.mark.parametrize("billions", SIZES)
def test_a_size_is_faster_here_than_in_2021(billions: str) -> None:
    assert planned(billions)


def test_the_eight_sizes(golden: Callable[[str, str], None]) -> None:
    golden("plan/sizes.txt", "\n".join(map(planned, SIZES)))
