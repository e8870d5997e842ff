"""The `Run` class: training, evaluation and generation in Python, as on the command line.

    run = Run.open("run.toml", "optim.lr=3e-4")
    run.train()                    lock the folder -> build -> resume -> train -> outcome
    run.evaluate(text="book.txt")
    run.generate("Once upon a time")

In a program started by torchrun, srun or mpirun, every process makes the same calls, and they train
together. Rank 0 locks the folder and writes everything in it, except the other ranks' checkpoint
shards and logs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo, process_began
from gristmill.config.load import load_run
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.distributed.device import free_unused, memory_explained
from gristmill.distributed.liveness.monitor import Monitor
from gristmill.distributed.liveness.verdict import Limits
from gristmill.evaluate.results import EvaluationResult
from gristmill.hub.downloads import settings_folder
from gristmill.model import Model
from gristmill.plan.explain import TooLittleMemory
from gristmill.track.folder import run_folder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import Record
from gristmill.train.assemble import assemble, build_content_check
from gristmill.train.build import close_run_world, device_mesh, open_run_world
from gristmill.train.claim import FolderClaim
from gristmill.train.elastic import train_elastic
from gristmill.train.replay import Replay, replay_step
from gristmill.train.stop import StopRequest
from gristmill.train.training import Outcome, Training, located_errors, with_horizon
from gristmill.train.validate import Validated, validate_run


class Run:
    """A run: its settings and its folder."""

    def __init__(self, config: RunConfig, *, translation: str = "") -> None:
        """`translation`: the translated command of another program, for origin.txt."""
        self.config = config
        self._folder = run_folder(config, translation=translation)

    @classmethod
    def open(cls, source: str | Path, *settings: str) -> Run:
        """The run of a run file, or of a run folder. `settings` override those of the file, as on
        the command line: "optim.lr=3e-4"."""
        return cls(load_run(Path(source), settings, find_model=settings_folder))

    @property
    def folder(self) -> Path:
        """The run folder, which need not exist yet."""
        return self._folder.path

    @property
    def status(self) -> dict[str, Any]:
        """The content of status.json: state, step and more. Empty before the first start."""
        return self._folder.read_status()

    def records(self) -> Iterator[Record]:
        """All records of the run so far: steps, validations, samples, events and others."""
        if self._folder.metrics.is_file():
            yield from read_metrics(self._folder.metrics, damaged=lambda line, why: None)

    # ------------------------------------------------------------------ training

    def train(
        self,
        *,
        fresh: bool = False,
        start_from: str | None = None,
        stop: StopRequest | None = None,
        fit: bool = False,
        ends_process: bool = False,
    ) -> Outcome:
        """Train, or resume from the newest intact checkpoint. Signals stop training after a step,
        with a checkpoint.

        `fresh` moves an existing run aside and starts over; `start_from`, a step or "best", goes
        back to that checkpoint. `stop` already handles signals; if None, this call does. `fit`
        reduces the micro-batch, or recomputes activations, if the run does not fit into memory.
        `ends_process`: nothing else will be compiled in this process.
        """
        place = ProcessInfo.current()
        mesh = device_mesh(self.config, place)
        # A user's program may have run for a while before this call.
        began = time.time() if stop is None else process_began()
        elastic = self.config.parallel.elastic and place.world > 1
        claim = FolderClaim(self._folder, fresh=fresh, start_from=start_from)
        with contextlib.nullcontext(stop) if stop is not None else StopRequest() as stop:
            if elastic and fit:
                what = "--fit is for runs whose processes all stay to the end"
                raise UserError(what, where="parallel.elastic", remedy="leave out --fit")
            if elastic:
                return train_elastic(self.config, claim, place, mesh, stop=stop, began=began)
            return self._train_together(
                *(claim, place, mesh), stop=stop, began=began, fit=fit, ends_process=ends_process
            )

    def _train_together(
        self,
        claim: FolderClaim,
        place: ProcessInfo,
        mesh: Mesh,
        *,
        stop: StopRequest,
        began: float,
        fit: bool,
        ends_process: bool,
    ) -> Outcome:
        """Train with a fixed set of processes."""
        config, folder = self.config, self._folder
        with self._monitored(place) as monitor:
            world = open_run_world(config, mesh, place)
            control = world.control_group("run")
            with claim, memory_explained("free some, or use a machine with more"):
                control.on_rank0(claim.take)
                while True:
                    built = assemble(config, folder, world, control, saves=True, fit=fit)
                    check = build_content_check(built)
                    control.on_all_ranks(check.start)
                    try:
                        training = Training(
                            built,
                            stop=stop,
                            monitor=monitor,
                            check=check,
                            began=began,
                            given=self.config,
                            fit=fit,
                            ends_process=ends_process,
                        )
                        outcome = training.to_the_end()
                    except TooLittleMemory as error:
                        if not error.retries or error.change is None:
                            raise
                        config = error.change.config
                        del built, training
                    else:
                        if outcome.until is None:
                            break
                        # The schedule and the order of samples follow from the horizon, so the run
                        # resumes from what it has just saved.
                        config = with_horizon(folder, outcome.until)
                        del built, training
                    finally:
                        check.stop()
                    free_unused(world.device)
        # Not after an error: the other ranks may never answer.
        close_run_world(world)
        return outcome

    @contextlib.contextmanager
    def _monitored(self, place: ProcessInfo) -> Iterator[Monitor]:
        """The monitor, which ends this process if another one is lost."""
        limits = Limits.of(self.config.parallel, save=self.config.checkpoint.timeout)
        monitor = Monitor(place, limits=limits, log=self._folder.rank_log(place.rank))
        with located_errors(self._folder, monitor), monitor:
            yield monitor

    def validate(self, *, checkpoint: str | None = None) -> Validated:
        """The run's own validation at its newest intact checkpoint, or at a step or "best",
        compared with the record from that step. Changes nothing."""
        return validate_run(self.config, checkpoint=checkpoint)

    def replay(
        self, step: int, *, progress: Callable[[int, int, int], None] = lambda *done: None
    ) -> Replay:
        """Compute a step twice more, to tell a faulty device from a bad batch. Changes nothing.
        `progress` is called with the round, the step and the first step."""
        return replay_step(self.config, step, progress=progress)

    # ------------------------------------------------------------------ the model

    def model(self, *, checkpoint: str | int = "latest", device: str = "auto") -> Model:
        """The model of a checkpoint: "latest", "best" or a step."""
        if self._folder.newest_step() is None:
            what = "this run has no checkpoint yet"
            raise UserError(what, where=self.folder, remedy="train it first", exit=Exit.DATA)
        return Model.open(self.folder, checkpoint=checkpoint, device=device)

    def generate(self, prompt: str = "", **options: Any) -> str:
        """Continue a text with the newest model; `options` are those of `Model.generate`."""
        return self.model().generate(prompt, **options)

    def evaluate(self, **options: Any) -> list[EvaluationResult]:
        """Measure the newest model on text and tasks; `options` are those of `Model.evaluate`."""
        return self.model().evaluate(**options)
