"""Tasks of lm-evaluation-harness (the extra `eval`), with our model behind its `LM` interface.

A task is given by the name that the harness knows it by, or by its YAML file. Such a file may hold
Python code, which runs only if the command line allows it: see `task_files`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import io
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.base.errors import DataError, UserError, optional
from gristmill.checkpoint.model import LoadedModel
from gristmill.evaluate.measures import Measure, function_of_mean
from gristmill.evaluate.results import EvaluationResult
from gristmill.evaluate.scoring import Continuation, Truncation, score
from gristmill.evaluate.tasks.spec import Option, encode_options
from gristmill.evaluate.tasks.task_files import read_task_file, sandboxed_templates
from gristmill.generate import Sampling, TextGenerator

SUFFIXES = (".yaml", ".yml")
PACKAGE = "lm_eval"
LARGEST_BATCH = 64
"""Texts that are generated at once."""
BOOTSTRAPS = 1000
"""Samples for the standard errors that the harness finds by resampling."""
_NAME = re.compile(r"^task:\s*['\"]?([^'\"#\s]+)", re.MULTILINE)


@dataclass(frozen=True)
class HarnessTask:
    """A task that the harness knows."""

    name: str
    manager: Any
    where: str
    settings: dict[str, Any] | None = None
    """The settings of a task file that is only data; None if the harness reads the file itself."""

    def run(
        self,
        loaded: LoadedModel,
        *,
        items: int | None,
        shots: int | None,
        progress: Callable[[int, int], None],
    ) -> list[EvaluationResult]:
        """The results of the task; a group of tasks has its own first, then one for each."""
        started, model = time.monotonic(), language_model(loaded, progress)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(_own_random_numbers(loaded.model.device))
            if self.settings is not None:
                stack.enter_context(sandboxed_templates())
            from lm_eval.evaluator import simple_evaluate

            try:
                found: Any = simple_evaluate(
                    model=model,
                    tasks=[self.name if self.settings is None else deepcopy(self.settings)],
                    task_manager=self.manager,
                    num_fewshot=shots,
                    limit=items,
                    bootstrap_iters=BOOTSTRAPS,
                )
            except UserError:
                raise
            except Exception as error:  # data that cannot be reached, among many others
                reason = f"{type(error).__name__}: {_line(error)}"
                raise DataError(
                    f"lm-evaluation-harness cannot run {self.name!r}: {reason}",
                    where=self.where,
                    remedy="check the network, or give a task file with local data: FILE.yaml",
                ) from error
        seconds = time.monotonic() - started
        return [_result(one, found, model, seconds=seconds) for one in _reported(found)]


def open_harness_task(task: str, *, where: str, trust: bool = False) -> HarnessTask:
    """A task by its name, or by its YAML file, whose code runs only if it is trusted."""
    file, settings = Path(task), None
    if file.suffix in SUFFIXES and not trust:
        # Before the harness is imported: that takes seconds.
        settings = read_task_file(file)
        if not isinstance(settings.get("task"), str):
            raise _no_task(file)
    optional(PACKAGE, extra="eval", purpose=f"the task {task!r}")
    with _quiet():
        from lm_eval.tasks import TaskManager

        if file.suffix not in SUFFIXES:
            manager = TaskManager()
            if not manager.match_tasks([task]):
                near = difflib.get_close_matches(task, manager.all_tasks, n=3)
                raise UserError(
                    f"there is no task {task!r}",
                    where=where,
                    remedy=f"similar names: {', '.join(near)}" if near else "see lm-eval ls tasks",
                )
            return HarnessTask(task, manager, where)
        if settings is not None:
            manager = TaskManager(include_defaults=False)
            return HarnessTask(settings["task"], manager, where, settings)
        try:
            name = _NAME.search(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", where=file) from error
        if name is None:
            raise _no_task(file)
        manager = TaskManager(include_path=str(file.parent), include_defaults=False)
        return HarnessTask(name[1], manager, where)


def _no_task(file: Path) -> DataError:
    remedy = "it needs a line `task: NAME`"
    return DataError("the file names no task", where=file, remedy=remedy)


# ------------------------------------------------------------------ results


def _reported(found: Any) -> list[str]:
    """The tasks and groups that have numbers, groups first."""
    groups = list(found.get("groups", {}))
    return [*groups, *(name for name in found["results"] if name not in groups)]


def _result(name: str, found: Any, model: Any, *, seconds: float) -> EvaluationResult:
    values, samples = found["results"][name], found.get("samples", {}).get(name, [])
    measures = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if metric.endswith("_stderr") or not filtered or not isinstance(value, int | float):
            continue
        title = metric if filtered == "none" else f"{metric} ({filtered})"
        measures[title] = _measure(
            float(value),
            values.get(f"{metric}_stderr,{filtered}"),
            [one.get(metric) for one in samples if one.get("filter", "none") == filtered],
        )
    count = len({one.get("doc_id", number) for number, one in enumerate(samples)})
    count = count or int(values.get("sample_len", 0))
    facts = {
        "lm_eval": importlib.metadata.version(PACKAGE),
        "version": found.get("versions", {}).get(name),
        "shots": found.get("n-shot", {}).get(name),
        "items_sha256": _hash(samples),
    }
    notes = tuple[str, ...]()
    if model.truncation.count:
        notes = (f"{model.truncation.count:,} prompts were longer than the context and were cut",)
    return EvaluationResult(name, measures, count=count, seconds=seconds, facts=facts, notes=notes)


def _measure(value: float, stderr: Any, items: Sequence[Any]) -> Measure:
    known = stderr if isinstance(stderr, int | float) else None
    numbers = [float(one) for one in items if isinstance(one, bool | int | float)]
    if numbers and len(numbers) == len(items):
        ours = function_of_mean(numbers, value=value)
        # If the number is not the mean of its items, only the harness knows its error.
        if abs(sum(numbers) / len(numbers) - value) < 1e-9:
            return Measure(value, ours.stderr if known is None else float(known), ours.items)
    return Measure(value, None if known is None else float(known))


def _hash(samples: Sequence[Any]) -> str | None:
    """One hash over those that the harness computes of all items."""
    from gristmill.base.files import sha256_text

    hashes = [str(one.get("doc_hash")) for one in samples]
    return sha256_text("\n".join(hashes)) if hashes else None


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no reason given"


@contextlib.contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """The harness seeds all generators; a run that trains must not notice."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness and its libraries print warnings and progress bars of their own."""
    import tqdm

    for name in ("lm_eval", "lm-eval", "datasets", "evaluate", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    bar: Any = tqdm.tqdm
    shown = bar.__init__
    bar.__init__ = functools.partialmethod(shown, disable=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        bar.__init__ = shown


# ------------------------------------------------------------------ the model


def language_model(loaded: LoadedModel, progress: Callable[[int, int], None] | None) -> Any:
    """The model as the harness calls it; its base class is imported only here."""
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer, context = loaded.tokenizer, loaded.model.config.context

    class HarnessModel(LM):  # type: ignore[misc]
        """Log-likelihoods and greedy texts of our model."""

        def __init__(self) -> None:
            super().__init__()
            self.truncation = Truncation()
            self.generator = TextGenerator(loaded.model, tokenizer)

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            by_context: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                by_context.setdefault(request.args[0], []).append(number)
            questions = encode_options(
                tokenizer,
                [
                    [Option(*requests[number].args) for number in numbers]
                    for numbers in by_context.values()
                ],
            )
            scores = score(loaded.model, questions, progress=progress, truncation=self.truncation)
            found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
            for numbers, options in zip(by_context.values(), scores, strict=True):
                for number, one in zip(numbers, options, strict=True):
                    found[number] = one.log_prob, one.greedy
            return found

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            first = (tokenizer.prefix or (tokenizer.end_of_text,))[-1]
            windows = [
                [
                    _window(make_disjoint_window(pair))
                    for pair in get_rolling_token_windows(
                        token_list=tokenizer.encode(request.args[0]),
                        prefix_token=first,
                        max_seq_len=context,
                        context_len=1,
                    )
                ]
                for request in requests
            ]
            scores = score(loaded.model, windows, progress=progress)
            return [sum(one.log_prob for one in options) for options in scores]

        def generate_until(self, requests: list[Any]) -> list[str]:
            texts, done = [""] * len(requests), 0
            groups: dict[tuple[int, str], list[int]] = {}
            prompts = [self._prompt(request) for request in requests]
            for number, request in enumerate(requests):
                key = (len(prompts[number]), str(sorted(request.args[1].items())))
                groups.setdefault(key, []).append(number)
            for numbers in groups.values():
                for begin in range(0, len(numbers), LARGEST_BATCH):
                    batch = numbers[begin : begin + LARGEST_BATCH]
                    wanted = self._wanted(requests[batch[0]])
                    found = self.generator.complete([prompts[n] for n in batch], **wanted)
                    for number, text in zip(batch, found, strict=True):
                        texts[number] = text
                    done += len(batch)
                    if progress is not None:
                        progress(done, len(requests))
            return texts

        def _prompt(self, request: Any) -> list[int]:
            ids = [*tokenizer.prefix, *tokenizer.encode(request.args[0])]
            room = context - self._wanted(request)["tokens"]
            if len(ids) > room:
                self.truncation.count += 1
            return ids[-room:] or [tokenizer.end_of_text]

        def _wanted(self, request: Any) -> dict[str, Any]:
            options = request.args[1]
            until = options.get("until") or []
            tokens = int(options.get("max_gen_toks") or options.get("max_new_tokens") or 256)
            greedy = not options.get("do_sample", False)
            temperature = 0.0 if greedy else float(options.get("temperature", 1.0))
            return {
                "tokens": min(tokens, max(1, context // 2)),
                "stop": [until] if isinstance(until, str) else [one for one in until if one],
                "sampling": Sampling(temperature, 0, float(options.get("top_p", 1.0))),
            }

    return HarnessModel()


def _window(pair: tuple[list[int], list[int]]) -> Continuation:
    before, scored = pair
    return Continuation((*before, *scored), len(before))
