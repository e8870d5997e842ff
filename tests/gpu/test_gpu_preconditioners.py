"""Preconditioners on a CUDA device: compiled, in half precision, with kernels, resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill.base.units import Progress
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.tensorfile import open_tensors
from gristmill.config.schema import RunConfig
from gristmill.data.loader import make_batch
from gristmill.distributed.world import open_world
from gristmill.models.build import build_model
from gristmill.track.metrics import read_metrics
from gristmill.track.records import StepRecord
from gristmill.train.build import build_strategy
from gristmill.train.run import Run
from gristmill.train.stop import StopRequest

MakeRun = Callable[..., RunConfig]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Wide enough for the fused MLP, whose tiles are of 64 features and 256 inner ones.
MODEL = ("model.width=64", "model.context=64", "optim.lr=1e-3", 'model.activation="relu2"')
KFAC = (
    'optim.preconditioner.type="kfac"',
    "optim.preconditioner.factor_every=2",
    "optim.preconditioner.inverse_every=4",
    "optim.preconditioner.damping=0.1",
)
SOAP = ('optim.preconditioner.type="soap"', "optim.preconditioner.basis_every=2")
KINDS = {
    "kfac": (*KFAC, "optim.eps=1e-4"),
    "kfac, eigen": (*KFAC, 'optim.preconditioner.method="eigen"', "optim.eps=1e-4"),
    "kfac, muon": (
        *KFAC,
        'optim.type="muon"',
        "optim.lr=0.01",
        'optim.preconditioner.sides="input"',
    ),
    "soap": (*SOAP, "optim.eps=1e-4"),
    "soap, muon": (*SOAP, 'optim.type="muon"', "optim.lr=0.01"),
}


def losses(config: RunConfig, steps: int = 8) -> list[float]:
    world = open_world(config.runtime, tf32=False)
    strategy = build_strategy(config, vocab=257, world=world)
    start = build_model(config.model, vocab=257, device=torch.device("cpu"))
    start.initialise(1)  # the same on every device
    with torch.no_grad():
        for name, parameter in strategy.parameters.items():
            parameter.local.copy_(start.get_parameter(name))
    strategy.weights_changed()
    ids = np.random.default_rng(0).integers(0, 257, (2, 4, 65))
    batches = [make_batch(one) for one in ids]
    return [
        strategy.update(strategy.accumulate(batches, Progress(n))).loss.item() for n in range(steps)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_of_computing_agree(make_run: MakeRun, kind: str) -> None:
    words = (*MODEL, *KINDS[kind])
    reference = losses(make_run(*words, 'runtime.device="cpu"', "runtime.compile=false"))
    assert reference[-1] < reference[0]
    cuda = (*words, 'precision.compute="fp32"', 'runtime.device="cuda"')
    for extra, tolerance in (
        (("runtime.compile=false",), 1e-3),
        (("runtime.compile=true",), 1e-3),
        (('runtime.compile="blocks"', 'precision.compute="bf16"', 'train.recompute="full"'), 0.03),
        (("runtime.compile=true", 'precision.compute="bf16"'), 0.03),
    ):
        assert losses(make_run(*cuda, *extra)) == pytest.approx(reference, rel=tolerance), extra


@pytest.mark.parametrize("kind", ["kfac", "soap, muon"])
def test_stopped_and_resumed_equals_uninterrupted(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    words = (
        *MODEL,
        *KINDS[kind],
        'runtime.device="cuda"',
        "runtime.deterministic=true",
        "runtime.compile=false",
        'precision.compute="fp16"',
        "precision.loss_scale.initial=65536.0",
    )
    Run(make_run(*words, folder="whole")).train()
    real, seen = StopRequest.check_time, 0

    def check(self: StopRequest, *, reserve: float) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            self.reason = "the test"
        real(self, reserve=reserve)

    monkeypatch.setattr(StopRequest, "check_time", check)
    assert Run(make_run(*words, folder="parted")).train().step < 12
    assert Run(make_run(*words, folder="parted")).train().step == 12
    found = []
    for name in ("whole", "parted"):
        steps = [
            one
            for one in read_metrics(tmp_path / name / "metrics.jsonl")
            if isinstance(one, StepRecord)
        ]
        newest = CheckpointFolder(tmp_path / name / "checkpoints").newest_intact().path
        assert newest is not None
        stored = [open_tensors(newest, kind) for kind in ("model", "optimizer")]
        bits = [one.read_exact(tensor) for one in stored for tensor in sorted(one.shapes)]
        found.append(([(one.step, one.loss, one.grad_norm) for one in steps], bits))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))
