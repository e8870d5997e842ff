"""The planned memory of runs beside what torch allocates for them, and beside what was published.

    python benchmarks/plan_memory.py torch              one process, counted on any machine
    python benchmarks/plan_memory.py ranks              one of 8 to 3,072 processes
    python benchmarks/plan_memory.py recorded           what an H200 measured (benchmarks/results)
    python benchmarks/plan_memory.py device [CASE …]    on the GPU of this machine, with times
    python benchmarks/plan_memory.py published          layouts of other programs

For the first two, the real model, optimizer and strategy make two steps with tensors that have no
memory (torch's FakeTensorMode), among processes that are not there (its "fake" backend). Every
storage that an operation returns is counted until it is freed; the peak of the second step is
compared with the plan. Slices of logits are as large as on a GPU. Kernels and compilation are off,
since both need one: what they keep is what `recorded` compares.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import gristmill.models.loss as loss_module
import gristmill.plan.memory as memory_module
from gristmill.base.process import ProcessInfo
from gristmill.base.units import Progress
from gristmill.bench.measure import measure_run
from gristmill.config.load import load_text
from gristmill.config.parallel import Mesh
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch
from gristmill.plan.calibration import calibrated, read_calibrations, this_machine
from gristmill.plan.layouts import on_device
from gristmill.plan.memory import MemoryPlan, plan_memory
from gristmill.plan.timing import plan_step
from gristmill.train.build import build_strategy, open_run_world

VOCAB = 50257
RUN = """
name = "planned"
{head}
[data]
paths = "none"
"""
FULL, SELECTIVE = 'train.recompute="full"', 'train.recompute="selective"'


@dataclass(frozen=True)
class Case:
    """A run that is planned and counted."""

    name: str
    preset: str
    settings: tuple[str, ...] = ()
    micro_batch: int = 4
    accumulate: int = 2
    mesh: Mesh = field(default_factory=Mesh)
    rank: int = 0


SINGLE = [
    Case("124M", "gpt2-small", micro_batch=16),
    Case("124M, fp32", "gpt2-small", ('precision.compute="fp32"',)),
    Case("124M, full", "gpt2-small", (FULL,), micro_batch=16),
    Case("124M, selective", "gpt2-small", (SELECTIVE,), micro_batch=16),
    Case("124M, every second block full", "gpt2-small", (FULL, "train.recompute_every=2")),
    Case("124M, one micro-batch", "gpt2-small", (FULL,), micro_batch=1, accumulate=1),
    Case("124M, swiglu, grouped", "gpt2-small", ("model.activation=swiglu", "model.kv_heads=4")),
    Case("124M, window", "gpt2-small", ("model.window=256",), micro_batch=2),
    Case("124M, own head, cap", "gpt2-small", ("model.tie_head=false", "model.logit_cap=30")),
    Case("124M, sampled softmax", "gpt2-small", ("train.sampled_softmax=8192",)),
    Case("124M, SGD", "gpt2-small", ("optim.type=sgd",), micro_batch=1),
    Case("124M, Muon", "gpt2-small", ("optim.type=muon",), micro_batch=1),
    Case("124M, AccumAdamW", "gpt2-small", ("optim.type=accum-adamw",), micro_batch=1),
    Case("modern 124M, Muon", "modern-small", micro_batch=2),
    Case("350M", "gpt2-medium", micro_batch=8),
    Case("774M", "gpt2-large"),
    Case("1.5B", "gpt2-xl"),
    Case("1.5B, full", "gpt2-xl", (FULL,)),
]
RANKS = [
    Case("124M, replicas", "gpt2-small", micro_batch=8, mesh=Mesh(dp_replicate=8)),
    Case("124M, sharded", "gpt2-small", micro_batch=1, mesh=Mesh(dp_shard=8)),
    Case("124M, shards and replicas", "gpt2-small", mesh=Mesh(dp_replicate=8, dp_shard=8)),
    Case("124M, tensor parallel", "gpt2-small", micro_batch=8, mesh=Mesh(tp=4)),
    Case("350M, sharded, tp", "gpt2-medium", micro_batch=2, mesh=Mesh(dp_shard=8, tp=4)),
    Case("124M, context parallel", "gpt2-small", mesh=Mesh(dp_shard=4, cp=2)),
    Case("1.5B, sharded", "gpt2-xl", micro_batch=2, mesh=Mesh(dp_shard=64)),
    Case("1.5B, sharded, full", "gpt2-xl", (FULL,), 1, 1, Mesh(dp_shard=64)),
    Case("7.5B, sharded, full", "gpt3-7.5b", (FULL,), 1, 1, Mesh(dp_shard=512)),
    Case("18.4B, sharded, full", "gpt3-18.4b", (FULL,), 1, 1, Mesh(dp_shard=3072)),
]


# ------------------------------------------------------------------ counting


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operations return and nothing has freed yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: Any = WeakIdKeyDictionary()

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, or what has become of it."""
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        size = storage.nbytes()
        if storage in self._known:
            box = self._known[storage]
            self.now += size - box[0]
            box[0] = size
        else:
            self._known[storage] = box = [size]
            self.now += size
            weakref.finalize(storage, self._freed, box)
        self.peak = max(self.peak, self.now)

    def _freed(self, box: list[int]) -> None:
        self.now -= box[0]

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype is torch.bool else 0  # there are no values
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result


@contextlib.contextmanager
def like_a_gpu(counter: Counter) -> Iterator[None]:
    """Slices of logits as on a GPU, and storages that FSDP resizes behind the dispatcher."""
    import torch.distributed.fsdp._fully_shard._fsdp_param as sharded

    import gristmill.strategies.fsdp as fsdp

    def counted(function: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any) -> Any:
            result = function(tensor, *args)
            counter.add(tensor)
            return result

        return call

    def real_mesh(function: Any) -> Any:
        def call(world: Any) -> Any:
            with _disable_current_modes():
                return function(world)

        return call

    changes = [
        (loss_module, "CPU_SLICE_BYTES", loss_module.SLICE_BYTES),
        (loss_module, "CPU_SLICE_TOKENS", loss_module.SLICE_TOKENS),
        # The loss as plain operations, not as one operation of a graph.
        (loss_module, "_is_traced", lambda hidden: False),
        (sharded, "alloc_storage", counted(sharded.alloc_storage)),
        (sharded, "free_storage", counted(sharded.free_storage)),
        (fsdp, "_device_mesh", real_mesh(fsdp._device_mesh)),
    ]
    with contextlib.ExitStack() as stack:
        for where, name, value in changes:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


def config_of(case: Case) -> RunConfig:
    """The settings of a case, without kernels and compilation."""
    mesh = case.mesh
    words = [
        f"train.micro_batch={case.micro_batch}",
        f"train.batch={case.micro_batch * case.accumulate * mesh.data}",
        'train.until="10 steps"',
        "runtime.device=cpu",
        "runtime.kernels=false",
        "precision.compute=bf16",
        *(f"parallel.{axis}={size}" for axis, size in mesh.sizes.items()),
    ]
    head = f'preset = "{case.preset}"'
    return load_text(RUN.format(head=head), [*words, *case.settings], place="benchmark")


def counted_peak(case: Case) -> int:
    """The peak of the second step of a process, by counting what torch allocates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config, mesh = config_of(case), case.mesh
    several = mesh.processes > 1
    if several:
        store = FakeStore()
        dist.init_process_group("fake", rank=case.rank, world_size=mesh.processes, store=store)
    counter = Counter()
    try:
        with like_a_gpu(counter), FakeTensorMode(allow_non_fake_inputs=True), counter:
            return _two_steps(config, case, counter)
    finally:
        if several:
            dist.destroy_process_group()


def _two_steps(config: RunConfig, case: Case, counter: Counter) -> int:
    place = ProcessInfo(rank=case.rank, world=case.mesh.processes)
    world = open_run_world(config, case.mesh, place)
    resolved = resolve(config, vocab=VOCAB, mesh=case.mesh)
    strategy = build_strategy(config, vocab=VOCAB, world=world, resolved=resolved)
    shape = (resolved.micro_batch, resolved.sequence)
    batches = [
        Batch(
            torch.zeros(shape, dtype=torch.int64),
            torch.zeros(shape, dtype=torch.int64),
            None,
            float(shape[0] * shape[1]),
        )
        for _ in range(resolved.accumulate)
    ]
    for step in range(2):
        counter.peak = counter.now
        strategy.update(strategy.accumulate(batches, Progress(step, 0, 0)))
    return counter.peak


def planned(case: Case) -> MemoryPlan:
    """The plan of a case that is counted here: on the CPU, with the slices of a GPU."""
    config = config_of(case)
    whole, least = memory_module.SLICE_BYTES, memory_module.SLICE_TOKENS
    with mock.patch.multiple(memory_module, CPU_SLICE_BYTES=whole, CPU_SLICE_TOKENS=least):
        return plan_memory(
            config,
            case.mesh,
            vocab=VOCAB,
            micro_batch=case.micro_batch,
            recompute=config.train.recompute,
            device="cpu",
        )


def compare_counted(cases: Sequence[Case]) -> list[float]:
    """Print planned and counted memory; returns the errors."""
    errors = []
    print("| run | processes | counted | planned | error |\n| --- | ---: | ---: | ---: | ---: |")
    for case in cases:
        counted, plan = counted_peak(case), planned(case).allocated
        errors.append(plan / counted - 1)
        ranks, sizes = case.mesh.processes, f"{counted / 2**20:,.0f} | {plan / 2**20:,.0f}"
        print(f"| {case.name} | {ranks:,} | {sizes} MiB | {errors[-1]:+.1%} |", flush=True)
    return errors


# ------------------------------------------------------------------ recorded on an H200


@dataclass(frozen=True)
class Recorded:
    """What a GPU measured: the peak of its allocator, in a run with kernels and compilation."""

    name: str
    head: str
    settings: tuple[str, ...]
    micro_batch: int
    gib: float
    source: str
    accumulate: int = 1


def _hf(**sizes: object) -> str:
    shown = ", ".join(
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for name, value in sizes.items()
    )
    return f"[model]\nhf_config = {{ {shown} }}".replace("'", '"')


_ERF = ('model.activation="gelu"', "model.bias=false")
_MODERN = ("train.sampled_softmax=unset",)
_GPT2_HF = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def _preset(name: str) -> str:
    return f'preset = "{name}"'


RECORDED = [
    Recorded("GPT-2 124M", _preset("gpt2-small"), _ERF, 64, 22.1, "results/2026-11-18.md"),
    Recorded("GPT-2 350M", _preset("gpt2-medium"), _ERF, 32, 31.1, "results/2026-11-18.md"),
    Recorded("GPT-2 774M", _preset("gpt2-large"), _ERF, 16, 34.6, "results/2026-11-18.md"),
    Recorded("GPT-2 1.5B", _preset("gpt2-xl"), _ERF, 8, 40.7, "results/2026-11-18.md"),
    Recorded("GPT-2 124M", _preset("gpt2-small"), (), 32, 13.0, "docs/guides/lora.md"),
    Recorded(
        "modern 124M, Muon", _preset("modern-small"), _MODERN, 32, 14.9, "docs/second-order.md"
    ),
    Recorded(
        "modern 124M, AdamW",
        _preset("modern-small"),
        (*_MODERN, "optim.type=adamw"),
        *(32, 15.0, "docs/second-order.md"),
    ),
    Recorded(
        "modern 124M, SOAP",
        _preset("modern-small"),
        (*_MODERN, "optim.type=adamw", "optim.preconditioner.type=soap"),
        *(32, 17.5, "docs/second-order.md"),
    ),
    Recorded(
        "modern 124M, SOAP-Muon",
        _preset("modern-small"),
        (*_MODERN, "optim.preconditioner.type=soap"),
        *(32, 17.5, "docs/second-order.md"),
    ),
    Recorded(
        "modern 124M, AdamW + K-FAC",
        _preset("modern-small"),
        (*_MODERN, "optim.type=adamw", "optim.preconditioner.type=kfac"),
        *(32, 19.4, "docs/second-order.md"),
    ),
    Recorded(
        "GPT-2 124M of transformers",
        _hf(model_type="gpt2", **_GPT2_HF, **_NO_DROPOUT),
        (),
        *(32, 13.62, "results/2026-11-16.md", 2),
    ),
    Recorded(
        "Llama 254M of transformers", _hf(**_LLAMA), (), 16, 13.76, "results/2026-11-16.md", 2
    ),
]


def recorded_plan(one: Recorded) -> MemoryPlan:
    """The plan of a run that was recorded."""
    words = [
        f"train.micro_batch={one.micro_batch}",
        f"train.batch={one.micro_batch * one.accumulate}",
        'train.until="10 steps"',
        "precision.compute=bf16",
    ]
    config = load_text(RUN.format(head=one.head), [*words, *one.settings], place="benchmark")
    return plan_memory(
        config, Mesh(), vocab=VOCAB, micro_batch=one.micro_batch, recompute="none", device="cuda"
    )


def compare_recorded() -> list[float]:
    """Print planned and recorded memory; returns the errors."""
    errors = []
    print("| run | micro-batch | H200 | planned | error | from |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for one in RECORDED:
        plan = recorded_plan(one).allocated / 2**30
        errors.append(plan / one.gib - 1)
        figures = f"{one.gib:.1f} | {plan:.1f} GiB | {errors[-1]:+.1%}"
        print(f"| {one.name} | {one.micro_batch} | {figures} | {one.source} |")
    return errors


# ------------------------------------------------------------------ on the GPU that is here


DEVICE = [
    Case("124M", "gpt2-small", micro_batch=32),
    Case("124M, two micro-batches", "gpt2-small", micro_batch=16, accumulate=2),
    Case("124M, selective", "gpt2-small", (SELECTIVE,), micro_batch=32),
    Case("124M, full", "gpt2-small", (FULL,), micro_batch=64),
    Case("124M, not compiled", "gpt2-small", ("runtime.compile=false",), micro_batch=16),
    Case("124M, fp32", "gpt2-small", ("precision.compute=fp32",), micro_batch=16),
    Case("124M, swiglu, grouped", "gpt2-small", ("model.activation=swiglu", "model.kv_heads=4")),
    Case("modern 124M, Muon", "modern-small", micro_batch=16),
    Case("350M", "gpt2-medium", micro_batch=16),
    Case("774M", "gpt2-large", micro_batch=8),
    Case("1.5B", "gpt2-xl", micro_batch=4),
    Case("1.5B, full", "gpt2-xl", (FULL,), micro_batch=16),
]
"""Each with one micro-batch in a step, unless its name says two."""


def compare_device(names: Sequence[str], *, steps: int) -> list[float]:
    """Print planned and measured memory and times of real runs; returns the errors of memory. Times
    are planned with what `plan --calibrate` found here, if it was run, and with the table."""
    hardware, _ = this_machine()
    calibration = read_calibrations().get(hardware.name)
    here = calibrated(hardware, calibration) if calibration else hardware
    errors = []
    print("| run | micro-batch | measured | planned | error | step | calibrated | table |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in DEVICE:
        if names and case.name not in names:
            continue
        accumulate = 2 if "two" in case.name else 1
        words = [
            f"train.micro_batch={case.micro_batch}",
            f"train.batch={case.micro_batch * accumulate}",
            'train.until="1000 steps"',
            "precision.compute=bf16",
            *case.settings,
        ]
        config = load_text(RUN.format(head=f'preset = "{case.preset}"'), words, place="benchmark")
        config = on_device(config, hardware)
        found = measure_run(config, steps=steps, warm_up=4, random_tokens=True)
        vocab = found.subject.vocabulary
        kind: Any = {"vocab": vocab, "micro_batch": case.micro_batch}
        kind["recompute"] = config.train.recompute
        memory = plan_memory(config, Mesh(), device="cuda", **kind).allocated
        assert found.speed.memory is not None
        errors.append(memory / found.speed.memory - 1)
        planned_ms = [
            1e3 * plan_step(config, Mesh(), one, **kind).seconds for one in (here, hardware)
        ]
        ours = found.speed.milliseconds
        sizes = f"{found.speed.memory / 2**30:.2f} | {memory / 2**30:.2f} GiB | {errors[-1]:+.1%}"
        times = " | ".join(f"{ms:.1f} ms ({ms / ours - 1:+.0%})" for ms in planned_ms)
        print(
            f"| {case.name} | {case.micro_batch} | {sizes} | {ours:.1f} ms | {times} |", flush=True
        )
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["torch", "ranks", "recorded", "device"])
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help="of `device`; all if none is given"
    )
    parser.add_argument("--steps", type=int, default=10, help="of `device`, that are timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    match options.what:
        case "torch":
            errors = compare_counted(SINGLE)
        case "ranks":
            errors = compare_counted(RANKS)
        case "device":
            errors = compare_device(options.cases, steps=options.steps)
        case _:
            errors = compare_recorded()
    within = sum(abs(error) <= 0.05 for error in errors)
    print(f"\n{within} of {len(errors)} within 5 %, the worst {max(errors, key=abs):+.1%}")


if __name__ == "__main__":
    main()
