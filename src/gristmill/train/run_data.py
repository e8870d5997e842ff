"""Opens the data and the tokenizer of a run, and checks that they match."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import RunConfig
from gristmill.data.conversations import ChatOptions, open_chat_sets, open_conversations
from gristmill.data.dataset import RunData, open_data, open_validation_sets, prove_tokenizer
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer
from gristmill.track.console import slow_work
from gristmill.track.folder import RunFolder


def open_run_data(
    config: RunConfig, folder: RunFolder, chat: ChatEncoder | None, *, shows: bool
) -> tuple[RunData, Tokenizer]:
    """The data of a run and its tokenizer. `shows`: whether to show progress."""
    sequence = config.data.sequence or config.model.context
    if chat is None:
        data = open_data(config.data, sequence=sequence)
        sets = open_validation_sets(config, data.train, sequence=sequence)
        data = replace(data, sets=sets)
        tokenizer = _open_tokenizer(config, data)
        _require_room_for(tokenizer, config)
        return data, tokenizer
    options = ChatOptions(
        sequence,
        together=config.packs_conversations,
        cache=folder.path / "index",
        progress=slow_work(quiet=not shows),
    )
    _require_room_for(chat.tokenizer, config)
    data = open_conversations(config.data, chat, options)
    return replace(data, sets=open_chat_sets(config, chat, options)), chat.tokenizer


def _open_tokenizer(config: RunConfig, data: RunData) -> Tokenizer:
    """The tokenizer that made the token files, checked by its fingerprint or by the ids."""
    train = data.train.splits
    given = config.data.tokenizer or f"{train[0].path}.tokenizer"
    known = any(split.reader.info.tokenizer is not None for split in train)
    if not known and not config.data.tokenizer and not Path(given).exists():
        raise UserError(
            "these token files do not say which tokenizer made them",
            where=f"data.paths {train[0].path}",
            remedy="name it with data.tokenizer",
            exit=Exit.DATA,
        )
    tokenizer = open_tokenizer(given, merges=config.data.merges)
    remedy = "give the tokenizer that the token files were made with, or prepare them again"
    for split in train:
        where = f"data.tokenizer {given}" if len(train) == 1 else f"data.paths {split.path}"
        prove_tokenizer(tokenizer, split.reader, where=where, remedy=remedy)
    held = data.validation.splits if config.data.validation and data.validation else ()
    others = [(split, "data.validation") for split in held]
    others += [(split, "validate.set") for one in data.sets for split in one.text.splits]
    for split, setting in others:
        where = f"{setting} {split.path}"
        prove_tokenizer(tokenizer, split.reader, where=where, remedy=remedy)
    return tokenizer


def _require_room_for(tokenizer: Tokenizer, config: RunConfig) -> None:
    """Refuse a tokenizer with more ids than the model."""
    if config.model.vocab is not None and config.model.vocab < tokenizer.size:
        raise UserError(
            f"the tokenizer has {tokenizer.size} ids, but the model has {config.model.vocab}",
            where="model.vocab",
            remedy="leave model.vocab out, raise model.hf_config.vocab_size, or prepare the text "
            "with a smaller tokenizer",
        )
