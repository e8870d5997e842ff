"""Objects of S3 and of Google Cloud Storage, through s3fs and gcsfs.

Credentials are found where the tools of both clouds look for them: the environment, ~/.aws,
~/.config/gcloud, the machine. Other servers that speak like S3 are named by AWS_ENDPOINT_URL, a
public bucket is read without credentials with FSSPEC_S3_ANON=true or FSSPEC_GCS_TOKEN=anon.

Reads of S3 demand the ETag of the listing, reads of Google name the generation of the object, so
what has been replaced is not read. The libraries' own attempts are switched off where they can be:
`retry` tries again and reports it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, UserError, optional
from gristmill.hub.client import first_line
from gristmill.hub.listing import list_objects
from gristmill.hub.objects import (
    OnSent,
    RemoteObject,
    TransientError,
    changed,
    forbidden,
    missing,
    shown,
)

EXTRA = "remote"
_TIMEOUT = 30
_PIECE = 1 << 18
_PASSING = {
    "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError",
    "HTTPClientError", "IncompleteReadError", "IncompleteRead", "ResponseStreamingError",
    "ResponseParserError", "ClientError", "FSTimeoutError", "TimeoutError", "ConnectionError",
}  # fmt: skip
"""Classes of errors by name, those of the clients below the libraries among them."""
_PASSING_CODES = {
    "SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling",
    "ThrottlingException", "TooManyRequests", "408", "429", "500", "502", "503", "504",
}  # fmt: skip
_CHANGED_CODES = {"PreconditionFailed", "412", "InvalidRange", "416"}
_UNKNOWN_USER = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
_REMEDIES = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them into "
    "~/.aws; for a public bucket, set FSSPEC_S3_ANON=true",
    "gs": "log in: `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; "
    "for a public bucket, set FSSPEC_GCS_TOKEN=anon",
}


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


def _code(error: BaseException) -> str | None:
    """What the store answered, as its word or as a status."""
    for cause in _causes(error):
        answer = getattr(cause, "response", None)
        if isinstance(answer, dict):
            return str(answer.get("Error", {}).get("Code", ""))
        if type(cause).__name__ == "HttpError":
            return str(getattr(cause, "code", ""))
    return None


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn the errors of the libraries into ours."""
    try:
        yield
    except Exception as error:  # the libraries' errors and those of their clients differ
        names = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
        code = _code(error)
        if isinstance(error, UserError | TransientError):
            raise
        if code in _CHANGED_CODES:
            raise changed(name) from error
        if isinstance(error, FileNotFoundError):
            raise missing(name) from error
        if names & _UNKNOWN_USER:
            what = "no credentials were found"
            raise DataError(what, where=name, remedy=_REMEDIES[name[:2]]) from error
        if isinstance(error, PermissionError) or code in ("401", "403"):
            raise forbidden(name, first_line(error), _REMEDIES[name[:2]]) from error
        if code in _PASSING_CODES:
            raise TransientError(first_line(error)) from error
        if code is None and names & _PASSING:
            raise TransientError(first_line(error)) from error
        raise DataError(
            f"the store refuses: {first_line(error)}",
            where=name,
            remedy="check the address and the settings of the store",
        ) from error


def _path(url: str) -> str:
    """BUCKET/KEY of a URL."""
    path = url.partition("://")[2]
    bucket = path.partition("/")[0]
    if "@" in bucket or not bucket or any(sign in bucket for sign in "*?["):
        what = "a password in this address would be seen" if "@" in bucket else "no bucket is named"
        remedy = f"write {url.partition('://')[0]}://BUCKET/NAME"
        raise DataError(what, where=shown(url), remedy=remedy)
    return path


class S3Store:
    """Objects of S3."""

    def find(self, url: str) -> list[RemoteObject]:
        path = _path(url)
        with _told(shown(url)):
            return [
                RemoteObject(f"s3://{info['name']}", f"s3://{info['name']}", *_facts(info, "ETag"))
                for info in list_objects(_s3(), path)
            ]

    def read(self, item: RemoteObject, begin: int, end: int) -> Iterator[bytes]:
        bucket, _, key = _path(item.address).partition("/")
        wanted = {"Range": f"bytes={begin}-{end - 1}", "IfMatch": item.version}
        received, failure = bytearray(), None
        try:
            with _told(item.name):
                system = _s3()
                _sync(system, _get, system, received, Bucket=bucket, Key=key, **wanted)
        except TransientError as error:
            failure = error
        yield from [bytes(received)] if received else []
        if failure or len(received) != end - begin:
            raise failure or TransientError("the connection broke")

    def write(self, file: Path, url: str, progress: OnSent = lambda done: None) -> None:
        with _told(shown(url)):
            _s3().put_file(str(file), _path(url), callback=_callback(progress))

    def remove(self, url: str) -> None:
        with _told(shown(url)):
            system = _s3()
            if system.exists(_path(url)):
                system.rm_file(_path(url))


async def _get(system: Any, received: bytearray, **wanted: Any) -> None:
    answer = await system._call_s3("get_object", **wanted)
    try:
        while piece := await answer["Body"].read(_PIECE):
            received += piece
    finally:
        answer["Body"].close()


def _sync(system: Any, call: Any, *words: Any, **options: Any) -> Any:
    return optional("fsspec.asyn", extra=EXTRA, purpose="reading buckets").sync(
        system.loop, call, *words, **options
    )


def _facts(info: dict[str, Any], version: str) -> tuple[int, str]:
    return int(info["size"]), str(info[version])


def _callback(progress: OnSent) -> Any:
    library = optional("fsspec.callbacks", extra=EXTRA, purpose="writing to buckets")
    return library.Callback(hooks={"show": lambda size, value, **more: progress(int(value))})


@cache
def _s3() -> Any:
    library = optional("s3fs", extra=EXTRA, purpose="reading and writing s3://")
    system = library.S3FileSystem(
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={
            "connect_timeout": _TIMEOUT,
            "read_timeout": _TIMEOUT,
            "retries": {"total_max_attempts": 1},
        },
    )
    system.retries = 1
    return system


class GoogleStore:
    """Objects of Google Cloud Storage."""

    def find(self, url: str) -> list[RemoteObject]:
        path = _path(url)
        with _told(shown(url)):
            return [
                RemoteObject(f"gs://{name}", f"gs://{name}", *_facts(info, "generation"))
                for info in list_objects(_google(), path)
                for name in [info["name"].partition("#")[0]]
            ]

    def read(self, item: RemoteObject, begin: int, end: int) -> Iterator[bytes]:
        path = f"{_path(item.address)}#{item.version}"
        with _told(item.name):
            try:
                content = _google().cat_file(path, start=begin, end=end)
            except FileNotFoundError as error:
                # Another generation is there now, or none.
                raise changed(item.name) from error
        if len(content) != end - begin:
            raise TransientError("the connection broke")
        yield content

    def write(self, file: Path, url: str, progress: OnSent = lambda done: None) -> None:
        with _told(shown(url)):
            _google().put_file(str(file), _path(url), callback=_callback(progress))

    def remove(self, url: str) -> None:
        with _told(shown(url)):
            system = _google()
            if system.exists(_path(url)):
                system.rm_file(_path(url))


@cache
def _google() -> Any:
    # The class that the package shows asks by gRPC first, for kinds of buckets that text is hardly
    # kept in; a server that has none keeps it waiting for minutes.
    library = optional("gcsfs.core", extra=EXTRA, purpose="reading and writing gs://")
    # Lists are not remembered: an object that was replaced has a new generation.
    return library.GCSFileSystem(
        use_listings_cache=False,
        skip_instance_cache=True,
        version_aware=True,
        requests_timeout=_TIMEOUT,
        endpoint_url=os.environ.get("STORAGE_EMULATOR_HOST"),
    )
