"""Conversations as token sets in memory: read, encoded, split and packed when a run starts.

    JSON lines -> conversations -> ids and a loss mask -> training | validation -> samples

A conversation is a document of its set, so document rules separate the conversations of a sample,
and sets are blended like token files. Splits are cut between conversations. A set ends with T + 1
end-of-text ids for padding. Its fingerprint, which a resumed run checks, covers the messages only:
the formatting of the JSON does not matter.

Large sets are encoded once, by the first process of a run, and cached; the other processes and
later starts map the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.units import split_shares
from gristmill.config.schema import DataConfig, RunConfig
from gristmill.data.dataset import (
    DEFAULT_SPLIT,
    DatasetSplit,
    Mixture,
    RunData,
    ValidationSet,
    path_list,
    path_weights,
)
from gristmill.data.index_cache import Arrays, cached
from gristmill.data.intact import TokenFileWatch
from gristmill.data.sampling import PackingCounts, pack
from gristmill.data.stream import OpenTokenSet
from gristmill.hub.downloads import settings_folder
from gristmill.text.chat.conversations import (
    BadLine,
    Conversation,
    LineLedger,
    read_conversations,
    require_conversations,
)
from gristmill.text.chat.encoding import ChatEncoder, ChatRun
from gristmill.text.chat.template import (
    TemplateRefusedError,
    TemplateRewritesError,
    UnusableError,
    choose_template,
)
from gristmill.text.tokenizers import vocabularies
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.tokens.format import TokenFiles, TokenReader, TokenSetInfo, TokenShard

WORTH_CACHING = 1 << 25
"""Characters; smaller sets are encoded at every start, which takes a few seconds."""
_BATCH = 1024
"""Conversations that are rendered or encoded at a time."""


def open_chat(config: RunConfig) -> ChatEncoder:
    """The tokenizer and the template of a run on conversations."""
    data, start = config.data, config.model.initial_weights
    folders = []
    if start is not None:
        where = "model.hf" if config.model.start is None else "model.start"
        folder = settings_folder(start, where=where)
        folders.append(folder / "tokenizer" if (folder / "run.toml").is_file() else folder)
    if data.tokenizer is not None:
        tokenizer = open_tokenizer(data.tokenizer, merges=data.merges)
        given = Path(data.tokenizer)
        if not given.exists() and vocabularies.is_hub_name(data.tokenizer):
            given = vocabularies.cached_tokenizer(data.tokenizer) or given
        folders.append(given.parent if given.is_file() else given)
    else:
        tokenizer = open_tokenizer(folders[0])
    template = choose_template(
        data.template or "auto", tokenizer, folders=folders, where="data.template"
    )
    return ChatEncoder(tokenizer, template, where="data.template")


class ConversationReader(TokenReader):
    """The ids of a set of conversations, in memory or mapped from a cache."""

    def __init__(self, path: str, info: TokenSetInfo, ids: np.ndarray, starts: np.ndarray) -> None:
        shard = TokenShard(Path(path), 0, len(ids), info.dtype)
        super().__init__(info, TokenFiles([shard], starts))
        self._all = ids

    def read(self, start: int, count: int) -> np.ndarray:
        return self._all[start : start + count]


@dataclass(frozen=True)
class _ChatSet:
    """One encoded set of conversations."""

    source: OpenTokenSet
    starts: np.ndarray
    """Where each conversation begins, and where the last one ends."""
    loss_mask: np.ndarray


@dataclass(frozen=True)
class ChatOptions:
    """How conversations become samples."""

    sequence: int
    together: bool
    """Whether several conversations are packed into a sample; otherwise each has its own."""
    cache: Path | None = None
    """Folder for encoded sets; None caches nothing."""
    progress: Callable[[str], None] = lambda doing: None
    """Called with a description of the current work and its progress."""


def open_conversations(config: DataConfig, encoder: ChatEncoder, options: ChatOptions) -> RunData:
    """Read, encode, split and pack the conversations of a run."""
    notes = [f"conversations become text by the template {encoder.template.name}"]
    warnings = list[str]()
    if not encoder.prompts_alike:
        warnings.append(
            "this template writes other text before an answer than it asks for one with "
            "(add_generation_prompt), so `generate --chat` does not see what is trained here"
        )
    sets = [_open_set(path, encoder, options, warnings) for path in path_list(config.paths)]
    if config.validation is None:
        shares = split_shares(config.split or DEFAULT_SPLIT)
        assert shares is not None, "the rules are checked when settings are loaded"
        parts = [(one, _cut(len(one.starts) - 1, shares)) for one in sets]
        trained = [(one, cuts[0]) for one, cuts in parts]
        held = [(one, cuts[1]) for one, cuts in parts if shares[1]]
        held_weights = path_weights(config.paths)
    else:
        paths = path_list(config.validation)
        trained = [(one, range(len(one.starts) - 1)) for one in sets]
        others = [_open_set(path, encoder, options, warnings) for path in paths]
        held = [(other, range(len(other.starts) - 1)) for other in others]
        held_weights = path_weights(config.validation)
    train, counts = _mixture(trained, path_weights(config.paths), options)
    notes += _described("training", train, counts, options)
    warnings += _losses("training", counts, options)
    if train is None or len(train.splits) < len(sets):
        trainable = {split.path for split in train.splits} if train is not None else set()
        empty = ", ".join(path for path in path_list(config.paths) if path not in trainable)
        raise UserError(
            f"no conversation to train on has an answer in its first {options.sequence + 1} tokens",
            where=f"data.paths {empty}",
            remedy="raise data.sequence, or give more conversations",
            exit=Exit.DATA,
        )
    validation = None
    if held:
        validation, counts = _mixture(held, held_weights, options)
        notes += _described("validation", validation, counts, options)
        warnings += _losses("validation", counts, options)
    if held and validation is None:
        raise UserError(
            "no conversation is left for validation",
            where="data.validation" if config.validation else "data.split",
            remedy='hold out more (data.split = "9,1"), or nothing ("1,0")',
            exit=Exit.DATA,
        )
    if not options.together:
        notes.append("this model cannot keep conversations apart: each has a sample of its own")
    return RunData(train, validation, tuple(notes), tuple(warnings))


def open_chat_sets(
    config: RunConfig, encoder: ChatEncoder, options: ChatOptions
) -> tuple[ValidationSet, ...]:
    """Open the further sets of conversations to validate on."""
    found = list[ValidationSet]()
    for number, one in enumerate(config.validation.sets or ()):
        sets = [_open_set(path, encoder, options, []) for path in path_list(one.data)]
        whole = [(each, range(len(each.starts) - 1)) for each in sets]
        text, _ = _mixture(whole, path_weights(one.data), options)
        if text is None:
            raise UserError(
                f"no conversation of the validation set {one.name!r} has an answer in its first "
                f"{options.sequence + 1} tokens",
                where=f"validate.set.{number}.data",
                remedy="raise data.sequence, or give more conversations",
                exit=Exit.DATA,
            )
        found.append(ValidationSet(one.name, text, one.windows or config.validation.windows))
    return tuple(found)


def _cut(count: int, shares: Sequence[float]) -> list[range]:
    """Conversations for training and validation; validation gets at least one if its share is
    above 0."""
    ends = [round(end) for end in np.cumsum([share / sum(shares) for share in shares]) * count]
    if shares[1] and count > 1:
        ends[0] = min(ends[0], count - 1)
        ends[1] = max(ends[1], ends[0] + 1)
    return [range(*both) for both in pairwise([0, *ends])]


def _mixture(
    parts: Sequence[tuple[_ChatSet, range]],
    weights: tuple[float, ...] | None,
    options: ChatOptions,
) -> tuple[Mixture | None, PackingCounts]:
    """The splits that hold at least one sample, packed; None if there is none."""
    splits, kept, counts = list[DatasetSplit](), list[int](), list[PackingCounts]()
    for number, (one, chosen) in enumerate(parts):
        starts = one.starts[chosen.start : chosen.stop + 1]
        packing, found = pack(
            starts,
            one.loss_mask,
            length=options.sequence + 1,
            padding=int(one.starts[-1]),
            together=options.together,
        )
        counts.append(found)
        if len(packing):
            tokens = range(int(starts[0]), int(starts[-1]))
            splits.append(DatasetSplit(one.source, tokens, packing=packing))
            kept.append(number)
    total = PackingCounts(*map(sum, zip(*counts, strict=True)))
    if not splits:
        return None, total
    chosen_weights = None if weights is None else tuple(weights[number] for number in kept)
    return Mixture(tuple(splits), chosen_weights), total


def _described(
    name: str, mixture: Mixture | None, counts: PackingCounts, options: ChatOptions
) -> Iterator[str]:
    samples = sum(len(split.packing or ()) for split in mixture.splits) if mixture else 0
    if samples:
        filled = counts.tokens / (samples * (options.sequence + 1))
        yield (
            f"{name}: {counts.conversations} conversations in {samples} samples of "
            f"{options.sequence} tokens, {filled:.1%} full; "
            f"{counts.loss_tokens / counts.tokens:.1%} of their tokens are answers"
        )


def _losses(name: str, counts: PackingCounts, options: ChatOptions) -> Iterator[str]:
    total, length = counts.conversations, options.sequence
    if counts.cut:
        yield (
            f"{name}: {counts.cut} of {total} conversations are longer than {length} tokens and "
            "are cut"
        )
    if counts.dropped:
        yield (
            f"{name}: {counts.dropped} of {total} conversations have no answer in their first "
            f"{length} tokens and are left out"
        )


# ------------------------------------------------------------------ one set


def _open_set(
    path: str, encoder: ChatEncoder, options: ChatOptions, warnings: list[str]
) -> _ChatSet:
    ledger = LineLedger()
    runs = list[list[ChatRun]]()
    content, characters = hashlib.sha256(), 0
    for conversation, found in _rendered(read_conversations(path, ledger), encoder):
        if isinstance(found, TemplateRefusedError):
            ledger.kept -= 1
            ledger.drop(BadLine.REFUSED, conversation.origin, str(found))
            continue
        if isinstance(found, TemplateRewritesError):
            what = f"the template {encoder.template.name} rewrites the messages of this "
            what += "conversation, so their words cannot be told apart"
            remedy = "change the messages, or choose another template with data.template"
            raise DataError(what, where=conversation.origin, remedy=remedy) from found
        runs.append(found)
        options.progress(f"reading {path}: {len(runs)} conversations")
        said = [[message.role, message.content] for message in conversation.messages]
        content.update(json.dumps(said).encode() + b"\n")
        characters += sum(len(run.text) for run in found)
    require_conversations(path, ledger)
    warnings += ledger.skipped
    if left_out := ledger.described():
        warnings.append(f"{path}: {left_out}")
    tokenizer, fingerprint = encoder.tokenizer, content.hexdigest()

    def build() -> Arrays:
        return _encode(runs, encoder, options)

    key = {
        "kind": "conversations",
        "content": fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "template": encoder.template.fingerprint,
        "padding": options.sequence + 1,
    }
    arrays = cached(options.cache if characters >= WORTH_CACHING else None, key, build)
    ids, starts = arrays["ids"], arrays["starts"]
    info = TokenSetInfo(
        format="chat",
        dtype=str(ids.dtype),
        tokens=len(ids),
        documents=len(starts) - 1,
        vocab_size=tokenizer.size,
        end_of_text=tokenizer.end_of_text,
        tokenizer=tokenizer.fingerprint,
        fingerprint=fingerprint,
    )
    reader = ConversationReader(path, info, ids, starts[:-1])
    source = OpenTokenSet(path, reader, ids, TokenFileWatch(()), loss_mask=arrays["learnt"])
    return _ChatSet(source, starts, arrays["learnt"])


def _rendered(
    conversations: Iterator[Conversation], encoder: ChatEncoder
) -> Iterator[tuple[Conversation, list[ChatRun] | UnusableError]]:
    """All conversations, in batches, with their text or the reason why they have none."""
    while several := list(islice(conversations, _BATCH)):
        yield from zip(several, encoder.runs_of([one.messages for one in several]), strict=True)


def _encode(runs: Sequence[list[ChatRun]], encoder: ChatEncoder, options: ChatOptions) -> Arrays:
    ids, loss_mask, lengths = list[np.ndarray](), list[np.ndarray](), list[int]()
    dtype = np.uint16 if encoder.tokenizer.size <= 1 << 16 else np.uint32
    for first in range(0, len(runs), _BATCH):
        options.progress(f"encoding conversations: {first} of {len(runs)}")
        for encoded in encoder.encode_runs(runs[first : first + _BATCH]):
            # The first id of a conversation has no context to be predicted from.
            encoded.loss_mask[:1] = False
            ids.append(encoded.ids.astype(dtype))
            loss_mask.append(encoded.loss_mask)
            lengths.append(len(encoded.ids))
    padding = options.sequence + 1
    ids.append(np.full(padding, encoder.tokenizer.end_of_text, dtype))
    loss_mask.append(np.zeros(padding, bool))
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    # Caches on disk have the mask under this name.
    return {"ids": np.concatenate(ids), "learnt": np.concatenate(loss_mask), "starts": starts}
