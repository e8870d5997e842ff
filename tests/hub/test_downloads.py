"""A download is complete or absent, resumes where it broke off, and is checked when it arrives."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from gristmill.base.caches import cache_folder
from gristmill.base.errors import Exit, UserError
from gristmill.hub.client import DownloadDisplay, downloads_shown
from gristmill.hub.downloads import download, model_folder

CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Serves one file, part by part if it is asked to, and breaks off as often as told."""

    def __init__(self, *, breaks: list[int], tag: str | None = '"one"', status: int = 200) -> None:
        self.content = CONTENT
        self.tag = tag
        self.breaks = breaks
        self.status = status
        self.asked: list[str | None] = []
        """The ranges of the requests for content."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(server.content, status=server.status)

            def do_GET(self) -> None:
                part = self.headers["Range"]
                server.asked.append(part)
                start = int(part.removeprefix("bytes=").removesuffix("-")) if part else 0
                sent = self.answer(server.content[start:], status=206 if part else server.status)
                self.wfile.write(sent[: server.breaks.pop(0) if server.breaks else None])

            def answer(self, content: bytes, *, status: int) -> bytes:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                if server.tag:
                    self.send_header("ETag", server.tag)
                self.end_headers()
                return content

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/file.bin"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    # The library waits between its attempts.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)


Serve: TypeAlias = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(**facts: Any) -> Server:
        servers.append(Server(**facts))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))


def test_a_file_arrives(tmp_path: Path, serve: Serve) -> None:
    server = serve(breaks=[])
    seen: list[tuple[int, int | None]] = []
    to = tmp_path / "deep" / "file.bin"
    options = {"sha256": SHA256, "size": len(CONTENT), "progress": lambda *at: seen.append(at)}
    download(server.url, to=to, **options)
    assert to.read_bytes() == CONTENT
    assert names(to.parent) == ["file.bin"]
    assert seen[0] == (1000, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT))
    download(server.url, to=to, sha256=SHA256)
    assert len(server.asked) == 1


def test_a_download_is_shown(
    tmp_path: Path, serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    url = serve(breaks=[]).url
    seen: list[tuple[str, int, int | None]] = []
    display = DownloadDisplay(
        lambda name: nullcontext(lambda done, total: seen.append((name, done, total))),
        note=lambda message: None,
    )
    with downloads_shown(display):
        download(url, to=tmp_path / "one.bin")
        with downloads_shown(None):
            download(url, to=tmp_path / "two.bin")
    assert seen[-1] == ("one.bin", len(CONTENT), len(CONTENT))
    # The library shows no bar of its own.
    assert capfd.readouterr() == ("", "")


def test_it_goes_on_where_it_broke_off(tmp_path: Path, serve: Serve) -> None:
    server = serve(breaks=[3000, 2000, 10])
    download(server.url, to=tmp_path / "file.bin", sha256=SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=3000-", "bytes=5000-", "bytes=5000-"]


def test_a_later_command_goes_on(tmp_path: Path, serve: Serve) -> None:
    server = serve(breaks=[3000, *[0] * 6])
    with pytest.raises(UserError, match=r"cannot download this file.*2\.93 KiB are kept"):
        download(server.url, to=tmp_path / "file.bin", sha256=SHA256)
    [part] = names(tmp_path)
    assert part.endswith(".part")
    server.breaks.clear()
    download(server.url, to=tmp_path / "file.bin", sha256=SHA256)
    assert server.asked[-1] == "bytes=3000-"
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_a_part_that_is_whole_but_was_never_named(tmp_path: Path, serve: Serve) -> None:
    server = serve(breaks=[3000, *[0] * 6])
    with pytest.raises(UserError, match="are kept"):
        download(server.url, to=tmp_path / "file.bin", sha256=SHA256)
    [part] = names(tmp_path)
    (tmp_path / part).write_bytes(CONTENT)
    server.asked.clear()
    download(server.url, to=tmp_path / "file.bin", sha256=SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == []


@pytest.mark.parametrize("tag", ['"two"', None, 'W/"weak"'])
def test_another_version_begins_anew(tmp_path: Path, serve: Serve, tag: str | None) -> None:
    server = serve(breaks=[3000, *[0] * 6], tag=tag)
    with pytest.raises(UserError, match="cannot download"):
        download(server.url, to=tmp_path / "file.bin")
    server.breaks.clear()
    server.content, server.tag = CONTENT[::-1], tag and '"three"'
    download(server.url, to=tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT[::-1]
    assert names(tmp_path) == ["file.bin"]


@pytest.mark.parametrize(
    ("expected", "message"),
    [({"sha256": "0" * 64}, "its SHA-256 is"), ({"size": 5}, "it has 10,240 bytes, not 5")],
)
def test_a_wrong_file_is_not_kept(
    tmp_path: Path, serve: Serve, expected: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        download(serve(breaks=[]).url, to=tmp_path / "file.bin", **expected)
    assert names(tmp_path) == []


@pytest.mark.parametrize("status", [404, 500])
def test_a_refusal_is_told(tmp_path: Path, serve: Serve, status: int) -> None:
    server = serve(breaks=[], status=status)
    with pytest.raises(UserError, match=f"cannot download this file.*{status}") as caught:
        download(server.url, to=tmp_path / "file.bin")
    assert caught.value.exit is Exit.DATA and "run the same command again" in str(caught.value)
    assert names(tmp_path) == []


def test_no_network_if_the_user_says_so(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(breaks=[])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="switched off by HF_HUB_OFFLINE"):
        download(server.url, to=tmp_path / "file.bin")
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
