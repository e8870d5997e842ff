"""All parts of a preparation merged into what one preparation would have made."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import read_json, require_room, write_sealed_json
from gristmill.text.prepare.ledger import Ledger
from gristmill.text.prepare.outputs import check_complete, save_tokenizer
from gristmill.text.prepare.part_record import record_file
from gristmill.text.prepare.part_status import log_file
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.convert import CopyProgress, convert_tokens
from gristmill.tokens.format import LEDGER_FILE, Manifest, file_of, read_manifest
from gristmill.tokens.store import VerifyProgress, verify_tokens


def merge_parts(
    request: PrepareRequest,
    parts: Sequence[PrepareRequest],
    tokenizer: Tokenizer,
    *,
    copying: Callable[[CopyProgress], None],
    verifying: Callable[[VerifyProgress], None],
) -> None:
    """Make the sets of the whole, each with its tokenizer, and the ledgers; then read all of it
    again. What stands in their place is replaced."""
    ledgers, needed = {}, 0
    for key in request.options.keys:
        ledger = Ledger()
        for part in parts:
            file = file_of(part.prefix(key, None), LEDGER_FILE)
            ledger.add(Ledger.from_json(read_json(file)))
        documents = {}
        for split in request.splits:
            made = [read_manifest(part.prefix(key, split)) for part in parts]
            documents[request.prefix(key, split)] = sum(one.info.documents for one in made)
            needed += sum(facts.bytes for one in made for facts in one.files.values())
        check_complete(ledger, documents)
        ledgers[key] = ledger
    require_room(
        request.output,
        needed=needed,
        purpose="a merged copy of all parts",
        remedy="give an output on a larger disk, and --overwrite",
    )
    for key, ledger in ledgers.items():
        write_sealed_json(file_of(request.prefix(key, None), LEDGER_FILE), ledger.as_json())
        for split in request.splits:
            prefix = request.prefix(key, split)
            sources = [part.prefix(key, split) for part in parts]
            save_tokenizer(tokenizer, file_of(prefix, ".tokenizer"))
            convert_tokens(
                sources,
                prefix,
                format=request.format,
                shard_size=request.shard_size,
                overwrite=True,
                progress=copying,
            )
            _verify(prefix, [read_manifest(source) for source in sources], verifying)


def _verify(
    prefix: Path, parts: Sequence[Manifest], progress: Callable[[VerifyProgress], None]
) -> None:
    """Read a merged set again from the disk, and compare it with its parts."""
    if problems := verify_tokens(prefix, progress=progress):
        raise DataError(problems)
    info = read_manifest(prefix).info
    documents, tokens = (
        sum(getattr(part.info, name) for part in parts) for name in ("documents", "tokens")
    )
    if (documents, tokens) != (info.documents, info.tokens):
        raise DataError(
            f"the merged set has {info.documents} documents and {info.tokens} tokens, and its "
            f"parts together have {documents} and {tokens}",
            where=prefix,
            remedy="start the same command again, which merges the parts again",
        )


def remove_part(part: PrepareRequest) -> None:
    """Remove all files of a part, even if an earlier attempt has removed some of them."""
    for key in part.options.keys:
        for split in part.splits:
            prefix = part.prefix(key, split)
            manifest = file_of(prefix, ".json")
            try:
                files = read_manifest(prefix).files if manifest.is_file() else {}
            except UserError:
                files = {}
            shutil.rmtree(file_of(prefix, ".tokenizer"), ignore_errors=True)
            # The manifest goes last, since it names the others.
            for suffix in (*files, ".json"):
                file_of(prefix, suffix).unlink(missing_ok=True)
        file_of(part.prefix(key, None), LEDGER_FILE).unlink(missing_ok=True)
    log_file(part.name).unlink(missing_ok=True)
    record_file(part.name).unlink(missing_ok=True)
