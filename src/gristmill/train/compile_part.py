"""The process that compiles one part of a run: `python -m gristmill.train.compile_part`, with a
`CompileTask` on standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import nn

from gristmill.base.process import ProcessInfo
from gristmill.base.units import Progress
from gristmill.config.optim import AdamWConfig, OptimizerConfig
from gristmill.distributed.world import World, open_world
from gristmill.models.loss_terms import training_terms
from gristmill.models.spec import CausalLM, Loss, StagedModel
from gristmill.optim.build import build_optimizer
from gristmill.strategies.compiling import (
    BESIDE,
    KERNELS,
    UPDATE,
    CompileTask,
    start_compile_workers,
)
from gristmill.train.build import blocks_in_fp8, place_model


def main() -> None:
    """Compile, and exit at once: only the cache is needed by others."""
    task = CompileTask.load(sys.stdin.read())
    config = task.config
    world = open_world(config.runtime, tf32=config.precision.tf32, place=ProcessInfo())
    if task.part != KERNELS:
        start_compile_workers()
        _launch_nothing()
    compile_part(task, world)
    os._exit(0)


def _launch_nothing() -> None:
    """Triton's kernels are compiled, but not run."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime.jit import JITFunction

    for kind in (CachingAutotuner, JITFunction):
        setattr(kind, "run", lambda *args, **kwargs: None)  # noqa: B010 - a method of theirs


def compile_part(task: CompileTask, world: World) -> None:
    """Call the compiled function once, with tensors like those of a step."""
    graphs: Literal["blocks"] | None = None if task.part == KERNELS else "blocks"
    model, _ = place_model(
        task.config, vocab=task.vocab, world=world, graphs=graphs, cuda_graphs=task.cuda_graphs
    )
    blocks_in_fp8(task.config, model)
    model.train()
    parameters = {model.canonical_name(name): p for name, p in model.named_parameters()}
    if task.part == UPDATE:
        _step(task.config.optim, model, parameters)
    else:
        _run(task, model)
    if task.part == KERNELS:
        some = dict([parameters.popitem()])  # AdamW's kernel is the same for all
        _step(AdamWConfig(), model, some)


def _run(task: CompileTask, model: CausalLM) -> None:
    """Forward and backward through one block, through everything else, or through both."""
    device = next(model.parameters()).device
    staged, ends = cast(StagedModel, model), task.part in (BESIDE, KERNELS)
    layers = {BESIDE: [], KERNELS: staged.distinct_layers()[:1]}.get(task.part)
    hidden = staged.stage_hidden(task.samples, task.sequence)
    tokens_BT = torch.zeros(task.samples, task.sequence, dtype=torch.int64, device=device)
    terms = training_terms(task.config.train, Progress(), torch.ones((), device=device))
    if sources := task.config.recorded_sources:
        terms = terms._replace(sources=sources, sources_B=tokens_BT[:, 0].clone())
    # The result of an operation rather than a leaf, as between blocks.
    hidden = torch.zeros_like(hidden, device=device, requires_grad=True).clone()
    output = staged.forward_stage(
        hidden,
        [int(task.part)] if layers is None else layers,
        first=ends,
        last=ends,
        tokens_BT=tokens_BT,
        targets_BT=tokens_BT,
        terms=terms,
    )
    if isinstance(output, torch.Tensor):
        output.backward(torch.zeros_like(output))
    else:
        Loss(*output).scaled.backward()


def _step(config: OptimizerConfig, model: CausalLM, parameters: Mapping[str, nn.Parameter]) -> None:
    """A step of the optimizer."""
    kernel = model.kernels.adamw
    optimizer = build_optimizer(config, model, parameters=parameters, compiled=True, kernel=kernel)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    divisor = torch.ones((), device=next(iter(parameters.values())).device)
    optimizer.step(divisor=divisor, skip=torch.zeros_like(divisor))


if __name__ == "__main__":
    main()
