"""Task files of lm-evaluation-harness that nobody has vouched for, read as data.

Such a file may hold Python code: it can name Python functions (`!function`), classes, and metrics
whose code is fetched, and its templates can reach Python's internals. So only keys that hold data
are accepted. The file is read once, and the harness gets what was read instead of the file:

    task, output_type, metric_list (the harness's own metrics)     what is measured
    dataset_path (json, csv, parquet, text, or a name on the Hub)  where the questions are
    doc_to_text, doc_to_target, doc_to_choice, …                   templates, run in a sandbox
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Exit, UserError, optional
from gristmill.hub.client import parse_repository

TRUST = "--trust-task-code"
LARGEST = 2**20
"""Bytes of a task file."""
MOST_VALUES = 100_000
"""Values of a task file, aliases followed: a few lines of them can stand for billions."""
_FORMATS = ("json", "csv", "parquet", "text")
_METRICS = frozenset(
    "acc acc_norm acc_bytes acc_mutual_info perplexity word_perplexity byte_perplexity "
    "bits_per_byte exact_match exact_match_mc f1 mcc bleu chrf ter brier_score likelihood".split()
)
"""Metrics that come with the harness; it looks for others in repositories with code."""
_KEYS = frozenset(
    "task task_alias tag dataset_path dataset_name dataset_kwargs training_split validation_split "
    "test_split fewshot_split output_type doc_to_text doc_to_target doc_to_choice description "
    "target_delimiter fewshot_delimiter num_fewshot metric_list generation_kwargs repeats metadata "
    "filter_list should_decontaminate doc_to_decontamination_query gen_prefix".split()
)
_DATASET_KEYS = frozenset({"data_files", "data_dir", "revision", "streaming"})
_METRIC_KEYS = frozenset(
    "metric aggregation higher_is_better ignore_case ignore_punctuation ignore_numbers "
    "regexes_to_ignore".split()
)
_TAG = re.compile(r"tag '([^']{1,100})'")


def read_task_file(file: Path, *, including: Sequence[Path] = ()) -> dict[str, Any]:
    """The settings of a task, those of the files that it includes among them; refuses a file that
    could make the harness run code."""
    yaml = optional("yaml", extra="eval", purpose="reading a task file")
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST + 1)
        value = yaml.safe_load(content) if len(content) <= LARGEST else None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=file) from error
    except yaml.constructor.ConstructorError as error:
        named = _TAG.search(str(error))
        raise _code(f"it has the tag {named[1] if named else '!'!r}", file) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"not a task file: {first}", where=file) from error
    if not isinstance(value, dict) or not _bounded(value):
        raise DataError("not a task file, or larger than any", where=file)
    included = value.pop("include", [])
    whole: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        other = file.parent / str(name)
        if other in including or len(including) > 8:
            raise DataError("task files include each other", where=file)
        whole |= read_task_file(other, including=(*including, file))
    whole |= value
    _require_data(whole, file)
    return whole


@contextlib.contextmanager
def sandboxed_templates() -> Iterator[None]:
    """The harness renders templates in Jinja's sandbox."""
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils

    theirs = utils.env
    sandbox: Any = ImmutableSandboxedEnvironment(
        loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True
    )
    sandbox.filters["regex_replace"] = theirs.filters["regex_replace"]
    utils.env = sandbox
    try:
        yield
    finally:
        utils.env = theirs


def _require_data(settings: Mapping[str, Any], file: Path) -> None:
    """Refuse what could be code, or lead to some."""
    for key in settings:
        if key not in _KEYS:
            raise _code(f"it has the key {str(key)[:100]!r}", file)
    place = settings.get("dataset_path")
    if place is not None and place not in _FORMATS:
        on_hub = isinstance(place, str) and "/" in place and parse_repository(place) is not None
        if not on_hub or Path(place).exists():
            formats = ", ".join(_FORMATS)
            raise _code(f"its dataset_path is neither {formats} nor a name on the Hub", file)
    for key, allowed in (("dataset_kwargs", _DATASET_KEYS), ("metric_list", _METRIC_KEYS)):
        given = settings.get(key) or {}
        for entry in given if isinstance(given, list) else [given]:
            others = set(entry) - allowed if isinstance(entry, dict) else {entry}
            if others:
                raise _code(f"its {key} has {str(min(map(str, others)))[:100]!r}", file)
            metric = entry.get("metric", "acc")
            if metric not in _METRICS:
                raise _code(f"the harness has no metric {str(metric)[:100]!r} of its own", file)


def _code(what: str, file: Path) -> UserError:
    return UserError(
        f"this task file may run Python code, which nobody has allowed: {what}",
        where=str(file),
        remedy="if you trust it and what it names, measure it with `gristmill evaluate MODEL "
        f"--tasks {file} {TRUST}`; a run file cannot allow it",
        exit=Exit.REFUSED,
    )


def _bounded(value: Any) -> bool:
    """Whether a walk through a value, with what it shares visited again, comes to an end soon."""
    left, waiting = MOST_VALUES, [value]
    while waiting and left:
        item, left = waiting.pop(), left - 1
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return left > 0
