"""torch.compile: which graphs are compiled, ahead of time or when needed, and how long that takes.

One graph of the whole model trains a little faster than a graph for each kind of block, but its
compilation time grows with every layer. So short runs compile blocks by default.

A step that compiles says nothing about the speed of training, so its rates are not recorded. torch
reports when compilation begins and ends, including that of graphs compiled later, when the batch
size changes.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch

from gristmill.base.errors import UserError
from gristmill.base.process import usable_cores
from gristmill.base.units import Progress
from gristmill.config.load import dump_run, load_text
from gristmill.config.model import GPTConfig
from gristmill.config.optim import MuonConfig
from gristmill.config.resolve import Resolved
from gristmill.config.schema import RunConfig
from gristmill.distributed.world import World
from gristmill.models.build import build_meta_model
from gristmill.models.loss_terms import training_terms
from gristmill.models.spec import CausalLM, StagedModel
from gristmill.plan.overhead import SECONDS_PER_LAYER, SLOWER

# ------------------------------------------------------------------ compiled ahead
#
# A model's blocks and the optimizer's step are compiled at the same time, before a run needs them:
# 23.7 instead of 29.2 s to the first step of `modern-small` with empty caches (decision 0029).
#
# torch compiles one graph after another, in one thread. The graphs of a model whose blocks are
# compiled separately are independent: at a cold start each is compiled by a separate process
# (`train/compile_part.py`), while the run builds the model and validates it. These processes only
# fill the compilers' caches, so that the run starts as if for the second time. Graphs that they
# cannot compile are compiled by the run itself. Only the run autotunes kernels, when it has the
# device to itself.

CORES = 8
"""The minimum number of cores; with fewer, these processes would only slow each other down."""
THREADS = 4
"""Threads with which each process compiles kernels."""
MEMORY_SHARE = 0.125
"""The share of the device's memory for the weights of these processes, each of which has a whole
model."""
LIMIT = 300.0
"""Seconds after which the run continues without them."""
BESIDE, UPDATE, KERNELS = "beside", "update", "kernels"
"""Parts of a run to compile: everything outside the blocks, the optimizer's step, and kernels that
are not the compiler's. A number stands for a layer."""


@dataclass(frozen=True)
class CompileTask:
    """The input of a process that compiles one part of a run."""

    config: RunConfig
    vocab: int
    samples: int
    """In a micro-batch."""
    sequence: int
    cuda_graphs: bool
    """Whether passes are CUDA graphs."""
    part: str

    def dump(self) -> str:
        return json.dumps({**vars(self), "config": dump_run(self.config)})

    @classmethod
    def load(cls, text: str) -> CompileTask:
        values = json.loads(text)
        return cls(**{**values, "config": load_text(values["config"], place="run.toml")})


def compile_ahead(
    config: RunConfig, *, vocab: int, world: World, resolved: Resolved, cuda_graphs: bool = False
) -> CompileAhead | None:
    """Start to compile, if this run's graphs are known, not cached, and large enough to matter."""
    if not _is_plain(config) or world.device.kind != "cuda" or world.place.world > 1:
        return None
    if usable_cores() < CORES or "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        return None
    parts = parts_of(config, vocab=vocab)
    size = sum(p.numel() for p in build_meta_model(config.model, vocab=vocab).parameters())
    memory = world.device.total_memory()
    if memory is None or 4 * size * len(parts) > MEMORY_SHARE * memory:
        return None
    sizes = (vocab, resolved.micro_batch, resolved.sequence)
    tasks = [CompileTask(config, *sizes, cuda_graphs, part) for part in parts]
    done = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "ahead", _key(tasks[0], world.device.name))
    return None if done.exists() else CompileAhead(tasks, done=done)


def _is_plain(config: RunConfig) -> bool:
    """Whether batches, blocks and step have their usual form."""
    data, model = config.data, config.model
    marked = config.masks_documents or data.reset_positions or data.mask_end_of_text
    return (
        isinstance(model, GPTConfig)
        and model.adapters is None
        and data.kind == "tokens"
        and not marked
        and config.optim.preconditioning is None
        and config.runtime.offload is None
    )


def parts_of(config: RunConfig, *, vocab: int) -> list[str]:
    """The parts that can be compiled separately, the slowest first."""
    model = cast(StagedModel, build_meta_model(config.model, vocab=vocab))
    update = [UPDATE] if isinstance(config.optim, MuonConfig) else []
    return [*map(str, model.distinct_layers()), *update, BESIDE, KERNELS]


def _key(task: CompileTask, device: str) -> str:
    """A key that covers everything on which the graphs depend."""
    config = task.config
    train, runtime = config.train, config.runtime
    tables = (config.model, config.precision, config.optim)
    terms = training_terms(train, Progress(), torch.empty((), device="meta"))
    terms = terms._replace(sources=config.recorded_sources)
    loss = [type(term) if isinstance(term, torch.Tensor) else term for term in terms]
    settings = (train.recompute, *loss, runtime.kernels, runtime.deterministic)
    sizes = (task.vocab, task.samples, task.sequence)
    versions = (torch.__version__, _source_time(), device)
    named = repr((tables, settings, sizes, task.cuda_graphs, versions))
    return hashlib.sha256(named.encode()).hexdigest()[:32]


def _source_time() -> float:
    """When the code of models last changed."""
    folder = Path(__file__).parent.parent / "models"
    return max((file.stat().st_mtime for file in folder.rglob("*.py")), default=0.0)


class CompileAhead:
    """Processes that compile."""

    def __init__(self, tasks: list[CompileTask], *, done: Path) -> None:
        self.done, self._count = done, len(tasks)
        self._processes = list[subprocess.Popen[str]]()
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(THREADS)}
        for task in tasks:
            with contextlib.suppress(OSError):  # for example, no memory for a process
                self._processes.append(_start(task, {**threads, **os.environ}))
        atexit.register(self.close)

    def wait(self) -> None:
        """Wait until everything is compiled; this counts as compilation time."""
        from torch._dynamo.callback import CallbackTrigger, callback_handler

        end = time.monotonic() + LIMIT
        clocks = callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "ahead")
        with clocks, contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(max(0.0, end - time.monotonic()))
        if [process.returncode for process in self._processes] == [0] * self._count:
            with contextlib.suppress(OSError):
                self.done.parent.mkdir(parents=True, exist_ok=True)
                self.done.touch()
        self.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _start(task: CompileTask, environment: dict[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "gristmill.train.compile_part"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:
        process.stdin.write(task.dump())
    return process


# ------------------------------------------------------------------ what is compiled

USUAL_MFU = 0.4
"""The MFU for an estimate of a run's duration."""
LAUNCH_BOUND = 0.04
"""Seconds of a pass below which launching its kernels may take as long as running them."""
WIDEST_ROW = 4096
"""The widest row of a reduction that stays in registers. On an H200 this reduces the time of layer
norm of width 1280 to 0.6."""
GRAPHS = 128
"""Maximum number of compiled versions of a function in a process."""


def choose_graphs(
    config: RunConfig, world: World, resolved: Resolved | None
) -> Literal["whole", "blocks"] | None:
    """Whether to compile the whole model or block by block. With several processes only blocks can
    be compiled. With document masks, torch 2.11 computes wrong attention gradients in one graph."""
    if not config.runtime.compiles(world.device.kind):
        return None
    if world.mesh.processes > 1 or config.masks_documents or config.runtime.compile == "blocks":
        return "blocks"
    if config.runtime.compile is None and resolved is not None:
        return "blocks" if _is_short(config, world, resolved) else "whole"
    return "whole"


def _is_short(config: RunConfig, world: World, resolved: Resolved) -> bool:
    """Whether a run is too short for one graph to make up for its compilation time."""
    model = build_meta_model(config.model, vocab=resolved.vocab)
    seconds = _seconds(config, world, resolved, model, samples=resolved.samples)
    return seconds is not None and SLOWER * seconds < SECONDS_PER_LAYER * len(model.block_names())


def _seconds(
    config: RunConfig, world: World, resolved: Resolved, model: CausalLM, *, samples: int
) -> float | None:
    """An estimate of the time of training on so many samples; None on devices whose peak rate is
    not known."""
    precision = config.precision
    peak = world.device.peak_flops(precision.compute, tf32=precision.tf32)
    if peak is None:
        return None
    cost = model.token_cost(resolved.sequence).palm
    return samples * resolved.sequence * cost / (USUAL_MFU * peak)


def uses_cuda_graphs(
    config: RunConfig, world: World, resolved: Resolved | None, graphs: str | None
) -> bool:
    """Whether passes are CUDA graphs. The output of one is overwritten by the next, so a step must
    have one micro-batch, and nothing may read the model's inner results."""
    wanted = config.runtime.cuda_graphs
    if wanted and (graphs is None or world.device.kind != "cuda"):
        raise UserError(
            "needs a compiled model on CUDA", where="runtime.cuda_graphs", remedy="leave it out"
        )
    if wanted is False or resolved is None or graphs is None or world.device.kind != "cuda":
        return False
    reasons = {
        "several processes": world.place.world > 1,
        f"{resolved.accumulate} micro-batches in a step": resolved.accumulate > 1,
        "train.ramp": config.train.ramp is not None,
        "train.recompute": config.train.recompute != "none",
        "documents kept apart": config.masks_documents,
        "blocks in fp8": bool(config.precision.fp8_of_blocks),
        "optim.preconditioner": config.optim.preconditioning is not None,
        "runtime.offload": config.runtime.offload is not None,
    }
    against = [reason for reason, holds in reasons.items() if holds]
    if wanted and against:
        raise UserError(
            f"cannot be combined with {' and '.join(against)}",
            where="runtime.cuda_graphs",
            remedy="leave it out",
        )
    if wanted or against or not isinstance(config.model, GPTConfig):
        return bool(wanted)
    model = build_meta_model(config.model, vocab=resolved.vocab)
    seconds = _seconds(config, world, resolved, model, samples=resolved.micro_batch)
    return seconds is not None and seconds < LAUNCH_BOUND


# ------------------------------------------------------------------ how it is compiled


def compiled(function: Any, *, whole_graph: bool = True, cuda_graphs: bool = False) -> Any:
    """A model or block, compiled with static shapes."""
    # torch counts versions of a function over all models of a process. At its limit of 8, fullgraph
    # compilation fails.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(GRAPHS, dynamo.recompile_limit)
    # Allow graphs with custom autograd functions in the cache. Without this, the next start finds
    # only the kernels there, and spends seconds on compiling the rest again.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    use_heuristics(heuristics)
    options: dict[str, Any] | None = {"triton.cudagraphs": True} if cuda_graphs else None
    return torch.compile(function, dynamic=False, fullgraph=whole_graph, options=options)


def use_heuristics(factory: Callable[[], Any] | None) -> None:
    """Use these heuristics for compilation from now on; None: torch's own."""
    torch._inductor.config.inductor_choices_class = factory
    # Otherwise a thread that has compiled before would keep its heuristics.
    if (virtualized := sys.modules.get("torch._inductor.virtualized")) is not None:
        from torch._inductor.choices import InductorChoices

        virtualized.V.set_choices_handler((factory or InductorChoices)())


def heuristics() -> Any:
    """The compiler's heuristics, except that rows of up to `WIDEST_ROW` stay in registers while
    they are normalised. By default this holds up to 1024, and longer rows are read twice. It saves
    2.4 of the 167 ms of a step of a model of width 1280 on an H200 (`docs/log.md`, 17 November)."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            plain = InductorChoices.should_use_persistent_reduction
            inner = features.get_reduction_hint() == ReductionHint.INNER
            known = V.graph.sizevars.statically_known_leq
            return plain(features, cooperative_reduction) or (
                inner and known(features.reduction_numel, WIDEST_ROW)
            )

        def uuid(self) -> str:
            """Part of the key of compiled code in the cache."""
            return f"gristmill-rows-{WIDEST_ROW}"

    return Choices()


def compiled_for_training(
    function: Any, *, whole_graph: bool = True, cuda_graphs: bool = False
) -> Any:
    """A function that runs compiled only where gradients are needed: compiling a second version for
    validation would take longer than it saves."""
    for_training = compiled(function, whole_graph=whole_graph, cuda_graphs=cuda_graphs)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (for_training if torch.is_grad_enabled() else function)(*args, **kwargs)

    return call


def start_compile_workers() -> None:
    """Start the processes that compile kernels, which takes seconds. Called before a model is
    built, so that they are ready for its first graph."""
    from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool

    maybe_warm_pool()
    AsyncCompile.use_process_pool()  # until one has answered, kernels are compiled one by one here


def stop_compile_workers() -> None:
    """End these processes, which takes most of a second, while the last checkpoint is saved; torch
    would wait for them at exit."""
    if "torch._inductor.async_compile" in sys.modules:
        from torch._inductor.async_compile import shutdown_compile_workers

        threading.Thread(target=shutdown_compile_workers, daemon=True).start()


class CompileClock:
    """Measures the seconds of compilation; `begins` is called each time that it starts."""

    def __init__(self, *, begins: Callable[[], None] = lambda: None) -> None:
        from torch._dynamo.callback import callback_handler

        self.seconds = 0.0
        self._begins, self._since = begins, 0.0
        self._handler: Any = callback_handler
        self._handler.register_start_callback(self._started)
        self._handler.register_end_callback(self._ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._handler.remove_start_callback(self._started)
        self._handler.remove_end_callback(self._ended)

    def _started(self, reason: Any) -> None:
        self._since = time.monotonic()
        self._begins()

    def _ended(self, reason: Any) -> None:
        self.seconds += time.monotonic() - self._since
