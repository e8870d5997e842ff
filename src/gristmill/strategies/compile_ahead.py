"""Compiles a model's blocks and the optimizer's step at the same time, before a run needs them.

torch compiles one graph after the other, in one thread. The graphs of a model whose blocks are
compiled one by one do not depend on each other: at a cold start each is compiled by a process of
its own (`compile_part.py`), while the run itself builds the model and validates it. These processes
do nothing but fill the caches of the compilers, where the run finds everything, as if it were
started for the second time. What they cannot compile, the run compiles itself. Only the run tries
which variant of a kernel is the fastest, when it has the device for itself.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from gristmill.base.process import usable_cores
from gristmill.config.load import dump_run, load_text
from gristmill.config.model import GPTConfig
from gristmill.config.optim import MuonConfig
from gristmill.config.resolve import Resolved
from gristmill.config.schema import RunConfig
from gristmill.distributed.world import World
from gristmill.models.build import outline_model
from gristmill.models.spec import StagedModel

CORES = 8
"""With fewer, these processes would only slow each other down."""
THREADS = 4
"""That each uses to compile kernels."""
MEMORY_SHARE = 0.125
"""Of the device's memory, for the weights of all of these processes: each has a whole model."""
LIMIT = 300.0
"""Seconds after which the run goes on without them."""
BESIDE, UPDATE, KERNELS = "beside", "update", "kernels"
"""Parts of a run: what is beside the blocks, the optimizer's step, and kernels that are not the
compiler's. A number is a layer."""


@dataclass(frozen=True)
class CompileTask:
    """What a process needs to know to compile its part of a run."""

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
    config: RunConfig, *, vocab: int, world: World, numbers: Resolved, cuda_graphs: bool = False
) -> CompileAhead | None:
    """Begin to compile, if this run's graphs are known, not in the cache, and worth it."""
    if not _is_plain(config) or world.device.kind != "cuda" or world.place.world > 1:
        return None
    if usable_cores() < CORES or "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        return None
    parts = parts_of(config, vocab=vocab)
    size = sum(p.numel() for p in outline_model(config.model, vocab=vocab).parameters())
    memory = world.device.total_memory()
    if memory is None or 4 * size * len(parts) > MEMORY_SHARE * memory:
        return None
    sizes = (vocab, numbers.micro_batch, numbers.sequence)
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
    """What can be compiled by itself, the longest first."""
    model = cast(StagedModel, outline_model(config.model, vocab=vocab))
    update = [UPDATE] if isinstance(config.optim, MuonConfig) else []
    return [*map(str, model.distinct_layers()), *update, BESIDE, KERNELS]


def _key(task: CompileTask, device: str) -> str:
    """Names everything on which the graphs depend."""
    config = task.config
    train, runtime = config.train, config.runtime
    tables = (config.model, config.precision, config.optim)
    loss = (train.sampled_softmax, bool(train.second_token))
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
            with contextlib.suppress(OSError):  # no memory for a process, say
                self._processes.append(_start(task, {**threads, **os.environ}))
        atexit.register(self.close)

    def wait(self) -> None:
        """Wait until everything is compiled; counts as time of compiling."""
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
