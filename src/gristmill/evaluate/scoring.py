"""Log-likelihoods of continuations, with what several of them have in common computed once.

The options of one question usually share a long beginning:

    ids      The man turned on the tap, so | the floor got wet
             The man turned on the tap, so | water came out
             ------ prefix ----------- ------ branch --------     a continuation begins at |

A prefix is computed once and its cache is copied to all branches. A branch begins one token before
the earliest continuation, so that the logits of its first token are there. Questions of about the
same length form a batch, and the shortest prefix of a batch is the prefix of all: nothing is padded
on the left, so no mask is needed. Padding on the right is never seen by a causal model. The head
computes logits for the continuations only, which for a small model is half of the work.

Shapes: B rows, T positions, N scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from gristmill.base.errors import DataError, UserError
from gristmill.models.spec import CausalLM

CPU_TOKENS, GPU_TOKENS = 4096, 65536
"""Positions that a batch may have."""
CPU_LOGIT_BYTES, GPU_LOGIT_BYTES = 2**28, 2**31
"""Memory allowed for the fp32 logits of a batch."""
SHORTEST_PREFIX = 8
"""Shorter ones are not worth a pass of their own."""
LEAST_SHARE = 0.75
"""How long the shortest prefix of a batch is at least, compared with the longest."""


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
        return min(one.start for _, one in self.scored) - 1


@dataclass(frozen=True)
class _Question:
    """The rows of one question."""

    number: int
    rows: tuple[_Row, ...]
    prefix: int
    """Ids that all rows share and whose logits are not needed."""

    def positions(self, prefix: int) -> int:
        """Positions computed, if the first ones are computed once; short rows are padded."""
        return prefix + len(self.rows) * (self.longest - prefix)

    @property
    def longest(self) -> int:
        return max(len(row.ids) for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(len(row.ids) - row.first for row in self.rows)


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
    found: list[list[Score]] = [[] for _ in questions]
    prepared = [
        _rows(number, question, model, truncation or Truncation())
        for number, question in enumerate(questions)
        if question
    ]
    done = 0
    for batch in _batches(prepared, model):
        for number, scores in _score_batch(model, batch):
            found[number] = scores
        done += len(batch)
        if progress is not None:
            progress(done, len(questions))
    return found


# ------------------------------------------------------------------ from questions to batches


def _rows(
    number: int, question: Sequence[Continuation], model: CausalLM, truncation: Truncation
) -> _Question:
    cut = [_cut(one, model.config.context, truncation) for one in question]
    by_input: dict[tuple[int, ...], list[tuple[int, Continuation]]] = {}
    for place, one in enumerate(cut):
        by_input.setdefault(one.ids[:-1], []).append((place, one))
    rows = tuple(_Row(ids, tuple(scored)) for ids, scored in by_input.items())
    prefix = 0
    if len(rows) > 1:
        most = min(row.first for row in rows)
        prefix = common_length([row.ids[:most] for row in rows])
    return _Question(number, rows, prefix if prefix >= SHORTEST_PREFIX else 0)


def _cut(one: Continuation, context: int, truncation: Truncation) -> Continuation:
    assert 0 < one.start < len(one.ids), "there is something to score, and something before it"
    dropped = len(one.ids) - (context + 1)
    if dropped <= 0:
        return one
    if dropped >= one.start:
        length = len(one.ids) - one.start
        raise UserError(
            f"a text to score has {length} tokens, more than the model's context of {context}",
            where="evaluate",
            remedy="use a model with a longer context, or leave this task out",
        )
    truncation.count += 1
    return Continuation(one.ids[dropped:], one.start - dropped)


def common_length(rows: Sequence[tuple[int, ...]]) -> int:
    """The length of what all rows begin with."""
    # The smallest and the largest in the order of tuples differ first.
    low, high = min(rows), max(rows)
    for place, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return place
    return min(len(low), len(high))


def _batches(questions: list[_Question], model: CausalLM) -> Iterator[list[_Question]]:
    """Questions of similar sizes together, the largest first, within the limits of memory."""
    on_cpu = model.device.type == "cpu"
    most = CPU_TOKENS if on_cpu else GPU_TOKENS
    most_scored = (CPU_LOGIT_BYTES if on_cpu else GPU_LOGIT_BYTES) // (4 * model.vocab)
    if model.new_cache(1) is None:
        questions = [replace(question, prefix=0) for question in questions]
    batch: list[_Question] = []
    ordered = sorted(questions, key=lambda one: (one.prefix, one.longest), reverse=True)
    for question in ordered:
        together = [*batch, question]
        # They are sorted, so the last one has the shortest prefix.
        shortest = question.prefix
        similar = not batch or shortest >= LEAST_SHARE * batch[0].prefix
        rows = sum(len(one.rows) for one in together)
        longest = max(one.longest for one in together) - shortest
        positions = rows * longest + (len(together) * shortest)
        scored = sum(one.tokens for one in together)
        if batch and not (similar and positions <= most and scored <= most_scored):
            yield batch
            batch = [question]
        else:
            batch = together
    if batch:
        yield batch


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


@torch.inference_mode()
def _computed(model: CausalLM, batch: list[_Question]) -> list[tuple[int, list[Score]]]:
    device, prefix = model.device, min(question.prefix for question in batch)
    rows = [row for question in batch for row in question.rows]
    longest = max(len(row.ids) for row in rows) - prefix
    tokens_BT = torch.zeros((len(rows), longest), dtype=torch.int64)
    at, targets = list[int](), list[int]()
    for number, row in enumerate(rows):
        tokens_BT[number, : len(row.ids) - prefix] = torch.tensor(row.ids[prefix:])
        for _, one in row.scored:
            first = number * longest - prefix
            at += range(first + one.start - 1, first + len(one.ids) - 1)
            targets += one.ids[one.start :]
    options = {}
    if prefix:
        cache = model.new_cache(prefix + longest)
        assert cache is not None
        starts_BT = torch.tensor([question.rows[0].ids[:prefix] for question in batch])
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        model(starts_BT.to(device), cache=cache, logits_at_N=nothing)
        counts = torch.tensor([len(question.rows) for question in batch])
        cache.select(torch.repeat_interleave(counts).to(device))
        options["cache"] = cache
    at_N = torch.tensor(at, device=device)
    logits_NV = model(tokens_BT.to(device), logits_at_N=at_N, **options)
    assert isinstance(logits_NV, torch.Tensor)
    log_probs, right = _judge(logits_NV, torch.tensor(targets, device=device))
    found, place = list[tuple[int, list[Score]]](), 0
    for question in batch:
        scores: dict[int, Score] = {}
        for row in question.rows:
            for option, one in row.scored:
                end = place + len(one.ids) - one.start
                scores[option] = Score(
                    sum(log_probs[place:end]), all(right[place:end]), end - place
                )
                place = end
        found.append((question.number, [scores[option] for option in sorted(scores)]))
    return found


def _judge(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[list[float], list[bool]]:
    """Of every target its log-probability, and whether it is the most likely token."""
    logits_NV = logits_NV.float()
    picked_N = logits_NV.gather(1, targets_N[:, None])[:, 0] - logits_NV.logsumexp(dim=-1)
    if not picked_N.isfinite().all():
        raise DataError("the model computes NaN or infinite logits, so it scores nothing")
    return picked_N.tolist(), (logits_NV.argmax(dim=-1) == targets_N).tolist()
