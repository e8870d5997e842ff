"""Which documents a step of a run trained on, and which steps trained on a place of a token set.

Both follow from the settings in the run folder, and from its records, which say how many samples
were consumed after each step and which batches were skipped.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import Unit
from gristmill.config.load import load_run
from gristmill.config.resolve import Resolved, resolve
from gristmill.config.schema import RunConfig
from gristmill.data.build import build_stream
from gristmill.data.dataset import open_data
from gristmill.data.provenance import DocumentPart, TokenPlace, documents_of, samples_with
from gristmill.data.stream import SampleStream
from gristmill.hub.downloads import settings_folder
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import StepRecord
from gristmill.train.order import order_spec


@dataclass(frozen=True)
class RunSamples:
    """The samples of a run, by step."""

    folder: RunFolder
    config: RunConfig
    resolved: Resolved
    stream: SampleStream
    tokenizer: Tokenizer
    steps: Sequence[int]
    """The recorded steps, in order."""
    ends: Sequence[int]
    """The samples consumed after each of them."""

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        return self.steps[-1] if self.steps else 0

    def of_step(self, step: int) -> range:
        """The samples of a step."""
        if not 1 <= step <= max(self.last_step, self.resolved.steps):
            what = f"the run has the steps 1 to {max(self.last_step, self.resolved.steps)}"
            raise UserError(what, where=f"--step {step}", exit=Exit.USAGE)
        return range(self._after(step - 1), self._after(step))

    def was_left_out(self, step: int) -> bool:
        """Whether the run skipped the batch of a step, according to its records."""
        every = self.config.track.every
        each = every.unit is Unit.STEPS and every.amount == 1
        place = bisect.bisect_left(self.steps, step)
        recorded = place < len(self.steps) and self.steps[place] == step
        return each and step <= self.last_step and not recorded

    def step_of(self, sample: int) -> int | None:
        """The step that trained on a sample; None if the sample was skipped."""
        low, high = 1, self.last_step
        while low < high:
            middle = (low + high) // 2
            if self._after(middle) > sample:
                high = middle
            else:
                low = middle + 1
        trained = low <= self.last_step and sample < self._after(low)
        return low if trained and not self.was_left_out(low) else None

    def documents(self, sample: int) -> list[DocumentPart]:
        """The documents of a sample."""
        return documents_of(self.stream, sample)

    def with_places(
        self,
        places: Sequence[TokenPlace],
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Iterator[tuple[int, int]]:
        """Pairs of the number of a place and a step so far that trained on all of it."""
        done = self._after(self.last_step)
        found = samples_with(self.stream, places, samples=done, progress=progress)
        for place, sample in found:
            if (step := self.step_of(sample)) is not None:
                yield place, step

    def _after(self, step: int) -> int:
        """Samples consumed after a step: as recorded, or extrapolated from the last record before
        it."""
        place = bisect.bisect_right(self.steps, step) - 1
        known, samples = (self.steps[place], self.ends[place]) if place >= 0 else (0, 0)
        return self.resolved.ramp.samples_after(step - known, start=samples)


def open_samples(folder: Path) -> RunSamples:
    """The samples of the run in a folder."""
    run = RunFolder(folder)
    if not run.holds_run():
        what = "this is no run folder: there is no run.toml in it"
        raise UserError(what, where=folder, exit=Exit.DATA)
    config = load_run(folder, (), find_model=settings_folder)
    if config.data.kind != "tokens":
        raise UserError(
            f"the run trains on {config.data.kind}, and only token sets know where they come from",
            where="data.kind",
            exit=Exit.DATA,
        )
    tokenizer = open_tokenizer(run.tokenizer)
    steps, ends = _recorded(run)
    if config.train.batch is None and steps:
        # Given as micro-batches per process, and only the records have the number of processes.
        train = config.train.model_copy(
            update={"batch": ends[0] // steps[0], "micro_batch": None, "accumulate": None}
        )
        config = config.model_copy(update={"train": train})
    resolved = resolve(config, vocab=tokenizer.size)
    data = open_data(config.data, sequence=resolved.sequence)
    stream = build_stream(config.data, data.train, order_spec(config.data, resolved, run))
    return RunSamples(run, config, resolved, stream, tokenizer, steps, ends)


def _recorded(run: RunFolder) -> tuple[list[int], list[int]]:
    """The recorded steps of a run, and the samples consumed after each."""
    known = dict[int, int]()
    if run.metrics.is_file():
        for record in read_metrics(run.metrics, damaged=lambda line, why: None):
            if isinstance(record, StepRecord):
                known[record.step] = record.samples
    steps = sorted(known)
    return steps, [known[step] for step in steps]
