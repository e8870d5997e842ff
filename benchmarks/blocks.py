"""Blocks of steps of several systems in turns, and the table that comes of them.

    nanoGPT | transformers | ours | nanoGPT | transformers | ours | ...

Blocks alternate, so that a noisy machine disturbs all systems alike; each begins with two steps
that are not timed. Where the memory of a GPU does not hold all systems, each is built, measured and
given up before the next. Memory is that of one step of a system alone, with weights and moments.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from kernel_times import KernelTime, kernel_times, print_kernels
from peers import BASE, Builder, System, numbers_of

from gristmill.base.errors import UserError
from gristmill.config.schema import RunConfig
from gristmill.distributed.device import Device
from gristmill.plan.arithmetic import count_parameters, token_cost

UNTIMED = 2
"""Steps at the beginning of a block that are not timed: they find the caches of another system."""


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
    """What was found about one system."""

    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each block; none if the system did not fit into memory."""
    loss: float = float("nan")
    peak: int = 0
    """Bytes of a whole step with weights and moments; 0 where they cannot be told apart."""
    kernels: list[KernelTime] = field(default_factory=list)
    """Of a step; only if asked for."""


def measure(builders: Mapping[str, Builder], plan: Plan) -> dict[str, Measured]:
    """All systems in alternating blocks, or one after the other where memory does not hold all."""
    found = _in_turns(builders, plan)
    _free()
    if found is None:
        print("the systems do not fit into memory together: one after the other", flush=True)
        found = {}
        for name, build in builders.items():
            found |= _in_turns({name: build}, plan) or {name: Measured()}
            _free()
    return found


def _in_turns(builders: Mapping[str, Builder], plan: Plan) -> dict[str, Measured] | None:
    """Alternate between systems; None if memory runs out."""
    systems: dict[str, System] = {}
    found = {name: Measured() for name in builders}
    try:
        for name, build in builders.items():
            found[name].peak = _prepare(name, build, systems, plan)
        for block in range(plan.blocks):
            for name, system in systems.items():
                _run_block(system, found[name], plan)
            print(f"block {block + 1} of {plan.blocks}", file=sys.stderr, flush=True)
        for name, system in systems.items() if plan.kernels else ():
            found[name].kernels = kernel_times(system.step, plan.device)
    except (torch.OutOfMemoryError, UserError) as error:
        if not _ran_out(error):
            raise
        found.clear()
    finally:
        for system in systems.values():
            system.close()
    return found or None


def _prepare(name: str, build: Builder, systems: dict[str, System], plan: Plan) -> int:
    """Build a system, let it compile, and return the peak memory of a step of it alone."""
    print(f"{name}: building and compiling", file=sys.stderr, flush=True)
    _free(systems_stay=True)
    before = torch.cuda.memory_allocated() if plan.device == "cuda" else 0
    systems[name] = system = build()
    for _ in range(3):
        system.step().item()
    if plan.device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    system.step().item()
    return torch.cuda.max_memory_allocated() - before


def _run_block(system: System, found: Measured, plan: Plan) -> None:
    _free(systems_stay=True)
    for _ in range(UNTIMED):
        loss = system.step()
    loss.item()  # waits for the device
    started = time.perf_counter()
    for _ in range(plan.steps):
        loss = system.step()
    found.loss = loss.item()
    found.speeds.append(plan.tokens_per_step * plan.steps / (time.perf_counter() - started))


def _free(*, systems_stay: bool = False) -> None:
    """Give memory that nobody holds back to the device."""
    if not systems_stay:
        torch._dynamo.reset()
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
