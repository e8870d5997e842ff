"""A preparation in parts, from the first part to the merged set, wherever the parts run.

    with deduplication    all parts are signed, then grouped
    all parts             an engine runs those that are not done (see `PartsRun`)
    all are done          merged into what one preparation would have made, read again from the
                          disk, and removed

If this process is killed, the same command continues: the files of the parts show which of them are
done, and `PartsState` remembers what the engine submitted to others, and that merging has begun.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import read_json, require_room, write_sealed_json
from gristmill.base.locks import OutputLock
from gristmill.hub.objects import holds_secrets, shown
from gristmill.text.prepare.dedup_parts import group_and_drop
from gristmill.text.prepare.deduplicate import remove_files
from gristmill.text.prepare.ledger import HopelessError, Ledger
from gristmill.text.prepare.older_sets import merge_signatures, remove_signatures
from gristmill.text.prepare.outputs import check_complete, save_tokenizer
from gristmill.text.prepare.part_status import PartsState, log_file, prepared_keys, record_file
from gristmill.text.prepare.parts_run import PartsListener, PartsRun, SigningRun, TaskEngine
from gristmill.text.prepare.prepare import PrepareResult, refuse_existing_sets
from gristmill.text.prepare.request import PartNumber, PrepareRequest, no_parts_of
from gristmill.text.prepare.work_plan import WorkPlan
from gristmill.text.sources.datasets import is_dataset
from gristmill.text.sources.reading import STDIN, find_sources
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.convert import convert_tokens
from gristmill.tokens.format import LEDGER_FILE, Manifest, file_of, read_manifest
from gristmill.tokens.store import verify_tokens


def prepare_in_parts(
    request: PrepareRequest,
    of: int,
    engine: TaskEngine,
    *,
    attempts: int,
    listener: PartsListener,
) -> PrepareResult:
    """Run all parts of a preparation and merge them into what one process would have made."""
    began = time.perf_counter()
    requests = part_requests(request, of)
    for name in request.sources:
        if name == STDIN or is_dataset(name):
            raise no_parts_of(name)
        if holds_secrets(name):
            raise UserError(
                "this address holds a password or a signature, and the commands of parts would "
                "show it",
                where=shown(name),
                remedy="give credentials by the environment, or run the parts yourself (--part)",
            )
        if Path(name).is_dir() and request.name.resolve().is_relative_to(Path(name).resolve()):
            raise UserError(
                "this source holds the output too, so the first parts would be text for the others",
                where=name,
                remedy="give an output in another folder (-o)",
            )
    sources = find_sources(request.sources, request.read_options).sources
    plans = [WorkPlan(sources, part) for part in requests]
    with OutputLock(request.name, purpose="prepare"):
        state = PartsState.open(request.name, of)
        tokenizer = request.tokenizer() if callable(request.tokenizer) else request.tokenizer
        if not state.merging and not request.overwrite:
            refuse_existing_sets(request, tokenizer)
        new_text_bytes = 0
        if not state.merged:
            work = requests, plans, tokenizer, engine, state, attempts, listener
            if request.dedup:
                signing = SigningRun(*work)
                if not signing.all_done():
                    signing.run()
                group_and_drop(
                    requests,
                    plans,
                    tokenizer,
                    listener=listener.deduplicating,
                    note=listener.note,
                )
            new_text_bytes = PartsRun(*work).run()
            state.merging = True
            state.save()
            try:
                _merge_parts(request, requests, tokenizer, listener)
            except HopelessError:
                # The same command would end here again.
                _remove(requests, state)
                raise
            state.merged = True
            state.save()
        _remove(requests, state)
    keys = prepared_keys(request)
    text_bytes = sum(prepared.info.text_bytes or 0 for key in keys for prepared in key.sets)
    return PrepareResult(keys, text_bytes, new_text_bytes, time.perf_counter() - began, "")


def part_requests(request: PrepareRequest, of: int) -> list[PrepareRequest]:
    """What each part is asked for."""
    if of < 2:
        raise UserError(
            "one part is the whole",
            where=f"--parts {of}",
            remedy="give more parts, or leave out --parts and --engine",
        )
    return [replace(request, part=PartNumber(number, of)) for number in range(1, of + 1)]


def log_pattern(request: PrepareRequest, of: int) -> str:
    """The logs of all parts: the number of the part in it is written as `printf` does."""
    text = str(log_file(request.name.with_name(f"{request.name.name}\0")))
    text = text.replace("%", "%%")
    return text.replace("\0", f".part-%0{len(str(of))}d-of-{of}")


def _remove(requests: Sequence[PrepareRequest], state: PartsState) -> None:
    for part in requests:
        remove_part(part)
    remove_files(requests[0], len(requests))
    state.path.unlink(missing_ok=True)


def _merge_parts(
    request: PrepareRequest,
    parts: Sequence[PrepareRequest],
    tokenizer: Tokenizer,
    listener: PartsListener,
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
            manifests = [read_manifest(part.prefix(key, split)) for part in parts]
            documents[request.prefix(key, split)] = sum(
                manifest.info.documents for manifest in manifests
            )
            needed += sum(
                facts.bytes for manifest in manifests for facts in manifest.files.values()
            )
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
                progress=listener.copying,
            )
            _verify(prefix, [read_manifest(source) for source in sources], listener.verifying)
            merge_signatures(sources, prefix)


def _verify(prefix: Path, parts: Sequence[Manifest], progress: Callable[[int, int], None]) -> None:
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
            remove_signatures(prefix)
            # The manifest goes last, since it names the others.
            for suffix in (*files, ".json"):
                file_of(prefix, suffix).unlink(missing_ok=True)
        file_of(part.prefix(key, None), LEDGER_FILE).unlink(missing_ok=True)
    log_file(part.name).unlink(missing_ok=True)
    record_file(part.name).unlink(missing_ok=True)
