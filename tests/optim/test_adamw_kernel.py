"""The kernel of AdamW against torch in double precision; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.optim.adamw import adamw

pytest.importorskip("triton")

from gristmill.optim import adamw_kernel as module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(3, 700), (1024,), (1,), (2, 1024)]
SETTINGS = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}


def tensors(seed: int, *, spread: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [spread * torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]


def state() -> tuple[list[torch.Tensor], ...]:
    steps = [torch.tensor(float(at), device=DEVICE) for at in (0, 0, 7, 1000)]
    squares = [one.square() for one in tensors(2, spread=0.1)]
    return tensors(0), tensors(1, spread=0.1), squares, steps


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
def test_steps_are_those_of_torch(betas: tuple[float, float]) -> None:
    ours = state()
    theirs = [[one.cpu().double() for one in kind] for kind in state()]
    for step in range(3):
        gradients = tensors(10 + step, spread=4.0)
        module.adamw_(
            *(ours[0], gradients, *ours[1:]),
            **SETTINGS,
            betas=betas,
            divisor=scalar(4.0),
            skip=scalar(0.0),
        )
        assert torch.equal(gradients[0], tensors(10 + step, spread=4.0)[0])  # not written back
        divided = [one.cpu().double() / 4.0 for one in gradients]
        adamw(
            *(theirs[0], divided, *theirs[1:3], [], theirs[3]),
            **SETTINGS,
            beta1=betas[0],
            beta2=betas[1],
            foreach=False,
            amsgrad=False,
            maximize=False,
        )
    for mine, other in zip(ours, theirs, strict=True):
        for got, expected in zip(mine, other, strict=True):
            torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-6, atol=1e-7)


def test_a_skipped_step_changes_nothing() -> None:
    ours, before = state(), state()
    module.adamw_(
        *(ours[0], [torch.full_like(one, torch.nan) for one in ours[0]], *ours[1:]),
        **SETTINGS,
        betas=(0.9, 0.95),
        divisor=scalar(1.0),
        skip=scalar(1.0),
    )
    for mine, other in zip(ours, before, strict=True):
        assert all(torch.equal(got, old) for got, old in zip(mine, other, strict=True))


def test_only_for_aligned_fp32_tensors_on_a_gpu() -> None:
    one = torch.zeros(64, device=DEVICE)
    assert module.can_update([one]) is (DEVICE == "cuda")
    assert not module.can_update([one, one[1:]])
    assert not module.can_update([one.bfloat16()])
    assert not module.can_update([one.view(8, 8).T])
