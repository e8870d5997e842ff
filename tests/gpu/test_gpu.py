"""What only a CUDA device can show: compilation, half precision, exact resume, memory."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gristmill.base.units import Progress
from gristmill.config.load import dump_run
from gristmill.config.parallel import Mesh
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.data.loader import JOINED, Batch, DocumentRules, make_batch
from gristmill.distributed.world import Groups, open_world
from gristmill.generate.engine import Engine
from gristmill.generate.sampling import Sampling
from gristmill.models import gpt
from gristmill.models.build import build_model
from gristmill.models.loss import linear_cross_entropy
from gristmill.models.loss_terms import LossTerms
from gristmill.models.products import worth_fusing_qkv
from gristmill.optim.build import build_optimizer
from gristmill.strategies.compiling import CompileAhead, CompileTask, parts_of
from gristmill.train.build import build_strategy
from gristmill.train.replay import replay_step
from gristmill.train.run import Run
from gristmill.train.stop import StopRequest

MakeRun = Callable[..., RunConfig]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU = (
    'runtime.device="cuda"',
    'precision.compute="fp32"',
    "model.width=64",
    "model.context=64",
    "optim.lr=3e-3",
)


def losses(
    config: RunConfig,
    steps: int = 12,
    *,
    length: int = 65,
    rules: DocumentRules = JOINED,
    micro_batches: int = 2,
) -> list[float]:
    world = open_world(config.runtime, tf32=False)
    numbers = resolve(config, vocab=257) if config.runtime.cuda_graphs else None
    strategy = build_strategy(config, vocab=257, world=world, resolved=numbers)
    start = build_model(config.model, vocab=257, device=torch.device("cpu"))
    start.initialise(1)  # the same on every device
    with torch.no_grad():
        for name, parameter in strategy.parameters.items():
            parameter.local.copy_(start.get_parameter(name))
    strategy.weights_changed()
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 257, (4, length)) for _ in range(micro_batches)]
    batches = [make_batch(one, rules=rules) for one in ids]
    return [
        strategy.update(strategy.accumulate(batches, Progress(steps=n))).loss.item()
        for n in range(steps)
    ]


def test_all_ways_of_computing_agree(make_run: MakeRun) -> None:
    reference = losses(make_run(*ON_GPU[1:], 'runtime.device="cpu"', "runtime.compile=false"))
    for extra, tolerance in (
        (("runtime.compile=false",), 1e-4),
        (("runtime.compile=true",), 1e-4),
        (("runtime.compile=true", 'precision.compute="bf16"'), 0.03),
        (("runtime.compile=true", 'precision.compute="bf16"', "runtime.kernels=false"), 0.03),
        (('runtime.compile="blocks"', 'precision.compute="bf16"'), 0.03),
        (("runtime.compile=true", 'train.recompute="full"'), 1e-4),
        (("runtime.compile=true", 'train.recompute="selective"'), 1e-4),
        (('runtime.compile="blocks"', 'train.recompute="full"', "train.recompute_every=2"), 1e-4),
    ):
        ours = losses(make_run(*ON_GPU, *extra))
        assert ours == pytest.approx(reference, rel=tolerance), extra


@pytest.mark.parametrize("compile_", ["false", "true", '"blocks"'])
def test_products_of_kernels_compute_the_same(make_run: MakeRun, compile_: str) -> None:
    """At a width that all of them support."""
    settings = (*ON_GPU, "model.width=256", "optim.lr=1e-3", f"runtime.compile={compile_}")
    settings = (*settings, 'precision.compute="bf16"')
    plain = losses(make_run(*settings, "runtime.kernels=false"))
    assert worth_fusing_qkv(torch.empty(4, 64, 256, dtype=torch.bfloat16), outputs=3 * 256)
    assert losses(make_run(*settings)) == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("compile_", ["true", '"blocks"'])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_recorded_launches_compute_the_same(
    make_run: MakeRun, compile_: str, optimizer: str
) -> None:
    settings = (f"runtime.compile={compile_}", f"optim.type={optimizer}", "train.accumulate=1")
    plain = losses(make_run(*ON_GPU, *settings), micro_batches=1)
    graphs = make_run(*ON_GPU, *settings, "runtime.cuda_graphs=true")
    assert losses(graphs, micro_batches=1) == pytest.approx(plain, rel=1e-4)


PACKED = DocumentRules(
    doc_starts="ids", attention=True, positions=True, unweighted=True, end_of_text=3
)


@pytest.mark.parametrize("compile_", ["true", '"blocks"'])
def test_packed_documents_in_blocks_compute_what_a_dense_mask_does(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, compile_: str
) -> None:
    """About one document for every 256 tokens; attention in blocks is used when compiled."""
    settings = (*ON_GPU, "model.context=512", "model.heads=4", 'data.documents="masked"')
    options = {"length": 513, "rules": PACKED}
    dense = losses(make_run(*settings, "runtime.compile=false"), **options)
    used = []
    real = gpt.document_blocks

    def noted(documents: torch.Tensor) -> Any:
        used.append(documents.shape)
        return real(documents)

    monkeypatch.setattr(gpt, "document_blocks", noted)
    blocks = losses(make_run(*settings, f"runtime.compile={compile_}"), **options)
    assert blocks == pytest.approx(dense, rel=1e-3)
    assert used


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a device with fp8",
)
@pytest.mark.parametrize("cap", ["", "model.logit_cap=15.0"])
def test_a_head_in_fp8_agrees_with_bf16(make_run: MakeRun, cap: str) -> None:
    settings = (*ON_GPU, 'precision.compute="bf16"', *([cap] if cap else []))
    reference = losses(make_run(*settings, "runtime.compile=true"))
    results = []
    for extra in ("runtime.compile=false", "runtime.compile=true"):
        ours = losses(make_run(*settings, extra, 'precision.fp8=["head"]'))
        assert ours == pytest.approx(reference, rel=0.02), extra
        assert ours != reference
        results.append(ours)
    assert results[0] == pytest.approx(results[1], rel=0.02)


FIRST_STEP = """
import sys, numpy, torch
from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.data.loader import JOINED
from gristmill.data.loader import make_batch
from gristmill.train.build import build_strategy
from gristmill.distributed.world import open_world

config = load_text(sys.stdin.read(), place="run.toml")
world = open_world(config.runtime, tf32=config.precision.tf32)
strategy = build_strategy(config, vocab=257, world=world)
batch = make_batch(numpy.zeros((4, 65), dtype=numpy.int64), rules=JOINED)
strategy.update(strategy.accumulate([batch], Progress()))
found = counters["aot_autograd"]
print(found["autograd_cache_hit"], found["autograd_cache_miss"])
"""


def test_a_run_finds_what_was_compiled_ahead(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    settings = ('optim.type="muon"', 'runtime.compile="blocks"', 'precision.compute="bf16"')
    config = make_run(*ON_GPU, *settings)
    parts = parts_of(config, vocab=257)
    tasks = [CompileTask(config, 257, 4, 64, False, part) for part in parts]
    CompileAhead(tasks, done=tmp_path / "done").wait()
    assert (tmp_path / "done").exists(), "a process failed"
    command = [sys.executable, "-c", FIRST_STEP]  # as pytest has it, the cache's keys differ
    found = subprocess.run(
        command, input=dump_run(config), capture_output=True, text=True, check=True
    )
    hits, misses = map(int, found.stdout.split())
    assert hits >= len(parts) - 1 and misses == 0


def test_muon_compiled_and_not(make_run: MakeRun) -> None:
    settings = (*ON_GPU[:-1], 'optim.type="muon"', 'precision.compute="bf16"')
    plain = losses(make_run(*settings, "runtime.compile=false"))
    compiled = losses(make_run(*settings, "runtime.compile=true"))
    assert compiled == pytest.approx(plain, rel=0.03)
    assert plain[-1] < plain[0] - 0.5


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_soap_waits_for_the_device_in_its_first_step_only(make_run: MakeRun, kind: str) -> None:
    config = make_run(f"optim.type={kind}", 'optim.preconditioner.type="soap"')
    model = build_model(config.model, vocab=257, device=torch.device("cuda"))
    model.initialise(1)
    named = dict(model.named_parameters())
    optimizer = build_optimizer(config.optim, model, parameters=named)
    divisor = torch.tensor(4.0, device="cuda")
    for step in range(6):
        for parameter in named.values():
            parameter.grad = torch.randn_like(parameter)
        skip = torch.tensor(float(step == 3), device="cuda")
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        optimizer.step(divisor=divisor, skip=skip)
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(one.value).all() for one in optimizer.entries())


@pytest.mark.parametrize(
    "settings",
    [
        ["optim.type=adamw"],
        ["optim.type=accum-adamw", "optim.accum=3"],
        ["optim.type=accum-adam", "optim.accum=3"],
    ],
)
def test_steps_never_wait_for_the_device(make_run: MakeRun, settings: list[str]) -> None:
    """And move weights as they do on the CPU, over skipped steps too."""
    config, ends = make_run(*settings), []
    start = build_model(config.model, vocab=257, device=torch.device("cpu"))
    start.initialise(1)  # the same on every device
    for device in map(torch.device, ("cpu", "cuda")):
        model = build_model(config.model, vocab=257, device=device)
        model.load_state_dict(start.state_dict())
        named = dict(model.named_parameters())
        optimizer = build_optimizer(config.optim, model, parameters=named, kernel=True)
        generator, divisor = torch.Generator().manual_seed(2), torch.tensor(4.0, device=device)
        for step in range(8):
            for parameter in named.values():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.grad = drawn.to(device)
            skip = torch.tensor(float(step in (1, 5)), device=device)
            torch.cuda.set_sync_debug_mode("error")
            optimizer.step(divisor=divisor, skip=skip)
            torch.cuda.set_sync_debug_mode("default")
        state = {f"{one.kind}/{one.key}": one.value.cpu() for one in optimizer.entries()}
        ends.append(state | {name: one.detach().cpu() for name, one in named.items()})
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


def test_validation_never_waits_between_batches(make_run: MakeRun) -> None:
    config = make_run(*ON_GPU, 'precision.compute="bf16"')
    world = open_world(config.runtime, tf32=False)
    strategy = build_strategy(config, vocab=257, world=world)
    rng = np.random.default_rng(0)

    def batches(mode: str) -> Iterator[Batch]:
        torch.cuda.set_sync_debug_mode(mode)
        for _ in range(3):
            yield make_batch(rng.integers(0, 257, (4, 65)), pin=True)
        torch.cuda.set_sync_debug_mode("default")

    strategy.evaluate(batches("default"))  # compiles kernels
    assert strategy.evaluate(batches("error")) > 0


def test_fp16_skips_until_the_scale_fits(make_run: MakeRun) -> None:
    config = make_run(*ON_GPU, 'precision.compute="fp16"', "precision.loss_scale.hysteresis=1")
    result = losses(config, steps=40)
    assert result[0] == result[1]  # nothing is changed by an overflow
    assert result[-1] < result[0] - 0.5


def test_resume_is_exact_with_deterministic_kernels(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*ON_GPU, "runtime.deterministic=true", 'precision.compute="bf16"')
    settings = (*settings, "model.dropout=0.1", "runtime.compile=true")
    Run(make_run(*settings, folder="whole")).train()
    counter = itertools.count(1)

    def stop_at_five(self: StopRequest, *, reserve: float) -> None:
        if next(counter) == 5:
            self.reason = "a test"

    monkeypatch.setattr(StopRequest, "check_time", stop_at_five)
    assert Run(make_run(*settings, folder="parted")).train().step == 5
    Run(make_run(*settings, folder="parted")).train()
    torch.use_deterministic_algorithms(False)

    def numbers(folder: str) -> list[tuple[int, float]]:
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [(r["step"], r["loss"]) for r in records if r["kind"] in ("step", "validation")]

    assert numbers("parted") == numbers("whole")


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_the_guard_decides_alike_although_results_are_read_late(
    make_run: MakeRun,
    poisoned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
) -> None:
    settings = (
        'runtime.device="cuda"',
        "runtime.deterministic=true",
        f'data.paths="{poisoned}"',
        'data.split="100,0"',
        'data.order="sequential"',
        'train.until="90 steps"',
        'checkpoint.every="10 steps"',
        'schedule.type="constant"',
        f'train.guard.action="{action}"',
        "train.guard.window=20",
    )
    assert Run(make_run(*settings, folder="whole")).train().step == 90
    counter = itertools.count(1)

    def stop_often(self: StopRequest, *, reserve: float) -> None:
        if next(counter) % 21 == 0:
            self.reason = "a test"

    monkeypatch.setattr(StopRequest, "check_time", stop_often)
    parted = make_run(*settings, folder="parted")
    while Run(parted).train().step < 90:
        pass
    found = replay_step(parted, 85, progress=lambda *done: None)
    torch.use_deterministic_algorithms(False)

    def numbers(folder: str) -> list[tuple[int, float]]:
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [(r["step"], r["loss"]) for r in records if r["kind"] == "step"]

    assert numbers("parted") == numbers("whole")
    state = json.loads((tmp_path / "whole/checkpoints/step-00000090/state.json").read_text())
    ranges = state["health"]["passed_over"]
    assert ranges == ([[160, 164], [240, 256]] if action == "skip" else [[236, 260]])
    assert found.repeats and found.departs_at is None and found.differences == []


def test_records_come_in_order_and_complete(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run(*ON_GPU, 'train.until="60 steps"', 'validate.every="25 steps"')).train()
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 61))
    assert all(0 < record["step_seconds"] < 60 for record in steps)
    assert all(record["memory_bytes"] > 0 for record in steps)


def test_cached_decoding_on_the_gpu(make_run: MakeRun) -> None:
    config = make_run(*ON_GPU, "model.init_std=0.3", "model.tie_head=false")
    model = build_model(config.model, vocab=257, device=torch.device("cuda"))
    model.initialise(0)
    greedy = Sampling(temperature=0)
    results = [
        Engine(model, cached=cached).generate([[1]], tokens=90, sampling=greedy)[0]
        for cached in (True, False)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(("kernel", "share"), [(True, 0.2), (False, 0.4)])
def test_the_loss_needs_far_less_memory_than_its_logits(kernel: bool, share: float) -> None:
    """13 GiB of logits in fp32; slices of 2 GiB, twice that where they are formed in fp32."""
    tokens, width, vocab = 65536, 64, 50304
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocab, width, device="cuda", requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, head, targets, vocab=vocab, kernel=kernel)
    loss.scaled.backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < share * 4 * tokens * vocab


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a device with fp8",
)
@pytest.mark.parametrize("cap", [None, 15.0])
def test_the_loss_of_a_whole_batch_in_fp8(cap: float | None) -> None:
    """Sizes of GPT-2: several slices of 21 thousand tokens, 50 thousand columns."""
    tokens, width, vocab, rows = 65536, 768, 50257, 50304
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    head = 0.02 * torch.randn(rows, width, device="cuda")
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    scale = torch.tensor(1 / tokens, device="cuda")
    results = []
    for fp8 in (False, True):
        leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss = linear_cross_entropy(
            *(*leaves, targets, LossTerms(scale=scale, cap=cap)), vocab=vocab, kernel=True, fp8=fp8
        )
        loss.scaled.backward()
        results.append((loss.total, *(leaf.grad for leaf in leaves)))
    plain, ours = results
    assert ours[0].item() == pytest.approx(plain[0].item(), rel=1e-3)
    for got, wanted in zip(ours[1:], plain[1:], strict=True):
        assert wanted is not None
        assert (got - wanted).norm() / wanted.norm() < 0.1


class Layout(NamedTuple):
    """What a process does that takes its place in a layout, if it is the only one there."""

    axes: tuple[str, ...]
    shards_rows: bool = False
    settings: tuple[str, ...] = ()


LAYOUTS = {
    "copies": Layout(("dp_replicate", "dp_shard", "cp")),
    "shares": Layout(("dp_shard", "cp"), shards_rows=True),
    "shares, gradients kept": Layout(
        ("dp_shard", "cp"),
        shards_rows=True,
        settings=("parallel.dp_shard=2", 'parallel.keep="gradients"'),
    ),
    "shares, compiled": Layout(
        ("dp_shard", "cp"), shards_rows=True, settings=('runtime.compile="blocks"',)
    ),
    "tensor": Layout(("tp",)),
    "context, ring": Layout(("cp",), settings=("parallel.cp=2", 'parallel.attention="ring"')),
    "context, heads": Layout(("cp",), settings=("parallel.cp=2", 'parallel.attention="heads"')),
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Layout], None]]:
    """Let this process be one of one along the axes of a layout: all that the layout does is done,
    communication included, and the result is that of a plain process."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)

    def choose(layout: Layout) -> None:
        monkeypatch.setattr(
            Groups, "along", lambda self, *axes: dist.group.WORLD if axes == layout.axes else None
        )
        monkeypatch.setattr(Mesh, "shards_rows", layout.shards_rows)

    yield choose
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", ['optim.type="adamw"', 'optim.type="muon"'])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_computes_what_a_plain_process_does(
    make_run: MakeRun, alone: Callable[[Layout], None], name: str, optimizer: str
) -> None:
    """In fp32 sums differ in their order only; in bf16 every layout rounds at its own places, and
    12 steps carry on what is rounded. Muon makes all directions of a gradient equally long, so what
    was rounded of the shortest ones counts as much as the others: 2e-4 were seen."""
    adamw = "adamw" in optimizer
    lr = ("optim.lr=3e-3",) if adamw else ()
    model = (*ON_GPU[:-1], optimizer, *lr, "runtime.compile=false")
    layout, formats = LAYOUTS[name], {"fp32": 1e-4 if adamw else 1e-3, "bf16": 0.01}
    plain = {one: losses(make_run(*model, f'precision.compute="{one}"')) for one in formats}
    alone(layout)
    for one, tolerance in formats.items():
        ours = losses(make_run(*model, *layout.settings, f'precision.compute="{one}"'))
        assert ours == pytest.approx(plain[one], rel=tolerance), one


def test_state_in_host_memory(make_run: MakeRun, tmp_path: Path) -> None:
    """The same arithmetic, by another processor."""
    for folder, extra in (("plain", ()), ("offload", ('runtime.offload="optimizer"',))):
        Run(make_run(*ON_GPU, 'precision.compute="bf16"', *extra, folder=folder)).train()
    plain, ours = (
        [
            record["loss"]
            for record in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
            if record["kind"] == "step"
        ]
        for name in ("plain", "offload")
    )
    assert ours == pytest.approx(plain, rel=0.01)
