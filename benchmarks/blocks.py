"""Blocks of steps of several systems in turns, and the table that comes of them.

    nanoGPT | transformers | ours | nanoGPT | transformers | ours | ...

Each system has a process of its own. They are built and compiled at the same time; then blocks
alternate, so that a noisy machine disturbs all systems alike, and one system runs while the others
wait. Each block begins with steps that are not timed. A waiting system keeps its weights and
moments on the device, nothing else. Memory is the peak of a whole step, weights and moments
included.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from kernel_times import KernelTime, kernel_times, print_kernels
from peers import BASE, Builder, System, numbers_of

from gristmill.base.errors import UserError
from gristmill.config.schema import RunConfig
from gristmill.distributed.device import Device
from gristmill.distributed.world import open_world
from gristmill.plan.arithmetic import count_parameters, token_cost

UNTIMED = 2
"""Steps at the beginning of a block that are not timed: the caches are another system's."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    blocks: int
    steps: int
    """Timed steps in a block."""
    device: str
    tokens_per_step: int
    kernels: int = 0
    """Rows of the table of each system's kernels."""


@dataclass
class Measured:
    """The measurements of one system."""

    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each block; none if the system did not fit into memory."""
    loss: float = float("nan")
    peak: int = 0
    """Bytes of a whole step with weights and moments; 0 where they cannot be told apart."""
    kernels: list[KernelTime] = field(default_factory=list)
    """Of a step; only if asked for."""


def measure(builders: Mapping[str, Builder], config: RunConfig, plan: Plan) -> dict[str, Measured]:
    """All systems in alternating blocks. `config`: threads, TF32 and determinism of all."""
    _free()
    measured = {name: Measured() for name in builders}
    with _workers(builders, config, plan) as workers:
        for worker in workers.values():
            worker.order("build")
        peaks = {name: worker.answer() for name, worker in workers.items()}
        fitting = {}
        for name, worker in workers.items():
            # Building side by side takes more memory than taking turns: try again alone.
            peak = worker.do("build") if peaks[name] is None else peaks[name]
            if peak is not None:
                measured[name].peak, fitting[name] = peak, worker
        for block in range(plan.blocks):
            for name, worker in fitting.items():
                speed, measured[name].loss = worker.do("block")
                measured[name].speeds.append(speed)
            speeds = ", ".join(f"{name} {measured[name].speeds[-1]:,.0f}" for name in fitting)
            print(f"block {block + 1} of {plan.blocks}: {speeds}", file=sys.stderr, flush=True)
        for name, worker in fitting.items() if plan.kernels else ():
            measured[name].kernels = worker.do("kernels")
    return measured


@dataclass(frozen=True)
class _Worker:
    """A process with one system, which does what it is told."""

    name: str
    connection: Connection
    process: Any

    def order(self, what: str) -> None:
        self.connection.send(what)

    def answer(self) -> Any:
        try:
            done, answer = self.connection.recv()
        except EOFError:
            raise SystemExit(f"{self.name}: its process ended") from None
        if not done:
            raise SystemExit(f"{self.name} failed:\n{answer}")
        return answer

    def do(self, what: str) -> Any:
        self.order(what)
        return self.answer()


@contextmanager
def _workers(
    builders: Mapping[str, Builder], config: RunConfig, plan: Plan
) -> Iterator[dict[str, _Worker]]:
    context, workers = multiprocessing.get_context("spawn"), dict[str, _Worker]()
    try:
        for name, build in builders.items():
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, build, config, plan), daemon=False)
            process.start()
            there.close()
            workers[name] = _Worker(name, here, process)
        yield workers
    finally:
        for worker in workers.values():
            worker.connection.close()  # ends it, unless it is within an order
        for worker in workers.values():
            worker.process.join(10)
            worker.process.kill()


def _work(connection: Connection, build: Builder, config: RunConfig, plan: Plan) -> None:
    """The process of a system."""
    open_world(config.runtime, tf32=config.precision.tf32)
    system: System | None = None
    while True:
        try:
            order = connection.recv()
        except EOFError:
            break
        try:
            answer: Any
            if order == "build":
                system, answer = _build(build, plan)
            else:
                assert system is not None, "built first"
                run = {"block": _run_block, "kernels": _kernels}[order]
                answer = run(system, plan)
            connection.send((True, answer))
        except Exception:  # the parent shows it
            connection.send((False, traceback.format_exc()))
            break
        _free()
    if system is not None:
        system.close()


def _build(build: Builder, plan: Plan) -> tuple[System | None, int | None]:
    """A system that has compiled, and the peak memory of a step, 0 on a CPU; None for both if
    memory ran out."""
    try:
        system = build()
        for _ in range(3):
            system.step().item()
    except (torch.OutOfMemoryError, UserError) as error:
        if not _ran_out(error):
            raise
    else:
        if plan.device != "cuda":
            return system, 0
        torch.cuda.reset_peak_memory_stats()
        system.step().item()
        return system, torch.cuda.max_memory_allocated()
    _free()
    return None, None


def _run_block(system: System, plan: Plan) -> tuple[float, float]:
    """Tokens per second, and the last loss."""
    for _ in range(UNTIMED):
        loss = system.step()
    loss.item()  # waits for the device
    started = time.perf_counter()
    for _ in range(plan.steps):
        loss = system.step()
    last = loss.item()
    return plan.tokens_per_step * plan.steps / (time.perf_counter() - started), last


def _kernels(system: System, plan: Plan) -> list[KernelTime]:
    return kernel_times(system.step, plan.device)


def _free() -> None:
    """Give memory that nobody holds back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _ran_out(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or isinstance(
        error.__cause__, torch.OutOfMemoryError
    )


# ------------------------------------------------------------------ printing


def describe(config: RunConfig, plan: Plan, *, title: str) -> None:
    model, numbers = config.model, numbers_of(config)
    millions = count_parameters(model, rows=numbers.padded_vocab) / 1e6
    where = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU"
    print(
        f"{title}: {model.layers} layers, width {model.width}, {millions:.1f}M parameters, "
        f"{'with' if model.bias else 'without'} biases, "
        f"batch {numbers.batch} x {numbers.sequence}, "
        f"vocabulary {numbers.vocab} in {numbers.padded_vocab} rows, {config.precision.compute}"
        f"{', deterministic' if config.runtime.deterministic else ''}; {where}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"{plan.blocks} blocks of {plan.steps} steps",
        flush=True,
    )


def report(
    config: RunConfig, found: Mapping[str, Measured], plan: Plan, *, base: str = BASE
) -> None:
    """A row for each system; ratios are to `base`."""
    numbers = numbers_of(config)
    cost = token_cost(config.model, rows=numbers.padded_vocab, sequence=numbers.sequence)
    rate = Device(torch.device(plan.device)).matrix_rate()
    width = max(map(len, found)) + 2
    beside = found[base].speeds if base in found else []
    one_is = statistics.median(beside) if beside else None
    print(
        f"{'':<{width}}{'tokens/s':>10}{'slowest':>10}{'fastest':>10}{'ratio':>7}{'ms/step':>9}"
        f"{'GiB':>7}{'TFLOP/s':>10}{'causal':>10}{'share':>7}{'causal':>8}{'loss':>8}"
    )
    for name, one in found.items():
        if not one.speeds:
            print(f"{name:<{width}}does not fit into memory")
            continue
        middle = statistics.median(one.speeds)
        palm, causal = middle * cost.palm, middle * cost.causal
        print(
            f"{name:<{width}}{middle:>10,.0f}{min(one.speeds):>10,.0f}{max(one.speeds):>10,.0f}"
            f"{f'{middle / one_is:.3f}' if one_is else '':>7}"
            f"{1000 * plan.tokens_per_step / middle:>9.2f}"
            f"{f'{one.peak / 2**30:.1f}' if one.peak else '':>7}"
            f"{palm / 1e12:>10.4g}{causal / 1e12:>10.4g}"
            f"{palm / rate.flops:>7.1%}{causal / rate.flops:>8.1%}{one.loss:>8.3f}"
        )
    print(
        f"TFLOP/s in PaLM's counting, then the causal one; shares are of {rate.flops / 1e12:.4g} "
        f"TFLOP/s, measured in {rate.format} matrix products of {rate.size}^3 here"
    )
    for name, one in found.items() if plan.kernels else ():
        print_kernels(name, one.kernels, rows=plan.kernels)
    if config.model.bias is False and "transformers" in found:
        print("transformers has biases all the same: its GPT-2 cannot be built without")


def as_json(found: Mapping[str, Measured]) -> dict[str, Any]:
    return {name: dataclasses.asdict(one) for name, one in found.items()}
