"""Tasks of lm-evaluation-harness (the extra `eval`), with our model behind its `LM` interface.

A task is given by its name in the harness, or by its YAML file. Such a file may hold Python code,
which runs only if the command line allows it; otherwise the file is read as data (`task_files.py`).
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.base.errors import DataError, UserError, optional
from gristmill.base.files import sha256_text
from gristmill.checkpoint.model import LoadedModel
from gristmill.evaluate.measures import Measure, function_of_mean
from gristmill.evaluate.questions import Option, encode_options
from gristmill.evaluate.results import EvaluationResult
from gristmill.evaluate.scoring import Continuation, Truncation, score
from gristmill.evaluate.task_files import read_task_file, sandboxed_templates
from gristmill.generate.sampling import Sampling
from gristmill.generate.text import TextGenerator
from gristmill.text.filters.contamination import TaskTexts

SUFFIXES = (".yaml", ".yml")
PACKAGE = "lm_eval"
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
                report: Any = simple_evaluate(
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
        return [_result(name, report, model, seconds=seconds) for name in _reported(report)]

    def texts(self) -> list[TaskTexts]:
        """The items of the task, or of all tasks of a group."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            if self.settings is not None:
                stack.enter_context(sandboxed_templates())
            wanted = self.name if self.settings is None else deepcopy(self.settings)
            try:
                return [_texts_of(*named) for named in _single_tasks(self.manager, wanted)]
            except Exception as error:  # data that cannot be reached, among many others
                reason = f"{type(error).__name__}: {_line(error)}"
                what = f"the items of {self.name!r} cannot be read: {reason}"
                raise DataError(what, where=self.where) from error


def _single_tasks(manager: Any, wanted: Any) -> Iterator[tuple[str, Any]]:
    """A task, or those of a group, by their names."""
    if hasattr(manager, "load"):
        yield from manager.load([wanted])["tasks"].items()
        return
    # Before version 0.4.10.
    from lm_eval.tasks import get_task_dict

    groups = [get_task_dict([wanted], manager)]
    while groups:
        for name, task in groups.pop().items():
            if isinstance(task, Mapping):
                groups.append(task)
            else:
                yield str(name), task


def _texts_of(name: str, task: Any) -> TaskTexts:
    delimiter = str(getattr(task.config, "target_delimiter", " "))
    texts = []
    for row in task.eval_docs:
        question, answer = task.doc_to_text(row), task.doc_to_target(row)
        choices = task.doc_to_choice(row) if task.config.doc_to_choice is not None else None
        if isinstance(question, int) and choices is not None:
            # The contexts are the choices, and what follows is the same after all.
            texts.append(f"{choices[question]}{delimiter}{answer}")
            continue
        if isinstance(answer, int) and choices is not None:
            answer = choices[answer]
        answers = answer if isinstance(answer, list) else [answer]
        texts.append(f"{question}{delimiter}{answers[0] if answers else ''}")
    return TaskTexts(name, f"lm_eval {name}", sha256_text("\n".join(texts)), texts)


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


def _reported(report: Any) -> list[str]:
    """The tasks and groups that have numbers, groups first."""
    groups = list(report.get("groups", {}))
    return [*groups, *(name for name in report["results"] if name not in groups)]


def _result(name: str, report: Any, model: Any, *, seconds: float) -> EvaluationResult:
    values, samples = report["results"][name], report.get("samples", {}).get(name, [])
    measures = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if metric.endswith("_stderr") or not filtered or not isinstance(value, int | float):
            continue
        title = metric if filtered == "none" else f"{metric} ({filtered})"
        measures[title] = _measure(
            float(value),
            values.get(f"{metric}_stderr,{filtered}"),
            [sample.get(metric) for sample in samples if sample.get("filter", "none") == filtered],
        )
    count = len({sample.get("doc_id", number) for number, sample in enumerate(samples)})
    count = count or int(values.get("sample_len", 0))
    facts = {
        "lm_eval": importlib.metadata.version(PACKAGE),
        "version": report.get("versions", {}).get(name),
        "shots": report.get("n-shot", {}).get(name),
        "items_sha256": _hash(samples),
    }
    notes = tuple[str, ...]()
    if model.truncation.count:
        notes = (f"{model.truncation.count:,} prompts were longer than the context and were cut",)
    return EvaluationResult(name, measures, count=count, seconds=seconds, facts=facts, notes=notes)


def _measure(value: float, stderr: Any, items: Sequence[Any]) -> Measure:
    known = stderr if isinstance(stderr, int | float) else None
    numbers = [float(item) for item in items if isinstance(item, bool | int | float)]
    if numbers and len(numbers) == len(items):
        ours = function_of_mean(numbers, value=value)
        # If the number is not the mean of its items, only the harness knows its error.
        if abs(sum(numbers) / len(numbers) - value) < 1e-9:
            return Measure(value, ours.stderr if known is None else float(known), ours.items)
    return Measure(value, None if known is None else float(known))


def _hash(samples: Sequence[Any]) -> str | None:
    """One hash over those that the harness computes of all items."""
    hashes = [str(sample.get("doc_hash")) for sample in samples]
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
            answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
            for numbers, options in zip(by_context.values(), scores, strict=True):
                for number, option in zip(numbers, options, strict=True):
                    answers[number] = option.log_prob, option.greedy
            return answers

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
            return [sum(window.log_prob for window in text) for text in scores]

        def generate_until(self, requests: list[Any]) -> list[str]:
            texts, done = [""] * len(requests), 0
            groups: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                groups.setdefault(str(sorted(request.args[1].items())), []).append(number)
            for numbers in groups.values():
                prompts = [self._prompt(requests[number]) for number in numbers]
                wanted = self._wanted(requests[numbers[0]])
                for place, text in self.generator.complete(prompts, **wanted):
                    texts[numbers[place]], done = text, done + 1
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
                "stop": [until] if isinstance(until, str) else [text for text in until if text],
                "sampling": Sampling(temperature, 0, float(options.get("top_p", 1.0))),
            }

    return HarnessModel()


def _window(pair: tuple[list[int], list[int]]) -> Continuation:
    before, scored = pair
    return Continuation((*before, *scored), len(before))
