"""Objects of stores elsewhere: what is asked for, what is read, and what goes wrong."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.hub import buckets, web
from gristmill.hub.client import DownloadDisplay, downloads_shown
from gristmill.hub.objects import RemoteObject, holds_secrets, shown
from gristmill.hub.remote_file import open_remote
from gristmill.hub.stores import find_objects

CONTENT = random.Random(1).randbytes(3_000_000)
SIGNED = "?X-Amz-Signature=0123abcd&X-Amz-Expires=60"


def s3() -> str:
    pytest.importorskip("s3fs")
    return "s3://"


def gs() -> str:
    pytest.importorskip("gcsfs")
    return "gs://"


@pytest.fixture(params=["web", "s3", "gs"])
def base(request: pytest.FixtureRequest, store: Any) -> str:
    """What the addresses of a store begin with."""
    begins = {"web": lambda: f"{store.url}/", "s3": s3, "gs": gs}
    return begins[request.param]()


both = pytest.mark.parametrize("base", ["web", "s3"], indirect=True)
"""Google's library has attempts of its own, which take their time."""


def the(url: str) -> RemoteObject:
    (found,) = find_objects(url)
    return found


def read(item: RemoteObject) -> bytes:
    with open_remote(item) as file:
        return file.read()


def problem(call: Any, *words: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*words)
    return str(caught.value)


def test_an_object_is_read_from_anywhere(store: Any, base: str) -> None:
    store.put("box/a.bin", CONTENT)
    item = the(f"{base}box/a.bin")
    assert (item.name, item.size) == (f"{base}box/a.bin", len(CONTENT))
    with open_remote(item) as file:
        assert file.read() == CONTENT
        file.seek(2_000_000)
        assert file.read(10) == CONTENT[2_000_000:2_000_010]
        assert file.seek(-5, 2) == len(CONTENT) - 5
        assert file.read(10) == CONTENT[-5:]
        assert file.read(10) == b""
    with open_remote(item) as file:
        # Lines that follow each other, as a decompressor reads.
        pieces = iter(lambda: file.read1(50_000), b"")
        assert b"".join(pieces) == CONTENT


def test_a_reader_asks_for_little_or_for_large_pieces(store: Any) -> None:
    item = the(store.put("a.bin", CONTENT))
    store.requests.clear()
    with open_remote(item) as file:
        file.read(6)
    assert [request.split()[-1] for request in store.requests] == ["bytes=0-131071"]
    store.requests.clear()
    read(item)
    assert len(store.requests) <= 6


@both
def test_a_broken_connection_is_resumed_where_it_broke(store: Any, base: str) -> None:
    store.put("box/a.bin", CONTENT)
    item = the(f"{base}box/a.bin")
    store.cut("a.bin", after=70_000, times=3)
    assert read(item) == CONTENT
    assert all(fault.times == 0 for fault in store.faults)
    assert store.asked("bytes=70000-131071") and store.asked("bytes=131072-")


def test_an_object_that_changes_is_never_mixed(store: Any, base: str) -> None:
    store.put("box/a.bin", CONTENT)
    item = the(f"{base}box/a.bin")
    with open_remote(item) as file:
        first = file.read(1000)
        store.put("box/a.bin", CONTENT[::-1])
        words = problem(file.read)
    assert first == CONTENT[:1000]
    assert "changed while it was being read" in words and f"{base}box/a.bin" in words
    assert "start the same command again" in words
    # And one of another size, from its beginning.
    store.put("box/a.bin", b"short")
    assert "changed" in problem(read, item)


def test_a_server_that_minds_no_condition_is_found_out(store: Any) -> None:
    store.tags = False
    item = the(store.put("a.bin", CONTENT))
    assert item.version == "date Wed, 01 May 2024 12:00:00 GMT"
    assert read(item) == CONTENT
    store.put("a.bin", CONTENT + b"more")
    assert "changed" in problem(read, item)
    store.tags = True  # the answer has a version now that it had not
    store.put("a.bin", CONTENT)
    assert "changed" in problem(read, item)


@both
def test_what_passes_is_tried_again_and_told(store: Any, base: str) -> None:
    store.put("box/a.bin", CONTENT[:1000])
    item = the(f"{base}box/a.bin")
    store.refuse("a.bin", 503, times=2, Retry_After="0")
    told: list[str] = []
    with downloads_shown(DownloadDisplay(lambda name: nullcontext(), told.append)):
        assert read(item) == CONTENT[:1000]
    assert told and item.name in told[0] and "trying again in" in told[0]


@both
def test_a_server_that_stays_away_is_given_up(store: Any, base: str) -> None:
    store.put("box/a.bin", CONTENT)
    item = the(f"{base}box/a.bin")
    store.requests.clear()
    store.cut("a.bin", after=0, times=1000)
    words = problem(read, item)
    assert "tried 6 times in a row" in words and "it resumes" in words
    assert f"{base}box/a.bin" in words and len(store.requests) >= 6


def test_a_server_that_hangs_is_given_up(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "TIMEOUT", 0.05)
    item = the(store.put("a.bin", CONTENT[:1000]))
    store.hang("a.bin", 0.5, times=2)
    assert read(item) == CONTENT[:1000]
    store.hang("a.bin", 0.5, times=1000)
    assert "no answer for" in problem(read, item)


def test_a_bucket_that_hangs_is_given_up(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_TIMEOUT", 0.3)
    store.put("box/a.bin", CONTENT[:1000])
    item = the(f"{s3()}box/a.bin")
    store.hang("a.bin", 1.0, times=1)
    assert read(item) == CONTENT[:1000]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shifted", "the server sends bytes 1 to"),
        ("whole", "does not send parts of a file"),
        ("longer", "of them) where 0 to 131071 were asked for"),
    ],
)
def test_wrong_answers_are_no_content(store: Any, kind: str, words: str) -> None:
    item = the(store.put("a.bin", CONTENT))
    store.spoil("a.bin", kind, times=1000)
    with open_remote(item) as file:
        assert words in problem(file.read, 1000)


def test_what_is_missing_or_barred_says_so(store: Any, base: str) -> None:
    words = problem(the, f"{base}box/nothing.jsonl")
    assert "there is nothing at this address" in words and f"{base}box/nothing.jsonl" in words
    store.put("box/secret.jsonl", b"{}")
    item = the(f"{base}box/secret.jsonl")
    store.refuse("secret.jsonl", 403, times=1000)
    words = problem(read, item)
    assert "refuses" in words and f"{base}box/secret.jsonl" in words


def test_a_server_without_ranges_or_versions_is_refused(store: Any) -> None:
    url = store.put("a.jsonl", b"{}\n")
    store.ranges = False
    assert "download the file" in problem(the, url)
    assert "a folder" not in problem(the, url)
    assert "name each file" in problem(the, f"{store.url}/*.jsonl")
    assert "name each file" in problem(the, f"{store.url}/folder/")


def test_an_empty_object_is_empty(store: Any, base: str) -> None:
    store.put("box/empty.jsonl", b"")
    item = the(f"{base}box/empty.jsonl")
    assert item.size == 0 and read(item) == b""


def test_lists_are_sorted_and_leave_hidden_ones_out(store: Any, base: str) -> None:
    if base.startswith("http"):
        pytest.skip("the web has no folders")
    names = ["z.jsonl", "a-b/1.jsonl", "a/2.jsonl", "a/10.jsonl", "a/x.txt", "top.txt"]
    hidden = [".hidden.jsonl", "a/.trash/3.jsonl"]
    for name in [*names, *hidden, "a/"]:
        store.put(f"box/crawl/{name}", name.encode())
    store.put("box/crawled/no.jsonl", b"no")

    def found(pattern: str) -> list[str]:
        return [item.name.removeprefix(f"{base}box/crawl/") for item in find_objects(pattern)]

    in_order = ["a/10.jsonl", "a/2.jsonl", "a/x.txt", "a-b/1.jsonl", "top.txt", "z.jsonl"]
    assert found(f"{base}box/crawl/") == found(f"{base}box/crawl") == in_order
    assert found(f"{base}box/crawl/a/*.jsonl") == ["a/10.jsonl", "a/2.jsonl"]
    assert found(f"{base}box/crawl/**/*.jsonl")[-1] == "z.jsonl"
    assert "no object matches" in problem(find_objects, f"{base}box/crawl/*.parquet")


def test_redirects_are_followed_without_the_password(store: Any) -> None:
    target = store.put("there/a.bin", CONTENT[:1000])
    store.moved["here/a.bin"] = target.replace("127.0.0.1", "localhost")
    url = f"{store.url}/here/a.bin".replace("http://", "http://user:pa%20ss@")
    item = the(url)
    assert read(item) == CONTENT[:1000]
    logins = [headers.get("Authorization") for headers in store.headers]
    at_home = [request.startswith("GET /here") for request in store.requests]
    assert [login is not None for login in logins] == at_home and any(at_home)


def test_secrets_are_sent_and_never_shown(store: Any) -> None:
    plain = store.put("a.jsonl", CONTENT[:1000])
    url = plain.replace("http://", "http://user:hunter2@") + SIGNED
    item = the(url)
    assert read(item) == CONTENT[:1000]
    assert all(SIGNED in request for request in store.requests)
    assert item.name == f"{plain}?…" == shown(url)
    store.refuse("a.jsonl", 403, times=1)
    texts = [repr(item), str(item), problem(read, item), item.name]
    store.cut("a.jsonl", after=0, times=1000)
    texts.append(problem(read, item))
    store.objects.clear()
    store.faults.clear()
    texts.append(problem(the, url))
    texts.append(problem(the, "s3://key:hunter2@box/a.jsonl"))
    texts.append(problem(the, f"ftp://user:hunter2@host/a{SIGNED}"))
    for text in texts:
        assert "hunter2" not in text and "0123abcd" not in text
    assert holds_secrets(url) and holds_secrets(plain + SIGNED) and not holds_secrets(plain)
    assert not holds_secrets("s3://box/what?.jsonl") and not holds_secrets("a/b.jsonl")


def test_an_extra_that_is_not_installed_is_named(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme, library in (("s3", "s3fs"), ("gs", "gcsfs.core")):
        monkeypatch.setitem(sys.modules, library, None)
        assert "pip install 'gristmill[remote]'" in problem(the, f"{scheme}://box/a.jsonl")
    assert "known are https://" in problem(the, "azure://box/a.jsonl")


def test_without_credentials_the_error_says_where_they_belong(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    words = problem(the, f"{s3()}box/a.jsonl")
    assert "no credentials were found" in words and "FSSPEC_S3_ANON=true" in words
