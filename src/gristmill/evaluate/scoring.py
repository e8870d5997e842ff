"""Log-likelihoods of continuations, with what several of them have in common computed once.

The options of one question usually share a long beginning:

    ids      The man turned on the tap, so | the floor got wet
             The man turned on the tap, so | water came out
             ------ prefix ----------- ------ branch --------     a continuation begins at |

A prefix is computed once and its cache is copied to all branches. A branch begins one token before
the earliest continuation, so that the logits of its first token are there. Questions with prefixes
of about the same length form a batch, and the shortest of them is the prefix of all: nothing is
padded on the left, so no mask is needed. The branches of a batch are computed in groups of about
the same length, since they are padded on the right, which a causal model never sees. The head
computes logits for the continuations only: for GPT-2 small it is a third of the work.

Shapes: B rows, T positions, N scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from gristmill.base.errors import DataError, UserError
from gristmill.models.cache import Cache
from gristmill.models.spec import CausalLM


@dataclass(frozen=True)
class BatchLimits:
    """How much is computed at once."""

    positions: int
    """Positions of a batch, at most."""
    logit_bytes: int
    """Memory for the fp32 logits of a group of branches."""
    least: int
    """Positions that are worth a pass of their own, so that padding may be avoided."""


LIMITS = {"cpu": BatchLimits(4096, 2**28, 64), "gpu": BatchLimits(65536, 2**31, 4096)}
SHORTEST_PREFIX = 8
"""Shorter ones are not worth a pass of their own."""
MOST_WASTE = 0.1
"""Positions computed for nothing, as a share of those that are needed."""


class Continuation(NamedTuple):
    """A sequence of ids, of which those from `start` on are scored."""

    ids: tuple[int, ...]
    start: int


class Score(NamedTuple):
    """How likely a continuation is."""

    log_prob: float
    """Summed over its tokens, in nats."""
    greedy: bool
    """Whether greedy decoding would generate it."""
    tokens: int


@dataclass(frozen=True)
class _Row:
    """One input of the model, and the continuations that are read from it."""

    ids: tuple[int, ...]
    scored: tuple[tuple[int, Continuation], ...]
    """Continuations with their number in the question."""

    @property
    def first(self) -> int:
        """The first position whose logits are needed."""
        return min(span.start for _, span in self.scored) - 1


@dataclass(frozen=True)
class _Question:
    """The rows of one question."""

    number: int
    rows: tuple[_Row, ...]
    prefix: int
    """Ids that all rows share and whose logits are not needed."""

    @property
    def positions(self) -> int:
        """Positions computed if nothing is padded."""
        return self.prefix + sum(len(row.ids) - self.prefix for row in self.rows)


@dataclass
class Truncation:
    """How many continuations lost the beginning of their context, which was too long."""

    count: int = 0


def score(
    model: CausalLM,
    questions: Sequence[Sequence[Continuation]],
    *,
    progress: Callable[[int, int], None] | None = None,
    truncation: Truncation | None = None,
) -> list[list[Score]]:
    """The scores of the continuations of every question.

    Sequences longer than the model's context lose their beginning.
    """
    results: list[list[Score]] = [[] for _ in questions]
    prepared = [
        _rows(number, question, model, truncation or Truncation())
        for number, question in enumerate(questions)
        if question
    ]
    done = 0
    for batch in _batches(prepared, model):
        for number, scores in _score_batch(model, batch):
            results[number] = scores
        done += len(batch)
        if progress is not None:
            progress(done, len(questions))
    return results


# ------------------------------------------------------------------ from questions to batches


def _rows(
    number: int, question: Sequence[Continuation], model: CausalLM, truncation: Truncation
) -> _Question:
    cut = [_cut(continuation, model.config.context, truncation) for continuation in question]
    by_input: dict[tuple[int, ...], list[tuple[int, Continuation]]] = {}
    for place, continuation in enumerate(cut):
        by_input.setdefault(continuation.ids[:-1], []).append((place, continuation))
    rows = tuple(_Row(ids, tuple(scored)) for ids, scored in by_input.items())
    prefix = 0
    if len(rows) > 1:
        most = min(row.first for row in rows)
        prefix = common_length([row.ids[:most] for row in rows])
    return _Question(number, rows, prefix if prefix >= SHORTEST_PREFIX else 0)


def _cut(continuation: Continuation, context: int, truncation: Truncation) -> Continuation:
    assert 0 < continuation.start < len(continuation.ids), (
        "there is something to score, and something before it"
    )
    dropped = len(continuation.ids) - (context + 1)
    if dropped <= 0:
        return continuation
    if dropped >= continuation.start:
        length = len(continuation.ids) - continuation.start
        raise UserError(
            f"a text to score has {length} tokens, more than the model's context of {context}",
            where="evaluate",
            remedy="use a model with a longer context, or leave this task out",
        )
    truncation.count += 1
    return Continuation(continuation.ids[dropped:], continuation.start - dropped)


def common_length(rows: Sequence[tuple[int, ...]]) -> int:
    """The length of what all rows begin with."""
    # The smallest and the largest in the order of tuples differ first.
    low, high = min(rows), max(rows)
    for place, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return place
    return min(len(low), len(high))


def _batches(questions: list[_Question], model: CausalLM) -> Iterator[list[_Question]]:
    """Questions with prefixes of similar lengths, the longest first."""
    limits = _limits(model)
    if model.new_cache(1) is None:
        questions = [replace(question, prefix=0) for question in questions]
    batch: list[_Question] = []
    needed = computed = 0
    longest = sorted(
        questions, key=lambda question: (question.prefix, len(question.rows[0].ids)), reverse=True
    )
    for question in longest:
        # It has the shortest prefix, which the others would have to make do with.
        before = batch[-1].prefix if batch else 0
        rows = sum(len(question.rows) - 1 for question in batch) if before != question.prefix else 0
        more = (before - question.prefix) * rows
        wasted = computed + more - needed
        full = computed + more + question.positions > limits.positions
        if batch and (full or (wasted > MOST_WASTE * needed and needed >= limits.least)):
            yield batch
            batch, needed, computed, more = [], 0, 0, 0
        batch.append(question)
        needed, computed = needed + question.positions, computed + more + question.positions
    if batch:
        yield batch


def _limits(model: CausalLM) -> BatchLimits:
    return LIMITS["cpu" if model.device.type == "cpu" else "gpu"]


def _groups(rows: list[_PlacedRow], prefix: int, model: CausalLM) -> Iterator[list[_PlacedRow]]:
    """Branches of similar lengths, the longest first, within the memory for their logits."""
    limits = _limits(model)
    most_scored = limits.logit_bytes // (4 * model.vocab)
    group: list[_PlacedRow] = []
    needed = scored = longest = 0
    for placed in sorted(rows, key=lambda placed: len(placed.row.ids), reverse=True):
        length = len(placed.row.ids) - prefix
        longest = longest or length
        padded = (len(group) + 1) * longest
        waste = padded - needed - length
        many = scored + len(placed.row.ids) - placed.row.first > most_scored
        if group and (many or (waste > MOST_WASTE * needed and needed >= limits.least)):
            yield group
            group, needed, scored, longest = [], 0, 0, length
        group.append(placed)
        needed, scored = needed + length, scored + len(placed.row.ids) - placed.row.first
    if group:
        yield group


# ------------------------------------------------------------------ a batch


def _score_batch(model: CausalLM, batch: list[_Question]) -> Iterator[tuple[int, list[Score]]]:
    """The number and the scores of each question; a batch that needs too much memory is halved."""
    try:
        yield from _computed(model, batch)
        return
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
    middle = len(batch) // 2
    yield from _score_batch(model, batch[:middle])
    yield from _score_batch(model, batch[middle:])


class _PlacedRow(NamedTuple):
    """A row, and which question of its batch it belongs to."""

    question: int
    row: _Row


@torch.inference_mode()
def _computed(model: CausalLM, batch: list[_Question]) -> list[tuple[int, list[Score]]]:
    device, prefix = model.device, min(question.prefix for question in batch)
    rows = [_PlacedRow(place, row) for place, question in enumerate(batch) for row in question.rows]
    cache = None
    if prefix:
        cache = model.new_cache(max(len(placed.row.ids) for placed in rows))
        starts_BT = torch.tensor([question.rows[0].ids[:prefix] for question in batch])
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        model(starts_BT.to(device), cache=cache, logits_at_N=nothing)
    scores: list[dict[int, Score]] = [{} for _ in batch]
    for group in _groups(rows, prefix, model):
        options = {}
        if cache is not None:
            chosen = torch.tensor([placed.question for placed in group], device=device)
            options["cache"] = cache.branch(chosen)
        for question, option, score in _score_rows(model, group, prefix, options):
            scores[question][option] = score
    return [
        (question.number, [by_option[option] for option in sorted(by_option)])
        for question, by_option in zip(batch, scores, strict=True)
    ]


def _score_rows(
    model: CausalLM, group: list[_PlacedRow], prefix: int, options: dict[str, Cache]
) -> Iterator[tuple[int, int, Score]]:
    """Question, option and score of every continuation of a group of rows."""
    device, longest = model.device, max(len(placed.row.ids) for placed in group) - prefix
    tokens_BT = torch.zeros((len(group), longest), dtype=torch.int64)
    at, targets = list[int](), list[int]()
    for number, (_, row) in enumerate(group):
        tokens_BT[number, : len(row.ids) - prefix] = torch.tensor(row.ids[prefix:])
        for _, span in row.scored:
            first = number * longest - prefix
            at += range(first + span.start - 1, first + len(span.ids) - 1)
            targets += span.ids[span.start :]
    at_N = torch.tensor(at, device=device)
    logits_NV = model(tokens_BT.to(device), logits_at_N=at_N, **options)
    assert isinstance(logits_NV, torch.Tensor)
    log_probs, right = _judge(logits_NV, torch.tensor(targets, device=device))
    place = 0
    for question, row in group:
        for option, span in row.scored:
            end = place + len(span.ids) - span.start
            yield (
                question,
                option,
                Score(sum(log_probs[place:end]), all(right[place:end]), end - place),
            )
            place = end


def _judge(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[list[float], list[bool]]:
    """The log-probability of every target, and whether it is the most likely token."""
    logits_NV = logits_NV.float()
    picked_N = logits_NV.gather(1, targets_N[:, None])[:, 0] - logits_NV.logsumexp(dim=-1)
    if not picked_N.isfinite().all():
        raise DataError("the model computes NaN or infinite logits, so it scores nothing")
    return picked_N.tolist(), (logits_NV.argmax(dim=-1) == targets_N).tolist()
