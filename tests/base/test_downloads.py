"""A download is complete or absent, resumes where it broke off, and is checked when it arrives."""

from __future__ import annotations

import hashlib
import http.client
import io
import urllib.error
import warnings
from contextlib import nullcontext
from email.message import Message
from pathlib import Path

import pytest

from gristmill.base import downloads
from gristmill.base.caches import cache_folder
from gristmill.base.downloads import download, model_folder
from gristmill.base.errors import Exit, UserError
from gristmill.base.hub import DownloadDisplay, downloads_shown

URL = "https://example.invalid/file.bin"
CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Reply:
    """An answer that may break off early."""

    def __init__(self, status: int, content: bytes, *, sent: int | None, tag: str | None) -> None:
        self.status = status
        self.headers = http.client.HTTPMessage(Message().policy)
        self.headers["Content-Length"] = str(len(content))
        if tag:
            self.headers["ETag"] = tag
        self._body = io.BytesIO(content[:sent])

    def read(self, amount: int) -> bytes:
        return self._body.read(min(amount, 1000))

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *error: object) -> None:
        self._body.close()


class Server:
    """Serves one file, part by part if it is asked to, and breaks off as often as told."""

    def __init__(self, *, breaks: list[int], tag: str | None = '"one"') -> None:
        self.content = CONTENT
        self.tag = tag
        self.breaks = breaks
        self.asked: list[str | None] = []

    def open(self, url: str, *, headers: dict[str, str]) -> Reply:
        assert url == URL
        begin = headers.get("Range")
        self.asked.append(begin)
        sent = self.breaks.pop(0) if self.breaks else None
        if begin and headers.get("If-Range") == self.tag:
            start = int(begin.removeprefix("bytes=").removesuffix("-"))
            if start >= len(self.content):
                none = http.client.HTTPMessage()
                raise urllib.error.HTTPError(url, 416, "Range Not Satisfiable", none, None)
            return Reply(206, self.content[start:], sent=sent, tag=self.tag)
        return Reply(200, self.content, sent=sent, tag=self.tag)


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def serve(monkeypatch: pytest.MonkeyPatch, server: Server) -> Server:
    monkeypatch.setattr(downloads, "open_url", server.open)
    return server


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))


def test_a_file_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(monkeypatch, Server(breaks=[]))
    seen: list[tuple[int, int | None]] = []
    to = tmp_path / "deep" / "file.bin"
    download(URL, to=to, sha256=SHA256, size=len(CONTENT), progress=lambda *at: seen.append(at))
    assert to.read_bytes() == CONTENT
    assert names(to.parent) == ["file.bin"]
    assert seen[0] == (1000, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT))
    download(URL, to=to, sha256=SHA256)
    assert len(server.asked) == 1


def test_a_download_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, Server(breaks=[]))
    seen: list[tuple[str, int, int | None]] = []
    display = DownloadDisplay(
        lambda name: nullcontext(lambda done, total: seen.append((name, done, total))),
        note=lambda message: None,
    )
    with downloads_shown(display):
        download(URL, to=tmp_path / "one.bin")
        with downloads_shown(None):
            download(URL, to=tmp_path / "two.bin")
    assert seen[-1] == ("one.bin", len(CONTENT), len(CONTENT))


def test_it_goes_on_where_it_broke_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(monkeypatch, Server(breaks=[3000, 2000, 10]))
    download(URL, to=tmp_path / "file.bin", sha256=SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=3000-", "bytes=5000-", "bytes=5010-"]


def test_a_later_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(monkeypatch, Server(breaks=[3000, 0, 0, 0, 0]))
    with pytest.raises(UserError, match=r"cannot download this file.*2\.93 KiB are kept"):
        download(URL, to=tmp_path / "file.bin", sha256=SHA256)
    assert names(tmp_path) == ["file.bin.part", "file.bin.part.tag"]
    download(URL, to=tmp_path / "file.bin", sha256=SHA256)
    assert server.asked[-1] == "bytes=3000-"
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_part_that_is_whole_but_was_never_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(monkeypatch, Server(breaks=[]))
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    (tmp_path / "file.bin.part.tag").write_text('"one"')
    download(URL, to=tmp_path / "file.bin", sha256=SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT)}-", None]


@pytest.mark.parametrize("tag", ['"two"', None, 'W/"weak"'])
def test_another_version_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str | None
) -> None:
    server = serve(monkeypatch, Server(breaks=[3000, 0, 0, 0, 0], tag=tag))
    with pytest.raises(UserError, match="cannot download"):
        download(URL, to=tmp_path / "file.bin")
    server.content, server.tag = CONTENT[::-1], '"three"'
    download(URL, to=tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize(
    ("expected", "message"),
    [({"sha256": "0" * 64}, "its SHA-256 is"), ({"size": 5}, "it has 10,240 bytes, not 5")],
)
def test_a_wrong_file_is_not_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, object],
    message: str,
) -> None:
    serve(monkeypatch, Server(breaks=[]))
    with pytest.raises(UserError, match=message):
        download(URL, to=tmp_path / "file.bin", **expected)  # type: ignore[arg-type]
    assert names(tmp_path) == []


def test_a_refusal_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(url: str, *, headers: dict[str, str]) -> Reply:
        asked.append(url)
        raise urllib.error.HTTPError(url, 404, "Not Found", http.client.HTTPMessage(), None)

    monkeypatch.setattr(downloads, "open_url", refuse)
    with pytest.raises(UserError, match="404"):
        download(URL, to=tmp_path / "file.bin")
    assert len(asked) == 1


def test_no_network_if_the_user_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(monkeypatch, Server(breaks=[]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="switched off by HF_HUB_OFFLINE"):
        download(URL, to=tmp_path / "file.bin")
    assert server.asked == []


def test_the_cache_is_where_the_field_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/gristmill")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/gristmill")


def test_a_model_folder_is_local_or_comes_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    def snapshot(name: str, *, tqdm_class: object, **options: object) -> str:
        asked.append((name, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").touch()
    assert model_folder(str(tmp_path)) == tmp_path and not asked
    assert model_folder("someone/something") == tmp_path / "snapshot"
    assert model_folder("someone/something@v1", weights=False) == tmp_path / "snapshot"
    settings = ["*.json", "*.txt", "*.model", "chat_template.jinja"]
    common = {
        "repo_type": "model",
        "ignore_patterns": ["*/*", "consolidated*"],
        "local_files_only": False,
    }
    weights = [*settings, "*.safetensors"]
    assert asked == [
        ("someone/something", {"allow_patterns": weights, "revision": None, **common}),
        ("someone/something", {"allow_patterns": settings, "revision": "v1", **common}),
    ]


def test_an_error_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> str:
        raise RuntimeError("the moon is wrong\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UserError) as caught:
        model_folder("someone/something", where="MODEL")
    assert caught.value.exit is Exit.DATA
    assert str(caught.value) == (
        "MODEL: the model 'someone/something' cannot be had from Hugging Face: the moon is wrong"
        "\n    give a run folder, a Hugging Face folder, or a Hugging Face name such as gpt2"
    )


def test_a_disk_that_is_too_small_is_refused_before_the_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warn(*args: object, **options: object) -> str:
        warnings.warn("Not enough free disk space to download the file. It is large.", stacklevel=1)
        raise AssertionError("the download began")

    monkeypatch.setattr("huggingface_hub.snapshot_download", warn)
    with pytest.raises(UserError, match="too small: Not enough free disk space") as caught:
        model_folder("someone/something")
    assert caught.value.exit is Exit.STORAGE and "HF_HOME" in str(caught.value)
