"""`tokens copy`, and the output of `prepare` in a bucket: written here first, then put there.

    prepare … -o s3://bucket/tokens/x
        .gristmill-uploads/s3/bucket/tokens/x.*    all that a local preparation writes, journal too
        s3://bucket/tokens/x.*                     once it is complete: checked, the manifest last

The folder is below the current one and hidden, so the same command given there resumes. Once the
sets are in the bucket it is removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, sha256_text, write_json
from gristmill.base.units import format_bytes
from gristmill.cli.options import Overwrite, Quiet, parse_output
from gristmill.cli.progress import ProgressLine
from gristmill.hub.objects import holds_secrets, scheme_of, shown
from gristmill.hub.stores import writable_store_of
from gristmill.text.prepare.part_status import prepared_keys
from gristmill.text.prepare.prepare import PrepareResult
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.sources.reading import STDIN, find_sources
from gristmill.text.tokenizers.tokenizer import TOKENIZER_FILES
from gristmill.tokens.format import LEDGER_FILE, SIGNATURES_FILE, file_of, read_manifest
from gristmill.tokens.remote import (
    TOKENIZER_FOLDER,
    check_target,
    download_set,
    upload_file,
    upload_set,
)

UPLOADS = Path(".gristmill-uploads")
_COMPANIONS = (
    LEDGER_FILE,
    SIGNATURES_FILE,
    *(f"{TOKENIZER_FOLDER}/{name}" for name in TOKENIZER_FILES),
)
COPY = """
Examples:

gristmill tokens copy tokens/books s3://bucket/tokens/books

gristmill tokens copy s3://bucket/tokens/books tokens/books
"""
Place = Annotated[str, typer.Argument(help="Name of token files here, or their address.")]


def copy_set(
    source: Place, target: Place, overwrite: Overwrite = False, quiet: Quiet = False
) -> None:
    """Copy a token set to a bucket (s3://, gs://), or from a bucket or the web (hf://, https://).

    Every file is compared with its checksum. After an interruption the same command continues.
    """
    if bool(scheme_of(source)) == bool(scheme_of(target)):
        raise UserError(
            "one of the two must be an address, such as s3://bucket/tokens/books, and one local",
            where="command line",
            remedy="bring a set here, then put it elsewhere",
            exit=Exit.USAGE,
        )
    with ProgressLine("copying", quiet=quiet) as line:

        def show(done: int, total: int) -> None:
            line.update(done, total, f"{format_bytes(done)} of {format_bytes(total)}")

        if scheme_of(target):
            upload_set(Path(source), target, overwrite=overwrite, progress=show)
        else:
            here = Path(target)
            download_set(source, here, companions=_COMPANIONS, overwrite=overwrite, progress=show)
    if not quiet:
        typer.echo(f"{shown(target)}: copied from {shown(source)}")


# ------------------------------------------------------------------ the output of prepare


def staged(output: str) -> Path:
    """Where the sets of an output are written on this machine."""
    scheme = scheme_of(output)
    if scheme is None:
        return parse_output(output)
    writable_store_of(output)
    if output.endswith("/"):
        what, remedy = "the files need a name in this folder", f"write {shown(output)}NAME"
        raise UserError(what, where=f"--output {shown(output)}", remedy=remedy, exit=Exit.USAGE)
    if holds_secrets(output) or "?" in output or ".." in output.split("/"):
        what, remedy = "an output is named by bucket and folder alone", "write s3://BUCKET/NAME"
        raise UserError(what, where=shown(output), remedy=remedy, exit=Exit.USAGE)
    return UPLOADS / scheme / output.partition("://")[2]


def address_of(path: Path) -> str | None:
    """The address for which sets are written at a path; None if they stay there."""
    if path.parts[: len(UPLOADS.parts)] != UPLOADS.parts:
        return None
    scheme, *rest = path.parts[len(UPLOADS.parts) :]
    return f"{scheme}://{'/'.join(rest)}"


def prepare_and_upload(
    request: PrepareRequest, run: Callable[[], PrepareResult], *, quiet: bool
) -> PrepareResult:
    """Prepare sets on this machine and put them where they belong; what an earlier process has
    prepared is only put there."""
    keys, splits = request.options.keys, request.splits
    prefixes = [request.prefix(key, split) for key in keys for split in splits]
    ledgers = [file_of(request.prefix(key, None), LEDGER_FILE) for key in keys]
    record = request.name.with_name(f".{request.name.name}.upload.json")
    asked = _asked(request)
    if record.is_file() and not request.overwrite and read_json(record) != asked:
        raise UserError(
            "another preparation of this set is here and was not put into its place yet",
            where=address_of(request.name),
            remedy="give its command again, use another name, or start over with --overwrite",
            exit=Exit.REFUSED,
        )
    if record.is_file() and read_json(record) == asked:
        made = prepared_keys(request)
        size = sum(prepared.info.text_bytes or 0 for key in made for prepared in key.sets)
        result = PrepareResult(made, size, 0, 0.0, "")
    else:
        for prefix in prefixes:
            check_target(str(address_of(prefix)), overwrite=request.overwrite)
        result = run()
        write_json(record, asked)
    with ProgressLine("uploading", quiet=quiet) as line:
        for ledger in ledgers:
            upload_file(ledger, str(address_of(ledger)))
        for prefix in prefixes:

            def show(done: int, total: int, name: str = prefix.name) -> None:
                line.update(done, total, f"{name}, {format_bytes(done)} of {format_bytes(total)}")

            upload_set(prefix, str(address_of(prefix)), overwrite=request.overwrite, progress=show)
    _remove(prefixes, [*ledgers, record])
    return result


def _asked(request: PrepareRequest) -> dict[str, Any]:
    """What the sets are made of."""
    tokenizer = request.tokenizer() if callable(request.tokenizer) else request.tokenizer
    identities: list[tuple[object, ...]] = []
    if STDIN not in request.sources:
        found = find_sources(request.sources, request.options).sources
        identities = [source.identity for source in found]
    return {**request.as_json(tokenizer), "sources": sha256_text(repr(identities))}


def _remove(prefixes: Sequence[Path], others: Sequence[Path]) -> None:
    """Remove what is in its place now, and the folders that are empty then."""
    for prefix in prefixes:
        files = read_manifest(prefix).files
        shutil.rmtree(file_of(prefix, TOKENIZER_FOLDER), ignore_errors=True)
        for suffix in (*files, LEDGER_FILE, SIGNATURES_FILE, ".json"):
            file_of(prefix, suffix).unlink(missing_ok=True)
    for file in others:
        file.unlink(missing_ok=True)
    folders = {folder for file in (*prefixes, *others) for folder in file.parents}
    for folder in sorted(folders, reverse=True):
        if folder.parts[:1] == UPLOADS.parts and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def named(prefix: Path) -> str:
    """What to call a set."""
    return address_of(prefix) or str(prefix)
